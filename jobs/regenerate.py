"""Regenerate: PromptSet → ResponseSet, by the target on vLLM.

python jobs/regenerate.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/regenerate.py --config slipstream.toml
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.engines import EnginePool
from jobs.session import job_main
from pipeline import regenerate, stages
from pipeline.artifacts import PromptSet, ResponseSet
from pipeline.config import Config
from pipeline.engines import Engines


def run(
    config: Config, prompts: stages.Artifact[PromptSet] | None = None, *, engines: Engines | None = None
) -> stages.Artifact[ResponseSet]:
    """The target's answers to the prompts (the current ones by default).

    Engines that are handed over stay up, for the next stage; otherwise they are started and stopped here.
    """
    prompts = prompts or stages.current(config.root, "prompts", PromptSet)
    if engines is not None:
        return regenerate.run(config, prompts, engines=engines)
    with EnginePool(config) as pool:
        return regenerate.run(config, prompts, engines=pool)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and remember its result as ``responses``."""
    stages.set_current(config.root, "responses", run(config))


if __name__ == "__main__":
    job_main(__doc__, main)
