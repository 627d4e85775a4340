"""Hidden states on disk: raw bf16 words in Arrow IPC files, and what a row must be to enter one.

Arrow has no bfloat16, so the 16-bit words themselves are stored: a record batch a row, a value a position,
layer after layer. A file maps into memory, and a row is read without a copy.

Shapes: n positions, L layers, H hidden size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from pipeline.errors import SchemaError
from pipeline.schemas import states_schema

# A row's typical norm may differ from the checked prompt's by this factor, a layer at a time, before something
# else than the prompt must be the cause.
MAX_NORM_RATIO = 32.0


class StatesWriter:
    """An Arrow IPC file of states, a record batch a row."""

    def __init__(self, path: Path, *, num_layers: int, hidden_size: int):
        self._schema = states_schema(num_layers, hidden_size)
        self._width = self._schema.field("states").type.byte_width
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self.num_rows = 0

    def append(self, words: np.ndarray) -> int:  # uint16 [n, L, H]
        """Write one row's states; the number of its record batch."""
        if words.dtype != np.uint16 or words[0].nbytes != self._width:
            raise SchemaError(
                f"states {words.dtype} {words.shape}: expected uint16 words, {self._width} bytes a position"
            )
        buffers = [None, pa.py_buffer(np.ascontiguousarray(words))]
        array = pa.FixedSizeBinaryArray.from_buffers(self._schema.field("states").type, len(words), buffers)
        self._writer.write_batch(pa.record_batch([array], schema=self._schema))
        self.num_rows += 1
        return self.num_rows - 1

    def close(self) -> None:
        """Write the footer: from here on the file can be read."""
        self._writer.close()
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StatesFile:
    """A memory-mapped file of states. Raises: SchemaError when it is not a whole one."""

    def __init__(self, path: Path):
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        except (OSError, pa.ArrowInvalid) as error:
            raise SchemaError(f"{path}: not a whole Arrow file of states ({error}); capture it again")
        metadata = self._reader.schema.metadata or {}
        if metadata.get(b"dtype") != b"bfloat16":
            raise SchemaError(f"{path}: states of dtype {metadata.get(b'dtype')!r}, expected bfloat16 words")
        self.num_layers, self.hidden_size = (int(n) for n in metadata[b"shape"].decode().strip("[]").split(","))

    def __len__(self) -> int:
        return self._reader.num_record_batches

    def words(self, batch: int) -> np.ndarray:  # uint16 [n, L, H]
        """One row's raw words, read-only, without a copy; ``torch``: view them as bfloat16."""
        array = self._reader.get_batch(batch).column(0)
        flat = np.frombuffer(array.buffers()[1], np.uint16)
        width = self.num_layers * self.hidden_size
        return flat[array.offset * width :][: len(array) * width].reshape(-1, self.num_layers, self.hidden_size)


@dataclass(frozen=True)
class RowFault:
    """Why a row's states cannot be trained on."""

    reason: str
    detail: dict[str, Any]


def find_fault(words: np.ndarray, *, num_states: int, typical_norms: Sequence[float] = ()) -> RowFault | None:
    """The first fault of a row's states, or None: length, finiteness, zeros, norm.

    ``typical_norms`` are the checked prompt's, one a layer; without them the norms are not judged.
    """
    if len(words) != num_states:
        return RowFault("wrong_length", {"num_states": len(words), "expected": num_states})
    not_finite = (words & 0x7F80) == 0x7F80  # all exponent bits set: infinite, or no number
    if not_finite.any():
        position, layer, element = (int(n) for n in np.argwhere(not_finite)[0])
        return RowFault("not_finite", {"position": position, "layer_index": layer, "element": element})
    zero = ((words & 0x7FFF) == 0).all(axis=2)  # [n, L]
    if zero.any():
        position, layer = (int(n) for n in np.argwhere(zero)[0])
        share = float(zero.any(axis=1).mean())
        return RowFault("zero_states", {"share": round(share, 4), "position": position, "layer_index": layer})
    for layer, (norm, typical) in enumerate(zip(median_norms(words), typical_norms, strict=False)):
        if not typical / MAX_NORM_RATIO <= norm <= typical * MAX_NORM_RATIO:
            return RowFault("norm_out_of_range", {"layer_index": layer, "norm": norm, "expected_about": typical})
    return None


def median_norms(words: np.ndarray) -> list[float]:  # uint16 [n, L, H]
    """The median over positions of each layer's root mean square."""
    with np.errstate(over="ignore"):
        return [float(x) for x in np.median(np.sqrt(np.mean(as_float32(words) ** 2, axis=2)), axis=0)]


def as_float32(words: np.ndarray) -> np.ndarray:
    """The same numbers as float32: a bf16 word is the upper half of one."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def last_state_digest(words: np.ndarray) -> str:
    """A hash of the last position's states, which in a causal model depend on every token before it."""
    return hashlib.sha256(np.ascontiguousarray(words[-1])).hexdigest()[:32]
