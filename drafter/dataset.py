"""Cached rows: exact ids, and states that stay where they are until a pass needs them (drafter/packing.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from drafter.disk_states import DiskStates, StatesFolder
from pipeline.artifacts import MANIFEST, HiddenStateCache, Shard
from pipeline.config import CaptureConfig
from pipeline.errors import SchemaError
from pipeline.schemas import CACHE
from pipeline.shards import part_path, read_tables
from pipeline.shards import read_part as read_record
from pipeline.stages import Artifact, hold_for_reading
from pipeline.staging import STAGED, Staging

# Of states that are mixed with each other in an epoch: a page cache holds so much while they are read.
WINDOW_BYTES = 8 << 30


@dataclass(frozen=True)
class CachedRow:
    """One reply: exact ids, and where its states are."""

    row_id: str
    slice: str
    ids: Tensor  # int64 [n], prompt and reply
    num_prompt_tokens: int
    states: Tensor | DiskStates  # [n - 1, F], of positions 0..n-2
    weight: int = 1  # how many served requests it stands for

    @property
    def num_tokens(self) -> int:
        """Prompt and reply tokens."""
        return self.ids.shape[0]


def read_rows(cache: Artifact[HiddenStateCache], split: str, *, staging_bytes: int | None = None) -> list[CachedRow]:
    """The rows of one split, in stored order; their states stay on disk, or on storage, until a batch needs them.

    States that are on storage are staged under the run root, within ``staging_bytes`` (by default what capture was
    configured with). For as long as there are rows, their cache is not removed to make room for another.

    Raises: SchemaError when a file is not what the manifest says.
    """
    staging, manifest, held = None, cache.manifest, hold_for_reading(cache.folder)
    if not (cache.folder / MANIFEST).exists():
        raise SchemaError(f"{cache.folder}: removed meanwhile, to make room or for its age; capture again")
    if manifest.storage is not None:
        budget = staging_bytes or CaptureConfig.model_validate(manifest.config).staging_bytes
        staging = Staging(manifest.storage, manifest.shards, cache.folder.parents[1] / STAGED, max_bytes=budget)
    files = StatesFolder(cache.folder, manifest.shards, staging=staging, held=held)
    return list(_rows(cache.folder, manifest.shards, files, split))


def read_part(folder: Path, index: int) -> list[CachedRow]:
    """The rows of one committed part, of a folder that need not have a manifest yet. Raises: as ``read_rows``."""
    shards = read_record(part_path(folder, index)).shards
    return list(_rows(folder, shards, StatesFolder(folder, shards), None))


def _rows(folder: Path, shards: Sequence[Shard], files: StatesFolder, split: str | None) -> Iterator[CachedRow]:
    table = read_tables(folder, shards, CACHE)
    if split is not None:
        table = table.filter(pc.equal(table["split"], split))
    for batch in table.to_batches():
        lists = batch.column("ids")
        values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
        for row, start, end in zip(batch.drop_columns("ids").to_pylist(), ends, ends[1:], strict=False):
            if end - start != row["num_states"] + 1:
                raise SchemaError(
                    f"{folder}: row {row['row_id']} has {row['num_states']} states and {end - start} ids, which is one "
                    f"more of all sound rows; remove {folder} and capture again"
                )
            states = DiskStates(files, row["states_file"], row["states_batch"], row["num_states"])
            ids = torch.from_numpy(values[start:end].astype(np.int64))
            yield CachedRow(row["row_id"], row["slice"], ids, row["num_prompt_tokens"], states, row["weight"])


def shard_sizes(rows: Sequence[CachedRow]) -> list[int]:
    """Rows of each run of rows that share a states file: what ``Order`` keeps together."""
    names = (row.states.name if isinstance(row.states, DiskStates) else "" for row in rows)
    return [sum(1 for _ in same) for _, same in groupby(names)]


def window_rows(rows: Sequence[CachedRow]) -> int:
    """Rows that ``Order`` may mix: as many as fit into memory or, where states are staged, into half of that budget."""
    if not rows or not isinstance(rows[0].states, DiskStates):
        return max(1, len(rows))
    staging = staging_of(rows)
    budget = staging.max_bytes // 2 if staging else WINDOW_BYTES
    return max(1, int(budget / rows[0].states.files.bytes_per_row))


def staging_of(rows: Sequence[CachedRow]) -> Staging | None:
    """What stages the states of these rows of one cache; None where they are on this disk."""
    return rows[0].states.files.staging if rows and isinstance(rows[0].states, DiskStates) else None
