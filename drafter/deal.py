"""What a training step is given and what comes out of it.

Legend: m anchors of one row, K predicted slots of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from drafter.dataset import CachedRow


class Deal(NamedTuple):
    """A row of one step, with the anchors drawn in it."""

    row: CachedRow
    anchors: Tensor  # int64 [m], ascending; m may be 0
    weight: float  # of each of its blocks in the loss

    @property
    def total_weight(self) -> float:
        """Of all its blocks: what the step's loss is divided by, summed over the step's deals."""
        return self.weight * len(self.anchors)


@dataclass(frozen=True)
class StepResult:
    """A step's loss and what the drafter got right, of one process's deals."""

    loss: float  # weighted, already divided by the whole step's weight
    hits: Tensor  # float32 [K]: blocks whose slot was right, whatever came before it
    accepted: list[Tensor]  # for each deal int64 [m]: drafts that are right from slot 1 on without a gap
