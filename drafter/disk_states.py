"""States where they are on disk: mapped when a batch needs them, and copied once, into the batch.

A row knows its file and its record batch. Files are opened as rows are asked for, some at a time: a cache may have more
of them than a process may map, and staged copies may come and go.

Shapes: n positions, L layers, H hidden size, G groups of channels a layer, F = L·H.
"""

import warnings
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from pipeline.artifacts import Shard
from pipeline.errors import SchemaError
from pipeline.shards import is_states
from pipeline.staging import Staging
from pipeline.states import StatesFile

OPEN_FILES = 64
# A file that is removed while it is open keeps its bytes: those who share a staging folder hold few.
OPEN_STAGED_FILES = 4


class StatesFolder:
    """The states files of one cache; ``held`` keeps them from being removed for as long as a row knows of them.

    Raises: SchemaError when one is missing, or not of the recorded size.
    """

    def __init__(
        self, folder: Path, shards: Iterable[Shard], *, staging: Staging | None = None, held: IO[str] | None = None
    ):
        self.folder, self.staging, self._held = Path(folder), staging, held
        states = [shard for shard in shards if is_states(shard)]
        self._bytes = {shard.path: shard.bytes for shard in states}
        self.bytes_per_row = sum(self._bytes.values()) / max(1, sum(shard.rows for shard in states))
        for name, expected in self._bytes.items() if staging is None else ():
            path = self.folder / name
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                raise SchemaError(f"{path}: {found} bytes, {expected} are recorded; remove {self.folder} and redo it")
        self._opened: OrderedDict[str, StatesFile] = OrderedDict()  # the longest unused first
        self._max_opened = OPEN_STAGED_FILES if staging else OPEN_FILES

    def open(self, name: str) -> StatesFile:
        """A states file, which stays open until others are asked for. Raises: SchemaError where it is not recorded."""
        if name not in self._bytes:
            raise SchemaError(f"{self.folder / name}: named by a row, but not among the recorded files")
        file = self._opened.pop(name, None)
        if file is None:
            file = self.staging.open(name) if self.staging else StatesFile(self.folder / name)
        self._opened[name] = file
        if len(self._opened) > self._max_opened:
            self._opened.popitem(last=False)
        return file


class DiskStates:
    """One row's states, or those of its first positions; nothing is read before it is asked for."""

    def __init__(self, files: StatesFolder, name: str, batch: int, num_states: int, end: int | None = None):
        self.files, self.name, self._batch, self._num_states = files, name, batch, num_states
        self._end = num_states if end is None else end

    def __len__(self) -> int:
        return self._end

    @property
    def shape(self) -> tuple[int, int]:
        """Positions, and numbers a position."""
        file = self.files.open(self.name)
        return self._end, file.num_layers * file.hidden_size

    def __getitem__(self, positions: slice) -> "DiskStates":
        """The states of the first positions."""
        start, end, step = positions.indices(self._end)
        if (start, step) != (0, 1):
            raise IndexError(f"{positions}: states are read from a row's first position on")
        return DiskStates(self.files, self.name, self._batch, self._num_states, end)

    def mapped(self) -> Tensor:  # bfloat16 [n, F]
        """A read-only view of the file, without a copy. Raises: SchemaError where it is in the 8-bit form."""
        return _as_bfloat16(self._checked(self.files.open(self.name).words(self._batch))[: self._end]).flatten(1)

    def copy_into(self, into: Tensor) -> None:  # [n, F], of any dtype
        """Write the numbers, in the dtype they are wanted in."""
        file = self.files.open(self.name)
        if file.states_format == "bf16":
            arrays = (self._checked(file.words(self._batch))[: self._end],)
            into.copy_(_as_bfloat16(*arrays).flatten(1))
        else:
            arrays = tuple(self._checked(array)[: self._end] for array in file.codes(self._batch))
            unpack(_readonly(arrays[0]), _as_bfloat16(arrays[1]), file.group_size, into)
        file.leave(*arrays)

    def _checked(self, array: np.ndarray) -> np.ndarray:
        if len(array) != self._num_states:
            raise SchemaError(
                f"{self.files.folder / self.name}: record batch {self._batch} has {len(array)} states, "
                f"{self._num_states} in the table; remove {self.files.folder} and capture again"
            )
        return array


def unpack(codes: Tensor, scales: Tensor, group_size: int, into: Tensor) -> None:
    """Write the numbers of the 8-bit form into [n, F]; int8 [n, L, H] and bfloat16 [n, L, G] (pipeline/quantize.py)."""
    n, L, H = codes.shape
    whole = H // group_size
    target, steps = into.view(n, L, H), scales.float()
    for start, end, size in ((0, whole, group_size), (whole, scales.shape[2], H % group_size)):
        if start < end:
            places = slice(start * group_size, start * group_size + (end - start) * size)
            grouped = (n, L, end - start, size)
            numbers = codes[:, :, places].reshape(grouped) * steps[:, :, start:end, None]  # float32
            target[:, :, places] = numbers.flatten(2)


def _as_bfloat16(words: np.ndarray) -> Tensor:  # uint16
    return _readonly(words.view(np.int16)).view(torch.bfloat16)


def _readonly(array: np.ndarray) -> Tensor:
    # Mapped files are read-only, which numpy's view keeps and torch only warns of: nothing here writes to it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
