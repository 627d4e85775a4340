"""Due: is a retraining due, and why? One line of JSON; exit status 0 when it is, 3 when not.

python jobs/due.py --config slipstream.toml
python jobs/due.py --config slipstream.toml --begin RUN    if it is due: run RUN begins, and others wait for it
python jobs/due.py --config slipstream.toml --end RUN      it is over: what came of it, on record

Between the two, a scheduler runs the stages with `--run RUN`, or with SLIPSTREAM_RUN=RUN in their environment; without
it they refuse.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.session import job_main
from pipeline import due, lease, retrainings
from pipeline.config import Config
from pipeline.due import Due
from pipeline.errors import Declined
from pipeline.retrainings import Retraining
from pipeline.sources.found import stored_logs

logger = logging.getLogger("slipstream")


def run(config: Config) -> Due:
    """The answer. Raises: as ``pipeline.due.run``."""
    return due.run(config)


def begin(config: Config, run_id: str, *, seconds: float, with_process: bool = False, now: bool = False) -> Due:
    """The answer and, where it is yes, the run on record with the lease for so many seconds.

    ``with_process``: the lease ends with this process. ``now``: begin although nothing asks for it. A run that has
    begun already and is not through is due, so that a task which is tried again goes on with it.

    Raises: StageError when it is another run's turn.
    """
    if retrainings.goes_on(retrainings.on_record(config.root), run_id):
        answer = Due(due=True, reasons=("begun: this run has begun already",))
    elif not ((answer := due.run(config, asked_by=run_id)).due or now):
        return answer
    lease.take(config.root, run_id, seconds=seconds, with_process=with_process)
    try:
        return _begun(config, run_id, answer, now=now)
    except BaseException:
        lease.release(config.root, run_id)
        raise


def _begun(config: Config, run_id: str, answer: Due, *, now: bool) -> Due:
    """The answer, and the run on record where it still is yes, now that nobody else can begin one."""
    if not retrainings.goes_on(retrainings.on_record(config.root), run_id):
        answer = due.run(config, asked_by=run_id)
        if not (answer.due or now):
            lease.release(config.root, run_id)
            return answer
    logs = {name: stored.size_bytes for name, stored in stored_logs(config.collect.sources).items()}
    reasons = answer.reasons if answer.due else ("asked: begun by hand", *answer.reasons)
    retrainings.begin(config.root, run_id, now=time.time(), reasons=reasons, alarms=answer.alarms, sources=logs)
    logger.info("retrain: run %s begins: %s", run_id, "; ".join(reasons))
    return answer.model_copy(update={"due": True, "reasons": reasons})


def end(config: Config, run_id: str, *, failed: bool = False) -> Retraining | None:
    """What came of a run, on record; its lease is anybody's again. None where it never began."""
    record = retrainings.end(config.root, run_id, now=time.time(), failed=failed)
    lease.release(config.root, run_id)
    return record


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Print the answer, or the record of a run that is over."""
    if arguments.end:
        record = end(config, arguments.end)
        print("{}" if record is None else record.model_dump_json())
        return
    minutes = config.retrain.lease_minutes
    answer = begin(config, arguments.begin, seconds=60 * minutes) if arguments.begin else run(config)
    print(answer.model_dump_json(), flush=True)
    if not answer.due:
        raise Declined(f"no retraining is due: {answer.waits or 'nothing asks for one'}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For schedulers that run the stages one by one."""
    parser.add_argument("--begin", metavar="RUN", help="if it is due, begin this run: others wait until it ends")
    parser.add_argument("--end", metavar="RUN", help="this run is over")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
