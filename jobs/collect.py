"""Collect: served requests → PromptSet.

python jobs/collect.py --config slipstream.toml --set collect.redaction.names=not_redacted
ray job submit --working-dir . -- python jobs/collect.py --config slipstream.toml
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.session import job_main
from jobs.tasks import Tasks
from pipeline import collect, stages
from pipeline.artifacts import PromptSet
from pipeline.config import Config


def run(config: Config) -> stages.Artifact[PromptSet]:
    """The collected prompts. Logs are read and rows are merged in Ray Data tasks; the split key is read here, once."""
    return collect.run(config, workers=Tasks())


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and remember its result as ``prompts``."""
    stages.set_current(config.root, "prompts", run(config))


if __name__ == "__main__":
    job_main(__doc__, main)
