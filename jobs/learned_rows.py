"""Which rows a drafter learned from, read from the data itself: manifests count rows and don't name them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.artifacts import MANIFEST, HiddenStateCache, PromptSet, ResponseSet

# The nearest to training first: on the way from prompts to states rows are rejected, with reasons.
_KINDS = (HiddenStateCache.kind, ResponseSet.kind, PromptSet.kind)


@dataclass(frozen=True)
class Rows:
    """The rows of the train set of one artifact."""

    kind: str
    derivation: str
    ids: list[str]


@dataclass(frozen=True)
class Found:
    """A row in an artifact."""

    kind: str
    derivation: str
    split: str


def all_of(root: Path, data: Mapping[str, str]) -> list[Rows | None]:
    """The rows of a drafter's own data, then of what it replayed; ``data`` is that of ``attachments.data_behind``."""
    groups: dict[str, dict[str, str]] = {"": {}}
    for name, derivation in data.items():
        group, _, kind = name.rpartition(".")
        groups.setdefault(group, {})[kind] = derivation
    return [of(root, some) for some in groups.values()]


def of(root: Path, data: Mapping[str, str]) -> Rows | None:
    """The rows that a drafter with this data behind it (kind → derivation id) learned from; None where it is absent.

    Where the states were removed, or passed through a stream, the responses that they were made from stand for them,
    then the prompts: rows that were rejected on the way are then among them.
    """
    for kind in _KINDS:
        folder = Path(root) / kind / data.get(kind, "")
        if kind in data and _holds_train_rows(folder) and (tables := _tables(folder)):
            derivation = data[kind]
            splits = [split for table in tables for split in _splits(table)]
            return Rows(kind, derivation, sorted(row_id for row_id, split in splits if split == "train"))
    return None


def holding(root: Path, row_id: str) -> list[Found]:
    """Every artifact under a root that has a row, and the set that the row is in there."""
    found = []
    for kind in reversed(_KINDS):
        for folder in sorted((Path(root) / kind).glob("*/")):
            for table in _tables(folder):
                if (split := dict(_splits(table)).get(row_id)) is not None:
                    found.append(Found(kind, folder.name, split))
    return found


def _holds_train_rows(folder: Path) -> bool:
    """Whether the train rows would be here: the cache of a streamed run holds the others alone."""
    path = folder / MANIFEST
    return not path.exists() or "train" in json.loads(path.read_text()).get("splits", ["train"])


def _tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def _splits(table: Path) -> Iterator[tuple[str, str]]:
    columns = pq.read_table(table, columns=["row_id", "split"])
    yield from zip(columns["row_id"].to_pylist(), columns["split"].to_pylist(), strict=True)
