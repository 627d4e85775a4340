"""Regenerate: PromptSet → ResponseSet, by the target on vLLM.

python jobs/regenerate.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/regenerate.py --config slipstream.toml
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.capture import champion_folder, layers_if_known
from jobs.engines import EnginePool
from jobs.session import job_main
from pipeline import regenerate, stages
from pipeline.artifacts import PromptSet, ResponseSet
from pipeline.config import Config
from pipeline.engines import Engines


def run(
    config: Config,
    prompts: stages.Artifact[PromptSet] | None = None,
    *,
    target_layer_ids: Sequence[int] | None = None,
    engines: Engines | None = None,
) -> stages.Artifact[ResponseSet]:
    """The target's answers to the prompts (the current ones by default).

    Where it is known which layers a drafter reads, their states are kept in the same pass (capture.in_pass). Engines
    that are handed over must have been made for the same layers.
    """
    prompts = prompts or stages.current(config.root, "prompts", PromptSet)
    layer_ids = layers_if_known(config) if target_layer_ids is None else tuple(target_layer_ids)
    engines = engines or engines_of(config, layer_ids)
    return regenerate.run(config, prompts, engines=engines, target_layer_ids=layer_ids)


def engines_of(config: Config, target_layer_ids: Sequence[int]) -> EnginePool:
    """The engines that answer; with regenerate.speculate = "champion" its drafter drafts there.

    Raises: StageError when it is asked for and there is no champion.
    """
    drafter = champion_folder(config) if config.regenerate.speculate == "champion" else None
    return EnginePool(config, target_layer_ids=target_layer_ids, drafter=drafter)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and remember its result as ``responses``."""
    stages.set_current(config.root, "responses", run(config))


if __name__ == "__main__":
    job_main(__doc__, main)
