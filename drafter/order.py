"""Which rows a step trains on: a function of the seed and the step, so that nothing has to be stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.anchors import draw_anchors
from drafter.dataset import CachedRow


@dataclass(frozen=True)
class Order:
    """Rows shuffled anew each epoch, dealt out in equal steps across epoch boundaries."""

    num_rows: int
    rows_per_step: int
    seed: int

    def rows_of(self, step: int) -> list[tuple[int, int]]:
        """(epoch, row) pairs of a step; every epoch deals every row exactly once."""
        places = range(step * self.rows_per_step, (step + 1) * self.rows_per_step)
        return [
            (place // self.num_rows, self._epoch(place // self.num_rows)[place % self.num_rows]) for place in places
        ]

    def _epoch(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def anchors_of(
        self, rows: Sequence[CachedRow], picks: Sequence[tuple[int, int]], *, limit: int, block_size: int
    ) -> list[Tensor]:
        """Anchors of each picked row, drawn anew each epoch, per document."""
        return [
            draw_anchors(
                rows[row].num_prompt_tokens,
                rows[row].num_tokens,
                block_size,
                limit,
                seed=(self.seed * 1_000_003 + epoch) * 1_000_003 + row,
            )
            for epoch, row in picks
        ]
