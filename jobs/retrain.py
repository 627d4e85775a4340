"""Retrain: the whole loop, if it is due; for cron, a systemd timer, a Kubernetes CronJob or a KubeRay RayJob.

python jobs/retrain.py --config slipstream.toml
python jobs/retrain.py --config slipstream.toml --now    although nothing asks for it
ray job submit --working-dir . -- python jobs/retrain.py --config slipstream.toml

Ends with one line of JSON; exit status 0 where nothing is wrong: a new champion, a challenger that the gate did not let
through, or nothing due. 1 where a run failed, and until the next one begins.
"""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import due
from jobs.session import DECLINED, job_main
from pipeline import lease, retrainings
from pipeline.config import Config
from pipeline.due import Due
from pipeline.errors import StageError
from pipeline.retrainings import Retraining
from serving import supervise
from serving.process_group import GRACE_S

logger = logging.getLogger("slipstream")

CHECKOUT = Path(__file__).resolve().parents[1]
PAUSE_S = 30.0
"""Before another try."""


def run(config: Config, loop: Sequence[str], *, now: bool = False, pause_s: float = PAUSE_S) -> Due | Retraining:
    """What came of a run of ``loop``, the command of the loop; or why none is due.

    The loop is a process of its own: one that hangs is ended after retrain.timeout_hours, one that failed or was
    killed is tried again, retrain.tries times in all, and goes on from what is complete. Where this process is ended
    itself, the run stays on record as killed, and the next one goes on with it.

    Raises: StageError when the last try failed, also for as long as the next run waits after that; or when it is
    another run's turn.
    """
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    lease.outlive(config.root)  # a killed pod's lease has not run out yet when the job is tried again elsewhere
    answer = due.begin(config, run_id, seconds=lease.RENEWED_S, with_process=True, now=now)
    if not answer.due:
        _require_no_failure(config, answer)
        logger.info("retrain: nothing is due: %s", answer.waits or "nothing asks for it")
        return answer
    os.environ[lease.RUN] = run_id
    try:
        with lease.turn(config.root):
            status = _tried(config, loop, pause_s)
    except BaseException:
        lease.release(config.root, run_id)
        raise
    finally:
        del os.environ[lease.RUN]
    has_failed = status not in (0, DECLINED)
    record = due.end(config, run_id, failed=has_failed)
    if has_failed:
        raise StageError(
            f"retrain: run {run_id} failed in {config.retrain.tries} tries (exit status {status}; its log says why). "
            "What is complete is used by the next one"
        )
    assert record is not None
    return record


def _require_no_failure(config: Config, answer: Due) -> None:
    """Raises: StageError where a run is asked for and waits because the last one failed: a scheduler whose own next try
    this is would otherwise call that a success."""
    last = next(reversed(retrainings.on_record(config.root)), None)
    if answer.reasons and last is not None and last.outcome == "failed":
        raise StageError(f"retrain: run {last.run} failed, and the next waits: {answer.waits}. Sooner: --now")


def _tried(config: Config, loop: Sequence[str], pause_s: float) -> int:
    """The exit status of the last try."""
    settings = config.retrain
    for number in range(1, settings.tries + 1):
        status = _run(loop, timeout_s=3600 * settings.timeout_hours)
        if status in (0, DECLINED) or number == settings.tries:
            break
        logger.warning("retrain: try %d of %d ended with status %d; once more", number, settings.tries, status)
        time.sleep(pause_s)
    return status


def _run(loop: Sequence[str], *, timeout_s: float) -> int:
    """The loop's exit status; nothing of it outlives this process, nor the timeout."""
    process = subprocess.Popen(
        [sys.executable, "-S", supervise.__file__, *loop], stdin=subprocess.PIPE, start_new_session=True, cwd=CHECKOUT
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        logger.error("retrain: nothing came of it within %.1f h (retrain.timeout_hours); it is ended", timeout_s / 3600)
        return -signal.SIGALRM
    finally:
        if process.stdin is not None:
            process.stdin.close()  # whereupon the supervisor ends what is left
        try:
            process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the loop if it is due, and print what came of it."""
    loop = [sys.executable, str(CHECKOUT / "jobs" / "loop.py"), "--config", str(arguments.config.resolve())]
    loop += ["--group", arguments.group] if arguments.group else []
    loop += [part for override in arguments.overrides for part in ("--set", override)]
    print(run(config, loop, now=arguments.now).model_dump_json())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to ask."""
    parser.add_argument("--now", action="store_true", help="although nothing asks for it")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
