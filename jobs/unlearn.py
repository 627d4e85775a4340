"""Drafter versions that learned from what was erased: their deadlines in MLflow, and where a lineage begins anew."""

import logging
from collections.abc import Collection
from datetime import datetime, timedelta

from jobs.history import nothing_registered
from jobs.registry import UNLEARN_BY, UNLEARN_WHY, Registry, Version, chain_of
from pipeline.artifacts import DrafterCheckpoint, artifact_dir, find
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")


def tag(config: Config, data: Collection[str], *, why: str, now: datetime) -> dict[str, str]:
    """Version → deadline of all that learned from one of these artifacts, themselves or through an ancestor.

    A deadline that is set already stays.
    """
    if not data or nothing_registered(config):
        return {}
    registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
    versions = {version.derivation: version for version in registry.versions(model)}
    due = (now + timedelta(days=config.retention.unlearn_days)).date().isoformat()
    tagged = {}
    for version in versions.values():
        if any(set(data).intersection(one.data.values()) for one in chain_of(versions, version)):
            if version.unlearn_by is None:
                registry.tag(model, version.number, UNLEARN_WHY, why)
                registry.tag(model, version.number, UNLEARN_BY, due)
            tagged[version.number] = version.unlearn_by or due
    return tagged


def clean_start(config: Config, champion: Artifact[DrafterCheckpoint]) -> Artifact[DrafterCheckpoint]:
    """The drafter to train from: the champion or, where it has a deadline, its last ancestor without one.

    Raises: StageError when every ancestor has one, or the one without is not under the root.
    """
    if nothing_registered(config):
        return champion
    registry = Registry(config.promote.tracking_uri, config.root)
    versions = {version.derivation: version for version in registry.versions(config.model_name)}
    served = versions.get(champion.id)
    if served is None or served.unlearn_by is None:
        return champion
    clean = next((one for one in chain_of(versions, served) if one.unlearn_by is None), None)
    if clean is None:
        raise StageError(
            f"{config.model_name} version {served.number}, the champion, learned from what was erased (out of service "
            f"by {served.unlearn_by}), and so did every version that it comes from. Begin anew: slipstream init-drafter"
        )
    logger.info(
        "train: version %s learned from what was erased; the lineage begins anew from version %s",
        served.number,
        clean.number,
    )
    return _checkpoint(config, registry, clean)


def _checkpoint(config: Config, registry: Registry, version: Version) -> Artifact[DrafterCheckpoint]:
    """The drafter of a version, under the root or else as the registry holds it."""
    folder = artifact_dir(config.root, DrafterCheckpoint, version.derivation)
    if find(folder, DrafterCheckpoint) is None:
        folder = registry.download(config.model_name, version.number)
    manifest = find(folder, DrafterCheckpoint)
    if manifest is None:
        raise StageError(f"{folder}: no drafter of version {version.number}; adopt one, or slipstream init-drafter")
    return Artifact(folder, manifest)
