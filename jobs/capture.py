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
from pipeline.fingerprint import require_present_target


def run(
    config: Config,
    responses: stages.Artifact[ResponseSet] | None = None,
    *,
    target_layer_ids: Sequence[int] | None = None,
    engines: Engines | None = None,
) -> stages.Artifact[HiddenStateCache]:
    """The states of the responses (the current ones by default) at the layers that the champion reads.

    What regenerate kept in its pass is found done. Engines that are handed over must have been made for these layers.
    """
    responses = responses or stages.current(config.root, "responses", ResponseSet)
    layer_ids = tuple(target_layer_ids or layers_to_capture(config))
    engines = engines or EnginePool(config, target_layer_ids=layer_ids)
    return capture.run(config, responses, engines=engines, target_layer_ids=layer_ids)


def layers_to_capture(config: Config) -> tuple[int, ...]:
    """The configured layers or, where none are, those of the current champion.

    Raises: ConfigError when the two differ; FingerprintError when the champion is another target's; StageError when
    there is neither.
    """
    configured = config.drafter.target_layer_ids
    if configured and not _has_champion(config):
        return configured
    champion = stages.current(config.root, "champion", DrafterCheckpoint)
    folder, target = champion.folder, config.target
    # Before hours of answers and states that it could not learn from.
    require_present_target(champion.manifest.fingerprint, target.model, dtype=target.dtype, where=f"champion {folder}")
    layers = tuple(json.loads((folder / "config.json").read_text())["dflash_config"]["target_layer_ids"])
    if configured and configured != layers:
        raise ConfigError(
            f"drafter.target_layer_ids = {list(configured)}, but the champion in {folder} reads "
            f"{list(layers)}; states of other layers are of no use to it. Drop the setting, or train a new champion"
        )
    return layers


def layers_if_known(config: Config) -> tuple[int, ...]:
    """The layers to capture; none where there is neither a setting nor a champion yet. Raises: as above."""
    if not config.drafter.target_layer_ids and not _has_champion(config):
        return ()
    return layers_to_capture(config)


def champion_folder(config: Config) -> Path:
    """The current champion's drafter. Raises: StageError when there is none."""
    return stages.current(config.root, "champion", DrafterCheckpoint).folder


def _has_champion(config: Config) -> bool:
    return "champion" in stages.current_names(config.root)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and remember its result as ``states``."""
    stages.set_current(config.root, "states", run(config))


if __name__ == "__main__":
    job_main(__doc__, main)
