"""A whole retraining that nobody touches: a real Airflow, a real vLLM with a tiny target, a drift alarm.

A server serves generated mails with a cold-started drafter. Airflow watches; an alarm is written as `slipstream watch`
writes it; what happens then is the scheduler's and the jobs' alone.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from bench.oracles.airflow_standalone import AIRFLOW, Airflow, standalone
from jobs import init_drafter
from jobs.registry import Registry
from jobs.session import ray_session
from pipeline.artifacts import write_durably
from pipeline.config import Config, load_config
from pipeline.due import ALARMS
from pipeline.retrainings import on_record
from pipeline.workloads import support_mails
from serving.deploy import status
from serving.launch import VllmServer
from serving.load import drive_sync

CHECKOUT = Path(__file__).resolve().parents[2]
DAGS = CHECKOUT / "infra" / "airflow"
NUM_MAILS = 40
TOKEN = "the token of this cycle"
RETRAINING, WATCHING = "slipstream_mails", "slipstream_mails_watch"


@dataclass(frozen=True)
class Cycle:
    """What came of it."""

    champion_before: str | None
    champion_after: str | None
    serves: str
    """The version that the replica says it serves."""
    reasons: tuple[str, ...]
    """Why the run began, as it is on record."""
    outcome: str | None
    began_by: str
    """asset_triggered: by the alarm, not by the clock."""
    state: str
    tasks: dict[str, str]
    """Task → its state."""
    runs: int
    """Runs of the retraining's DAG: the alarm begins one."""
    seconds: float
    """From the alarm to the end of the run."""


def scheduled_cycle(folder: Path, *, airflow: Path = AIRFLOW, timeout_s: float = 3600.0) -> Cycle:
    """The cycle on a tiny target in a folder. On two cores it takes some ten minutes.

    Raises: RuntimeError with what was going on where it does not end in time.
    """
    toml = _settings(folder)
    config = load_config(toml)
    os.environ[config.serving.token_env] = TOKEN
    # With a key drawn anew, few subjects would now and then leave no row to judge with.
    os.environ.setdefault(config.split_key_env, "the split key of this cycle")
    with ray_session():
        init_drafter.run(config)
    registry, model = Registry(None, config.root), config.model_name
    server = _server(config, registry.download(model, "1"))
    with server:
        _serve_mails(server, config.root / "traffic")
        before = registry.alias(model, "champion")
        replicas = shlex.quote(f"serving.replicas={json.dumps([server.base_url])}")
        arguments = f"--config {toml} --set evaluate.server_url={server.base_url} --set {replicas}"
        with standalone(folder / "airflow", DAGS, _airflow_settings(config, arguments), airflow=airflow) as scheduler:
            for dag in (WATCHING, RETRAINING):
                scheduler.unpause(dag)
            _until(lambda: _ended(scheduler, WATCHING), "nothing was watched", 300)
            quiet = len(scheduler.runs(RETRAINING))
            alarmed = time.monotonic()
            _alarm(config)
            _until(lambda: len(_ended(scheduler, RETRAINING)) > quiet, "the retraining did not end", timeout_s)
            seconds = time.monotonic() - alarmed
            return _told(scheduler, registry, config, server, before, quiet, seconds)


def _told(
    scheduler: Airflow,
    registry: Registry,
    config: Config,
    server: VllmServer,
    before: str | None,
    quiet: int,
    seconds: float,
) -> Cycle:
    runs = sorted(scheduler.runs(RETRAINING), key=lambda run: run["run_after"])
    alarmed = [run for run in runs if run["run_type"] == "asset_triggered"]
    run, records = alarmed[0] if alarmed else runs[-1], on_record(config.root)
    return Cycle(
        champion_before=before,
        champion_after=registry.alias(config.model_name, "champion"),
        serves=status(server.base_url, TOKEN)["version"],
        reasons=records[0].reasons if records else (),
        outcome=records[0].outcome if records else None,
        began_by=run["run_type"],
        state=run["state"],
        tasks={task["task_id"]: task["state"] for task in scheduler.tasks(RETRAINING, run["dag_run_id"])},
        runs=len(runs) - quiet,
        seconds=round(seconds, 1),
    )


def _settings(folder: Path) -> Path:
    sys.path.insert(0, str(CHECKOUT / "tests"))
    from tiny import tiny_target

    target = tiny_target(folder / "target", layers=6, favourite=300)
    path = folder / "slipstream.toml"
    path.write_text(f'root = "{folder}/runs"\n[target]\nmodel = "{target}"\n{_SMALL}')
    return path


# A random target's replies repeat themselves, and nothing here is a claim about speed or acceptance.
_SMALL = """dtype = "float32"
max_model_len = 1024
[drafter]
block_size = 4
target_layer_ids = [1, 3, 4]
[init]
num_prompts = 32
steps = 6
[collect]
sources = ["runs/traffic"]
redaction = "none"
gate_share = 0.4
[regenerate]
max_tokens = 24
[train]
steps = 12
blocks_per_step = 32
anchors_per_row = 8
checkpoint_every = 6
walk_rows = 4
sampled_vocabulary = 64
[evaluate]
concurrency = 4
max_tokens = 24
max_repeat_share = 1.0
blocks = 3
general_prompts = 4
[gate]
min_lift = 0.01
min_slice_lift = 0.01
min_general_lift = 0.01
min_position_ratio = 0.0
min_speed_ratio = 0.001
max_tail_ratio = 1000.0
min_clusters = 4
resamples = 1000
[retrain]
min_new_requests = 1_000_000  # by its traffic alone it would not begin
[serving]
replicas = []
"""


def _server(config: Config, drafter: Path) -> VllmServer:
    return VllmServer(
        model=config.target.model,
        drafter=drafter,
        log=config.root / "server.log",
        dtype="float32",
        max_model_len=1024,
        tap_dir=config.root / "traffic",
        tap_consent="header:x-consent=yes",
        tap_subject_header="x-subject",
        tap_slice_header="x-slice",
        drafter_roots=[config.root],
        token=TOKEN,
        prefix_caching=False,
    )


def _serve_mails(server: VllmServer, traffic: Path) -> None:
    mails = list(islice(support_mails.prompts(NUM_MAILS, seed=3), NUM_MAILS))
    asked = {"model": server.served_name, "max_tokens": 24, "temperature": 0.0}
    headers = [{"x-consent": "yes", "x-subject": mail["conversation"], "x-slice": "mail"} for mail in mails]
    requests = [{**asked, "messages": mail["messages"]} for mail in mails]
    replies = drive_sync(server.base_url, requests, concurrency=8, headers=headers)
    if failed := [reply.error for reply in replies if not reply.ok]:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    written = lambda: sum(log.read_bytes().count(b"\n") for log in traffic.glob("*.jsonl")) >= NUM_MAILS  # noqa: E731
    _until(written, "the tap has not written what was served", 60)


def _airflow_settings(config: Config, arguments: str) -> dict[str, str]:
    return {
        "SLIPSTREAM_DAGS": json.dumps({"mails": arguments}),
        "SLIPSTREAM_COMMAND": f"env PYTHONPATH={CHECKOUT} {sys.executable} -m jobs.cli",
        "SLIPSTREAM_WATCH": "",  # the alarm is this cycle's own
        "SLIPSTREAM_WATCH_SCHEDULE": "* * * * *",
        # Not speed: on two cores the target alone is faster, and the gate would say so and promote nobody.
        "SLIPSTREAM_STAGES": "collect,regenerate,capture,train,evaluate,promote,deploy",
        "SLIPSTREAM_SCHEDULE": "0 0 1 1 *",  # its last moment is long past: one run, which finds nothing due
        "SLIPSTREAM_RETRY_MINUTES": "0.1",
        config.serving.token_env: TOKEN,
    }


def _alarm(config: Config) -> None:
    alarm = {"id": "accepted-mail-1", "kind": "accepted", "at": datetime.now(UTC).isoformat(timespec="seconds")}
    write_durably(config.root / ALARMS, json.dumps([alarm]).encode())


def _ended(scheduler: Airflow, dag: str) -> list[dict[str, Any]]:
    return [run for run in scheduler.runs(dag) if run["state"] in ("success", "failed")]


def _until(is_so: Callable[[], Any], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} within {timeout_s:.0f} s")
        time.sleep(1)
