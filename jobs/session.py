"""How every job begins: its arguments, its logging, and a Ray to run on."""

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from jobs import worker_log
from pipeline.artifacts import write_durably
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError, Declined, SlipstreamError, StageError
from pipeline.lease import RUN, stage_of_a_run

logger = logging.getLogger("slipstream")

DECLINED = 3
"""Exit status of a command whose answer is no, and nothing is wrong."""
WORKLOAD = "workload"
"""The file under a root that says whose it is."""

# Nothing is reported to anyone, and a local Ray listens on loopback alone.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Our engines and trainers are the work itself: by default Ray's workers yield to every other process.
    "RAY_worker_niceness": "0",
    # Threads that spin while they wait take the cores from the process they wait for: up to a hundred times slower
    # as soon as two engines, or an engine and a trainer, share a machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start_logging() -> None:
    """Log the stages' progress, one line each, with the time: to the terminal, from a local Ray's workers too."""
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, worker_log.ProgressHandler) for handler in logger.handlers):
        logger.addHandler(worker_log.ProgressHandler())
    logger.propagate = False  # Ray's workers have handlers of their own, which would say everything twice


@contextmanager
def ray_session() -> Iterator[None]:
    """A connection to the Ray cluster of this environment, or a local Ray for as long as the block runs."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return
    in_cluster = _in_cluster()
    with nullcontext() if in_cluster else worker_log.relayed():
        try:
            if in_cluster:
                ray.init(address="auto")
            else:
                # "local": never a cluster that someone else happens to run on this machine.
                _start_local_ray()
            yield
        finally:
            ray.shutdown()


def _start_local_ray() -> None:
    """Start a Ray for this process alone; a machine that is busy gets more than Ray's own 30 seconds.

    Raises: StageError when it does not come up in three tries.
    """
    import ray

    # It advises to switch off what keeps other users of this machine out.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    for _ in range(3):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=200_000_000,
                logging_level="WARNING",
                log_to_driver=False,
            )
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            logger.warning("Ray did not come up within 30 s; trying again")
            ray.shutdown()
    raise StageError("a local Ray did not come up in three tries of 30 s; free some processor time, or name a cluster")


def _in_cluster() -> bool:
    """Whether this process belongs to a Ray cluster. If not, sets a token of its own for the local one.

    Left to itself, Ray writes a token into the home folder, and heads started later then refuse everyone who has not
    set RAY_AUTH_MODE. Raises: ConfigError on an address that jobs are submitted to.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"RAY_ADDRESS={address} is where jobs are submitted, not a cluster to join: put it into "
            "RAY_API_SERVER_ADDRESS and use `ray job submit`, or unset it to run here"
        )
    if address or os.environ.get("RAY_JOB_ID"):
        return True
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    return False


def job_main(
    description: str,
    run: Callable[[Config, argparse.Namespace], object],
    *,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
    needs_ray: bool = True,
    prog: str | None = None,
) -> None:
    """Parse ``--config``, ``--set`` and ``--dry-run``, then run the job; exits 1 with a one-line error, and 3 where
    there is nothing to do or the gate said no (``Declined``).

    Jobs that only talk to MLflow and to replicas set ``needs_ray`` to False: a rollback must wait for no cluster, and
    for no run. The others refuse to work while it is the turn of a run that they are no stage of.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("slipstream.toml"), help="the configuration (TOML)")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override one setting"
    )
    parser.add_argument("--group", metavar="NAME", help="the drafter of one group of tenants: the table [groups.NAME]")
    parser.add_argument("--run", metavar="RUN", help="the run that this is a stage of (slipstream due --begin)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    if add_arguments:
        add_arguments(parser)
    arguments = parser.parse_args(argv)
    start_logging()
    if arguments.run:
        os.environ[RUN] = arguments.run
    try:
        config = load_config(arguments.config, arguments.overrides, group=arguments.group)
        if arguments.dry_run:
            print(config.model_dump_json(indent=1))
            return
        with _root_of_one_workload(config), _as_a_stage(config) if needs_ray else nullcontext():
            run(config, arguments)
    except SlipstreamError as error:
        error = getattr(error, "cause", None) or error  # what was raised in a Ray task, without Ray's traceback
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(DECLINED if isinstance(error, Declined) else 1)


@contextmanager
def _root_of_one_workload(config: Config) -> Iterator[None]:
    """Two files that name one root by mistake would train one workload's drafter from the other's.

    Raises: ConfigError when another workload works there.
    """
    path = config.root / WORKLOAD
    found = path.read_text() if path.exists() else None
    if found not in (None, config.workload):
        raise ConfigError(
            f"{config.root}: the root of workload {found}, not of {config.workload}: nothing may leak between them. "
            "Set another root, or the same workload"
        )
    yield
    if found is None and config.root.exists():
        with suppress(OSError):  # a disk that is only read
            write_durably(path, config.workload.encode())


@contextmanager
def _as_a_stage(config: Config) -> Iterator[None]:
    lease_s = 60 * config.retrain.lease_minutes
    with stage_of_a_run(config.root, seconds=lease_s), ray_session():
        yield
