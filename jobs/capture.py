"""Capture: ResponseSet → HiddenStateCache, the target's hidden states beside the ids.

python jobs/capture.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/capture.py --config slipstream.toml
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.engines import EnginePool
from jobs.session import job_main
from pipeline import capture, stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet
from pipeline.config import Config
from pipeline.engines import Engines
from pipeline.errors import ConfigError


def run(
    config: Config,
    responses: stages.Artifact[ResponseSet] | None = None,
    *,
    target_layer_ids: Sequence[int] | None = None,
    engines: Engines | None = None,
) -> stages.Artifact[HiddenStateCache]:
    """The states of the responses (the current ones by default) at the layers that the champion reads.

    Engines that are handed over must have been started for the same layers, and stay up.
    """
    responses = responses or stages.current(config.root, "responses", ResponseSet)
    layer_ids = tuple(target_layer_ids or layers_to_capture(config))
    if engines is not None:
        return capture.run(config, responses, engines=engines, target_layer_ids=layer_ids)
    with EnginePool(config, target_layer_ids=layer_ids) as pool:
        return capture.run(config, responses, engines=pool, target_layer_ids=layer_ids)


def layers_to_capture(config: Config) -> tuple[int, ...]:
    """The configured layers or, where none are, those of the current champion.

    Raises: ConfigError when the two differ; StageError when there is neither.
    """
    configured = config.drafter.target_layer_ids
    names = config.root / "current.json"
    if configured and not (names.exists() and "champion" in json.loads(names.read_text())):
        return configured
    champion = stages.current(config.root, "champion", DrafterCheckpoint)
    layers = tuple(json.loads((champion.folder / "config.json").read_text())["dflash_config"]["target_layer_ids"])
    if configured and configured != layers:
        raise ConfigError(
            f"drafter.target_layer_ids = {list(configured)}, but the champion in {champion.folder} reads "
            f"{list(layers)}; states of other layers are of no use to it. Drop the setting, or train a new champion"
        )
    return layers


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and remember its result as ``states``."""
    stages.set_current(config.root, "states", run(config))


if __name__ == "__main__":
    job_main(__doc__, main)
