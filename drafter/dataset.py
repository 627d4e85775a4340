"""Cached rows as tensors: states are mapped from disk and reach torch without a copy."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.artifacts import HiddenStateCache
from pipeline.errors import SchemaError
from pipeline.schemas import CACHE
from pipeline.shards import read_tables
from pipeline.stages import Artifact


@dataclass(frozen=True)
class CachedRow:
    """One reply: exact ids, and where its states are."""

    row_id: str
    slice: str
    ids: Tensor  # int64 [n], prompt and reply
    num_prompt_tokens: int
    states: Tensor  # bfloat16 [n - 1, F], of positions 0..n-2; a read-only view of the file

    @property
    def num_tokens(self) -> int:
        """Prompt and reply tokens."""
        return self.ids.shape[0]


@dataclass(frozen=True)
class Batch:
    """Rows with the anchors drawn for them, padded to one length."""

    states: Tensor  # [D, T, F]
    anchors: Tensor  # int64 [D, A]; 1 where it is padding
    is_real: Tensor  # bool [D, A]
    anchor_ids: Tensor  # int64 [D, A]
    labels: Tensor  # int64 [D, A, B - 1]

    @property
    def num_blocks(self) -> int:
        """Blocks that count."""
        return int(self.is_real.sum())


def read_rows(cache: Artifact[HiddenStateCache], split: str) -> list[CachedRow]:
    """The rows of one split, in stored order. Raises: SchemaError when a file is not what the table says."""
    table = read_tables(cache.folder, cache.manifest.shards, CACHE)
    files: dict[str, pa.ipc.RecordBatchFileReader] = {}
    rows = []
    for row in table.to_pylist():
        if row["split"] != split:
            continue
        name = row["states_file"]
        if name not in files:
            files[name] = pa.ipc.open_file(pa.memory_map(str(cache.folder / name)))
        states = _states_of(files[name], row["states_batch"], cache.folder / name)
        if states.shape[0] != row["num_states"] or len(row["ids"]) != row["num_states"] + 1:
            raise SchemaError(
                f"{cache.folder / name}: row {row['row_id']} has {states.shape[0]} states, {row['num_states']} in "
                f"the table, and {len(row['ids'])} ids; remove {cache.folder} and capture again"
            )
        ids = torch.tensor(row["ids"], dtype=torch.int64)
        rows.append(CachedRow(row["row_id"], row["slice"], ids, row["num_prompt_tokens"], states))
    return rows


def collate(rows: Sequence[CachedRow], anchors: Sequence[Tensor], block_size: int, dtype: torch.dtype) -> Batch:
    """The batch of these rows and their anchors (each int64 [m], m may be 0). Raises: SchemaError on NaN or Inf."""
    width = max(len(a) for a in anchors)
    length = max(int(a.max()) for a in anchors if len(a))
    D, F = len(rows), rows[0].states.shape[1]
    states = torch.zeros(D, length, F, dtype=dtype)
    positions = torch.ones(D, width, dtype=torch.int64)
    is_real = torch.zeros(D, width, dtype=torch.bool)
    anchor_ids = torch.zeros(D, width, dtype=torch.int64)
    labels = torch.zeros(D, width, block_size - 1, dtype=torch.int64)
    slots = torch.arange(1, block_size)
    for i, (row, drawn) in enumerate(zip(rows, anchors, strict=True)):
        m = len(drawn)
        if m == 0:
            continue
        end = min(length, row.states.shape[0])
        states[i, :end] = row.states[:end]
        positions[i, :m], is_real[i, :m] = drawn, True
        anchor_ids[i, :m] = row.ids[drawn]
        labels[i, :m] = row.ids[(drawn[:, None] + slots).clamp_max(row.num_tokens - 1)]
    if not torch.isfinite(states).all():
        bad = [row.row_id for i, row in enumerate(rows) if not torch.isfinite(states[i]).all()]
        raise SchemaError(f"rows {bad}: cached states are not finite; capture them again")
    return Batch(states, positions, is_real, anchor_ids, labels)


def _states_of(reader: pa.ipc.RecordBatchFileReader, batch: int, path: Path) -> Tensor:  # bfloat16 [n, F]
    column = reader.get_batch(batch).column(0)
    if not pa.types.is_fixed_size_binary(column.type):
        raise SchemaError(f"{path}: column of {column.type}, expected fixed-size binary; see schemas.states_schema")
    width = column.type.byte_width
    words = np.frombuffer(column.buffers()[1], np.uint8, len(column) * width, column.offset * width)
    # Mapped files are read-only, which numpy's view keeps and torch only warns of: nothing here writes to it.
    words = words.view(np.int16).reshape(len(column), width // 2)
    return _from_readonly(words).view(torch.bfloat16)


def _from_readonly(words: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(words)
