"""Which row is dealt at which place of a run: a function of the seed and the place, so nothing has to be stored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

WINDOW_ROWS = 4096


@dataclass(frozen=True)
class Order:
    """Rows shuffled anew each epoch; every epoch deals every row exactly once.

    A cache that is larger than memory is read nearly from front to back: the shards are shuffled, and the rows within
    windows that reach over shards which then follow each other. Up to ``window`` rows are one window: a full shuffle.
    """

    num_rows: int
    seed: int
    shards: Sequence[int] = ()
    """Rows of each shard, in stored order; without them, any row may follow any other."""
    window: int = WINDOW_ROWS
    _dealt: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """The last two epochs' orders: places may reach over an epoch's end."""

    def __post_init__(self) -> None:
        if self.shards and sum(self.shards) != self.num_rows:
            raise ValueError(f"shards of {sum(self.shards)} rows together, expected {self.num_rows}")

    def dealt(self, places: range) -> list[tuple[int, int]]:
        """(epoch, row) pairs of these places in the whole run's sequence of rows."""
        return [
            (place // self.num_rows, int(self._epoch(place // self.num_rows)[place % self.num_rows]))
            for place in places
        ]

    def _epoch(self, epoch: int) -> Tensor:  # int64 [num_rows]
        if epoch not in self._dealt:
            for old in sorted(self._dealt)[:-1]:
                del self._dealt[old]
            self._dealt[epoch] = self._shuffled(torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        return self._dealt[epoch]

    def _shuffled(self, generator: torch.Generator) -> Tensor:
        if not self.shards or self.num_rows <= self.window:
            return torch.randperm(self.num_rows, generator=generator)
        ends = list(accumulate(self.shards))
        shards = torch.randperm(len(self.shards), generator=generator).tolist()
        rows = torch.cat([torch.arange(ends[shard] - self.shards[shard], ends[shard]) for shard in shards])
        starts = range(0, self.num_rows, self.window)
        sizes = [min(self.window, self.num_rows - start) for start in starts]
        places = [start + torch.randperm(size, generator=generator) for start, size in zip(starts, sizes, strict=True)]
        return rows[torch.cat(places)]
