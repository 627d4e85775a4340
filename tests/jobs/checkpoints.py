"""Drafter folders as the artifacts that stages leave behind."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.artifacts import DrafterCheckpoint, commit, describe_file
from pipeline.stages import Artifact

FILES = ("config.json", "model.safetensors")


def as_checkpoint(
    root: Path,
    source: Path,
    *,
    name: str | None = None,
    role: str = "challenger",
    parents: Mapping[str, str] | None = None,
) -> Artifact[DrafterCheckpoint]:
    """A copy of a drafter folder under a run root, with its manifest; ``name`` is its derivation id."""
    folder = root / "drafters" / (name or source.name)
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).write_bytes((source / file).read_bytes())
    manifest = DrafterCheckpoint(
        derivation_id=folder.name,
        parents=dict(parents or {}),
        shards=tuple(describe_file(folder / file) for file in FILES),
        role=role,
        block_size=4,
        mask_token_id=2,
    )
    commit(folder, manifest)
    return Artifact(folder, manifest)
