"""Sweep: the champion on current states, a short run at each learning rate → the rate to set, and a table.

python jobs/sweep.py --config slipstream.toml
python jobs/sweep.py --config slipstream.toml --set sweep.learning_rates=[5e-4,1e-3,2e-3] --set sweep.steps=100
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import train, unlearn
from jobs.session import job_main
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, SweepReport
from pipeline.config import Config
from pipeline.errors import DivergedError
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")


def run(
    config: Config,
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint],
    replay: Sequence[Artifact[HiddenStateCache]] = (),
) -> Artifact[SweepReport]:
    """The report over all rates; each run is an artifact of its own, and an MLflow run, but those that diverged."""
    from drafter import sweep

    runs: dict[float, Artifact[DrafterCheckpoint] | None] = {}
    for rate, one in sweep.trials(config).items():
        try:
            runs[rate] = train.run(one, states, start=start, role="sweep", replay=replay)
        except DivergedError as error:
            logger.warning("sweep: learning rate %g diverged: %s", rate, error)
            runs[rate] = None
    return sweep.run(config, runs)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Sweep from the current champion, and print the table and what follows from it."""
    from drafter.sweep import TABLE, advice

    states = stages.current(config.root, "states", HiddenStateCache)
    start = unlearn.clean_start(config, stages.current(config.root, "champion", DrafterCheckpoint))
    replay = train.to_replay(config, states, role="challenger", named=arguments.replay)
    report = run(config, states, start=start, replay=replay)
    print((report.folder / TABLE).read_text())
    print("\n".join([*advice(report.manifest), f"{report.folder / TABLE}"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is replayed."""
    train.add_replay(parser)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments)
