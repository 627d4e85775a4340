"""What near-duplicates are found by: of every prompt a MinHash signature and its pieces, in files that map into memory.

A map stage makes a batch of rows of SKETCHES from a batch of prompts and writes it as an Arrow file; the stage that
compares opens all files. Nothing of it depends on how the rows were dealt into files. The files hold what can be
spelled back into text (pipeline/shingles.py): they lie where the prompts lie, and go when the prompts go.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.artifacts import write_durably
from pipeline.errors import SchemaError
from pipeline.schemas import SPLITS
from pipeline.shingles import Boilerplate, are_in, opening, prompt_shingles
from pipeline.split import SplitKey

NUM_PERM = 128

_PIECE_BYTES = 4
SKETCHES = pa.schema(
    [
        ("row_id", pa.string()),
        ("rank", pa.uint64()),  # keyed hash of the row: the order in which rows are looked at
        ("thread", pa.uint64()),  # keyed hash of the conversation that it is a turn of
        ("split", pa.uint8()),  # index into SPLITS
        ("signature", pa.list_(pa.uint32(), NUM_PERM)),
        ("shingles", pa.large_list(pa.uint32())),  # sorted, each once
    ]
)


@dataclass(frozen=True)
class Sketching:
    """How prompts are sketched; small enough to be sent to every worker."""

    key: SplitKey
    boilerplate: Boilerplate

    @property
    def seed(self) -> int:
        """64 bits that the pieces are hashed under."""
        return shingle_seed(self.key)


def shingle_seed(key: SplitKey) -> int:
    """The seed of pipeline.shingles: of the run root's own key, so that pieces are told from no other root's."""
    return int(key.hash("shingles", "")[:16], 16)


def rank_of(key: SplitKey, row_id: str) -> int:
    """64 bits that put rows in an order of their own, whatever file they came from."""
    return int(key.hash("sample", row_id)[:16], 16)


def thread_of(key: SplitKey, conversation: str, messages: str) -> int:
    """64 bits, alike for the turns of one conversation: the same subject, and the same first words of the user's.

    The subject alone is too much: it may be an application that asks everything.
    """
    return int(key.hash("thread", f"{conversation}\0{opening(messages)}")[:16], 16)


def signatures(shingles: Sequence[np.ndarray]) -> np.ndarray:  # [rows, NUM_PERM] uint32
    """One MinHash signature a set of pieces: two agree in each place with the probability of their Jaccard similarity.

    Source: rensa's R-MinHash, of all pieces (its rho sketch samples them, and is not used).
    """
    from rensa import RMinHash

    if not shingles:
        return np.empty((0, NUM_PERM), np.uint32)
    offsets = np.r_[0, np.cumsum([len(pieces) for pieces in shingles])].astype(np.uint64)
    flat = np.concatenate(shingles).astype(np.uint64)
    found = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, NUM_PERM, 0)
    return np.array(found.to_rows(), np.uint32)


def sketch(rows: Sequence[Mapping[str, Any]], sketching: Sketching) -> pa.RecordBatch:
    """The sketches of rows that have row_id, conversation, split, messages and group (tenant and route).

    Some thousand rows a batch are enough to keep all overheads small.
    """
    key, seed = sketching.key, sketching.seed
    pieces = [
        prompt_shingles(row["messages"], row["group"], boilerplate=sketching.boilerplate, seed=seed) for row in rows
    ]
    columns = {
        "row_id": [row["row_id"] for row in rows],
        "rank": [rank_of(key, row["row_id"]) for row in rows],
        "thread": [thread_of(key, row["conversation"], row["messages"]) for row in rows],
        "split": [SPLITS.index(row["split"]) for row in rows],
    }
    return sketch_batch(columns, signatures(pieces), pieces)


def sketch_batch(
    columns: Mapping[str, Sequence[Any]], signed: np.ndarray, shingles: Sequence[np.ndarray]
) -> pa.RecordBatch:
    """A batch of SKETCHES from its parts: row_id, rank, thread and split, signatures and pieces."""
    offsets = np.r_[0, np.cumsum([len(pieces) for pieces in shingles])].astype(np.int64)
    flat = np.concatenate([np.empty(0, np.uint32), *shingles])
    return pa.record_batch(
        [
            *(pa.array(columns[name], SKETCHES.field(name).type) for name in ("row_id", "rank", "thread", "split")),
            pa.FixedSizeListArray.from_arrays(pa.array(signed.reshape(-1), pa.uint32()), NUM_PERM),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.uint32())),
        ],
        schema=SKETCHES,
    )


def write_sketches(path: Path, batch: pa.RecordBatch) -> None:
    """Write a batch as an Arrow file that maps into memory, whole or not at all."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SKETCHES) as writer:
        writer.write_batch(batch)
    write_durably(path, sink.getvalue().to_pybytes())


class Sketches:
    """All rows of the files, by their number in the order of the files. Only the small columns are in memory.

    Raises: SchemaError when a file is not one of SKETCHES.
    """

    def __init__(self, paths: Sequence[Path]):
        self._maps = [_mapped(path) for path in paths]
        found = [_batches(path, mapped) for path, mapped in zip(paths, self._maps, strict=True)]
        batches = [batch for several in found for batch in several]
        self._signatures = [_plain(batch.column("signature").flatten()).reshape(-1, NUM_PERM) for batch in batches]
        self._offsets = [_plain(batch.column("shingles").offsets) for batch in batches]
        # Read and not mapped: of a mapped file, a row that is looked at once takes 64 KiB of this process's memory.
        self._files = [open(path, "rb", buffering=0) for path in paths]  # noqa: SIM115 - for as long as this object
        self._values = [
            (
                file.fileno(),
                _address(_plain(batch.column("shingles").values)) - _address(np.frombuffer(mapped, np.uint8)),
            )
            for file, mapped, several in zip(self._files, self._maps, found, strict=True)
            for batch in several
        ]
        self._starts = [0, *np.cumsum([batch.num_rows for batch in batches]).tolist()]
        self.ranks = _column(batches, "rank")
        self.threads = _column(batches, "thread")
        self.splits = _column(batches, "split")
        self.row_ids = pa.chunked_array([batch.column("row_id") for batch in batches], pa.string())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def shingles(self, row: int) -> np.ndarray:
        """The pieces of a row, read from its file."""
        part = bisect_right(self._starts, row) - 1
        place = row - self._starts[part]
        first, end = self._offsets[part][place : place + 2].tolist()
        file, start = self._values[part]
        return np.frombuffer(os.pread(file, _PIECE_BYTES * (end - first), start + _PIECE_BYTES * first), np.uint32)

    def copy_signatures(self, into: np.ndarray) -> None:  # [rows, NUM_PERM] uint32
        """Copy all signatures, row by row, one file in memory at a time."""
        for start, signed in zip(self._starts, self._signatures, strict=False):
            into[start : start + len(signed)] = signed
            self.release()
            give_back(into)

    def similarity(self, one: int, other: int) -> float:
        """The exact Jaccard similarity of two rows' pieces."""
        return jaccard(self.shingles(one), self.shingles(other))

    def release(self) -> None:
        """Give the files' pages back, which count as this process's memory; they are mapped again where needed."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def give_back(array: np.ndarray) -> None:
    """Give the pages of a mapped array back to its file; they are mapped again where needed."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """The share of the pieces of two sets that both have; each sorted, each piece once, none empty."""
    if len(a) > len(b):
        a, b = b, a
    both = int(np.count_nonzero(are_in(a, b)))
    return both / (len(a) + len(b) - both)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path}: cannot be mapped into memory ({error}); run the stage again")


def _batches(path: Path, mapped: mmap.mmap) -> list[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped)))
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(f"{path}: not a whole Arrow file ({error}); remove it and run the stage again")
    if not reader.schema.equals(SKETCHES):
        raise SchemaError(f"{path}: columns {reader.schema.names}, expected {SKETCHES.names}; run the stage again")
    return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _column(batches: Sequence[pa.RecordBatch], name: str) -> np.ndarray:
    kind = SKETCHES.field(name).type.to_pandas_dtype()
    return np.concatenate([np.empty(0, kind), *(_plain(batch.column(name)) for batch in batches)])


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _plain(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=True)
