"""Collect: served requests → PromptSet.

python jobs/collect.py --config slipstream.toml --set collect.redaction=none
ray job submit --working-dir . -- python jobs/collect.py --config slipstream.toml
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import ray

from jobs.session import job_main, start_logging
from pipeline import collect, stages
from pipeline.artifacts import PromptSet
from pipeline.config import Config
from pipeline.split import load_key


def run(config: Config) -> stages.Artifact[PromptSet]:
    """The collected prompts. The log is read in a Ray task; the split key is read here, once."""
    return ray.get(_collect.remote(config, load_key(config)))


@ray.remote
def _collect(config: Config, key) -> stages.Artifact[PromptSet]:
    start_logging()
    return collect.run(config, key=key)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and remember its result as ``prompts``."""
    stages.set_current(config.root, "prompts", run(config))


if __name__ == "__main__":
    job_main(__doc__, main)
