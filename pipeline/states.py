"""Hidden states on disk: Arrow IPC files, a record batch a row of the cache.

Arrow has no bfloat16, so the 16-bit words themselves are stored (pipeline/schemas.py), or their 8-bit form. A file maps
into memory, and a row is read without a copy.

Shapes: n positions, L layers, H hidden size, G groups of channels a layer.
"""

import ctypes
import errno
import hashlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from pipeline.engines import Captured
from pipeline.errors import SchemaError, StageError
from pipeline.faults import find_fault
from pipeline.hashed_file import HashedFile
from pipeline.quantize import as_float32, dequantize, num_groups, quantize
from pipeline.schemas import STATES_FORMATS, states_schema

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# What a file has beside its schema and its batches: magic words and paddings, and where each batch begins.
_FOOTER_BYTES, _FOOTER_BYTES_PER_ROW = 32, 24


class StatesWriter:
    """An Arrow IPC file of states, a record batch a row, hashed as it is written."""

    def __init__(self, path: Path, *, num_layers: int, hidden_size: int, states_format: str = "bf16"):
        self._schema = states_schema(num_layers, hidden_size, states_format)
        self._shape, self._format = (num_layers, hidden_size), states_format
        self._file = HashedFile(path)
        self._sink = pa.PythonFile(self._file, mode="w")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self.num_rows = 0

    def batch(self, words: np.ndarray) -> pa.RecordBatch:  # uint16 [n, L, H]
        """One row's states in the form of this file. Raises: SchemaError on another shape."""
        if words.dtype != np.uint16 or words.shape[1:] != self._shape or not len(words):
            L, H = self._shape
            raise SchemaError(f"states {words.dtype} {list(words.shape)}: expected uint16 words [n, {L}, {H}], n > 0")
        arrays = (words,) if self._format == "bf16" else quantize(words)
        buffers = [pa.py_buffer(np.ascontiguousarray(array)) for array in arrays]
        columns = [
            pa.FixedSizeBinaryArray.from_buffers(field.type, len(words), [None, buffer])
            for field, buffer in zip(self._schema, buffers, strict=True)
        ]
        return pa.record_batch(columns, schema=self._schema)

    def append(self, batch: pa.RecordBatch) -> int:
        """Write one row's states; the number of its record batch."""
        self._writer.write_batch(batch)
        self.num_rows += 1
        return self.num_rows - 1

    def size_with(self, batch: pa.RecordBatch) -> int:
        """Bytes that the closed file would have with one more row."""
        footer = self._schema.serialize().size + _FOOTER_BYTES + _FOOTER_BYTES_PER_ROW * (self.num_rows + 1)
        return self._file.num_bytes + pa.ipc.get_record_batch_size(batch) + footer

    def close(self) -> str:
        """Write the footer: from here on the file can be read. Returns its SHA-256, in hex."""
        self._writer.close()
        self._sink.close()
        return self._file.sha256

    @property
    def hash_seconds(self) -> float:
        """What hashing has taken so far, of the time spent in ``append`` and ``close``."""
        return self._file.hash_seconds

    def abandon(self) -> None:
        """Let go of a file that will not be finished."""
        self._file.close()


class StatesFile:
    """A memory-mapped file of states. Raises: SchemaError when it is not a whole one, or of an unknown format."""

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            self._whole = pa.memory_map(str(path)).read_buffer()
            self._reader = pa.ipc.open_file(self._whole)
        except (OSError, pa.ArrowInvalid) as error:
            raise SchemaError(f"{path}: not a whole Arrow file of states ({error}); capture it again")
        metadata = {key.decode(): value.decode() for key, value in (self._reader.schema.metadata or {}).items()}
        self.states_format = metadata.get("format")
        if self.states_format not in STATES_FORMATS:
            raise SchemaError(
                f"{path}: states of the format {self.states_format!r}, this Slipstream reads "
                f"{', '.join(STATES_FORMATS)}; capture again, or use the version that wrote it"
            )
        self.num_layers, self.hidden_size = (int(n) for n in metadata["shape"].strip("[]").split(","))
        self.group_size = int(metadata.get("group_size", 0))

    def __len__(self) -> int:
        return self._reader.num_record_batches

    def words(self, batch: int) -> np.ndarray:  # uint16 [n, L, H]
        """One row's raw bf16 words, read-only, without a copy; ``torch``: view them as bfloat16."""
        self._require("bf16")
        return self._column(batch, 0, np.uint16, self.hidden_size)

    def codes(self, batch: int) -> tuple[np.ndarray, np.ndarray]:  # int8 [n, L, H], uint16 [n, L, G]
        """One row's codes and the bf16 words of their scales, read-only, without a copy."""
        self._require("int8")
        groups = num_groups(self.hidden_size, self.group_size)
        return self._column(batch, 0, np.int8, self.hidden_size), self._column(batch, 1, np.uint16, groups)

    def read(self, batch: int, end: int | None = None) -> np.ndarray:  # float32 [n, L, H]
        """The numbers of one row, whichever the form, of its positions before ``end``."""
        if self.states_format == "bf16":
            return as_float32(self.words(batch)[:end])
        codes, scales = self.codes(batch)
        return dequantize(codes[:end], scales[:end], self.group_size)

    def leave(self, *arrays: np.ndarray) -> None:
        """Give up the memory of arrays of this file: read again, they come from the system's cache, or from disk.

        What is mapped counts as the process's own for as long as it is not told so: by and by the whole cache.
        """
        first, last = self._whole.address, self._whole.address + self._whole.size
        for array in arrays:
            start, end = array.ctypes.data, array.ctypes.data + array.nbytes
            if first <= start and end <= last:  # nothing that Arrow had to copy, which would be lost
                start -= start % mmap.PAGESIZE
                _madvise(start, end - start, mmap.MADV_DONTNEED)

    def digest(self, batch: int) -> str:
        """A hash of the last position as stored; see ``Captured.digest``."""
        return _digest(self._reader.get_batch(batch))

    def _require(self, states_format: str) -> None:
        if self.states_format != states_format:
            raise SchemaError(f"{self.path}: states of the format {self.states_format}, read as {states_format}")

    def _column(self, batch: int, column: int, dtype: type, per_layer: int) -> np.ndarray:
        if not 0 <= batch < len(self):
            raise SchemaError(f"{self.path}: no record batch {batch}, there are {len(self)}; capture again")
        array = self._reader.get_batch(batch).column(column)
        width = self.num_layers * per_layer
        if array.type != pa.binary(width * np.dtype(dtype).itemsize):
            raise SchemaError(f"{self.path}: column of {array.type}, expected {width} numbers of {np.dtype(dtype)}")
        flat = np.frombuffer(array.buffers()[1], dtype, len(array) * width, array.offset * array.type.byte_width)
        return flat.reshape(len(array), self.num_layers, per_layer)


class StateShards:
    """The states of one part's rows in files of a bounded size: what an engine writes them into.

    A file ends before a row would take it over ``shard_bytes``; a row that is larger has a file to itself. Files are
    written under temporary names, and are the cache's once ``commit_part`` has taken them.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        *,
        num_layers: int,
        hidden_size: int,
        states_format: str = "bf16",
        shard_bytes: int = 256 << 20,
        typical_norms: Sequence[float] = (),
    ):
        self.folder, self.index = Path(folder), index
        self._shape = {"num_layers": num_layers, "hidden_size": hidden_size, "states_format": states_format}
        self._shard_bytes, self._norms = shard_bytes, typical_norms
        self._marker = f"{os.getpid()}-{secrets.token_hex(4)}"  # an engine taken for dead may still be writing
        self._writer: StatesWriter | None = None
        self._closed: list[tuple[int, str]] = []  # rows and SHA-256 of each finished file
        self._is_finished = False
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, row_id: str, words: np.ndarray, *, num_states: int) -> Captured:  # uint16 [n, L, H]
        """Judge one row's raw bf16 words and write them; where they are, or the fault that keeps them out.

        Raises: SchemaError on another number of layers or channels; StageError when the disk is full.
        """
        if self._is_finished:
            raise StageError(f"states of part {self.index}: row {row_id} came after its files were handed over")
        if fault := find_fault(words, num_states=num_states, typical_norms=self._norms):
            return Captured(row_id, reason=fault.reason, detail=fault.detail)
        with self._disk_errors():
            writer = self._writer or self._open()
            batch = writer.batch(words)
            if writer.num_rows and writer.size_with(batch) > self._shard_bytes:
                self._close()
                writer = self._open()
            number = writer.append(batch)
        return Captured(row_id, self._name(len(self._closed)), number, _digest(batch))

    def files(self) -> dict[str, tuple[int, Callable[[Path], str]]]:
        """The finished files for ``commit_part``: final name → rows, and what moves the file there and says its hash.

        Nothing can be added afterwards.
        """
        if self._writer is not None:
            with self._disk_errors():
                self._close()
        self._is_finished = True

        def mover(number: int, sha256: str) -> Callable[[Path], str]:
            def move(path: Path) -> str:
                os.replace(self._temporary(number), path)
                return sha256

            return move

        return {self._name(n): (rows, mover(n, sha256)) for n, (rows, sha256) in enumerate(self._closed)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove what was written and not committed."""
        if self._writer is not None:
            self._writer.abandon()
        for number in range(len(self._closed) + 1):
            self._temporary(number).unlink(missing_ok=True)

    def _open(self) -> StatesWriter:
        self._writer = StatesWriter(self._temporary(len(self._closed)), **self._shape)
        return self._writer

    def _close(self) -> None:
        self._closed.append((self._writer.num_rows, self._writer.close()))
        self._writer = None

    def _name(self, number: int) -> str:
        return f"states-{self.index:05d}-{number:02d}.arrow"

    def _temporary(self, number: int) -> Path:
        return self.folder / f".{self._name(number)}.{self._marker}.tmp"

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StageError(
                f"{self.folder}: no space left for the states of part {self.index}. Free some disk and run again "
                'with the same settings; capture.states_format = "int8" halves the bytes, capture.stream = true '
                "keeps them within capture.max_bytes"
            )


def _digest(batch: pa.RecordBatch) -> str:
    """A hash of the last position's bytes; in a causal model they depend on every token before it."""
    last = batch.slice(len(batch) - 1)
    return hashlib.sha256(b"".join(column[0].as_py() for column in last.columns)).hexdigest()[:32]
