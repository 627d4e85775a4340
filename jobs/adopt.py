"""Adopt: a drafter that serves already → DrafterCheckpoint, version in MLflow, alias `champion`.

python jobs/adopt.py --config slipstream.toml FOLDER
"""

import argparse
import logging
import shutil
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import attachments, preflight
from jobs.registry import PASSED, RETIRED, Registry, data_tags
from jobs.registry.stored import FILES
from jobs.session import job_main
from pipeline.artifacts import DrafterCheckpoint, describe_file, package_versions, sha256_file
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.fingerprint import target_fingerprint
from pipeline.shards import fsync_file
from pipeline.stages import Artifact, complete, set_current

logger = logging.getLogger("slipstream")

STAGE_VERSION = 1


def run(config: Config, folder: Path) -> Artifact[DrafterCheckpoint]:
    """The drafter as an artifact, registered and champion: where the first loop starts.

    Raises: ConfigError when the folder holds no drafter for this target, or another champion serves.
    """
    folder = Path(folder).resolve()
    info = preflight.check(config, folder)
    fingerprint = target_fingerprint(
        config.target.model, dtype=config.target.dtype, target_layer_ids=info.target_layer_ids
    )

    def build(out: Path, derivation: str) -> DrafterCheckpoint:
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(folder / name, out / name)
            fsync_file(out / name)
        return DrafterCheckpoint(
            derivation_id=derivation,
            parents={},
            fingerprint=fingerprint,
            shards=tuple(describe_file(out / name) for name in FILES),
            versions=package_versions(),
            role="champion",
            block_size=info.block_size,
            mask_token_id=info.mask_token_id,
        )

    meaning = {
        "config.json": sha256_file(folder / "config.json"),
        "weights": info.sha256,
        "target": fingerprint.model_dump(mode="json"),
    }
    checkpoint = complete(
        config.root, DrafterCheckpoint, stage="adopt", version=STAGE_VERSION, parents={}, meaning=meaning, build=build
    )
    version = first_champion(config, checkpoint)
    logger.info("adopt: %s is version %s of %s, and champion", folder, version, config.model_name)
    return checkpoint


def first_champion(config: Config, checkpoint: Artifact[DrafterCheckpoint]) -> str:
    """The version of a checkpoint that nothing served before: registered, and champion without a rollout.

    One that was champion before and has been replaced since keeps its version and changes nothing.

    Raises: ConfigError when another version is champion already; that one is replaced by a deploy alone, unless its
    target was retired (`slipstream retire`).
    """
    registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
    champion = registry.alias(model, "champion")
    replaces = champion is not None and registry.derivation(model, champion) != checkpoint.id
    if champion is not None and replaces and registry.state(model, champion) != RETIRED:
        for move in registry.history(model, "champion"):
            if registry.derivation(model, move.version) == checkpoint.id:
                return move.version
        raise ConfigError(
            f"{model}: version {champion} is champion already. To replace it, promote and deploy another; to start "
            "anew for other traffic, choose another `workload`; for another target, `slipstream retire` comes first"
        )
    data = attachments.data_behind(config.root, checkpoint.manifest.parents)
    version = registry.register(model, checkpoint, tags=data_tags(data))
    registry.attach(model, version, attachments.gather(config, version, checkpoint), folder="attached/adopt")
    preflight.check(config, registry.download(model, version, anew=True))
    registry.set_state(model, version, PASSED, reason="served before, nothing to compare it with")
    registry.set_alias(model, "champion", version, expected=champion, reason="adopt")
    return version


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Adopt a folder and remember it as ``champion``."""
    set_current(config.root, "champion", run(config, arguments.folder))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The drafter's folder."""
    parser.add_argument("folder", type=Path, help="config.json and model.safetensors in the z-lab layout")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
