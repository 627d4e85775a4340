"""Rows of one pass as tensors without padding: contexts one after another, and blocks one after another.

Legend: T context positions of all rows, A blocks of all rows, F = layers x H_target, B block size, K = B - 1 predicted
slots. States are copied once, from the mapped file to their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafter.deal import Deal
from drafter.disk_states import DiskStates
from pipeline.errors import SchemaError


@dataclass(frozen=True)
class Packed:
    """Contexts and blocks of several rows, row after row; a row without an anchor has neither."""

    states: Tensor  # [T, F]; of each row the positions before its last anchor, which is all that its blocks may see
    num_positions: tuple[int, ...]  # of each row; they add up to T
    num_blocks: tuple[int, ...]  # of each row; they add up to A
    anchors: Tensor  # int64 [A], position of each block's slot 0 in its own row, ascending in each row
    anchor_ids: Tensor  # int64 [A]
    labels: Tensor  # int64 [A, K]
    weights: Tensor  # float64 [A], of the blocks in the loss

    def to(self, device: torch.device) -> "Packed":
        """The same, there."""
        names = ("states", "anchors", "anchor_ids", "labels", "weights")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def pack(deals: Sequence[Deal], block_size: int, dtype: torch.dtype) -> Packed:
    """These rows and their anchors (ascending). A block's labels past its row's end repeat the last token.

    Raises: SchemaError on NaN or Inf.
    """
    # No block sees a state at its anchor, or after it.
    num_positions = tuple(int(deal.anchors[-1]) if len(deal.anchors) else 0 for deal in deals)
    num_blocks = tuple(len(deal.anchors) for deal in deals)
    states = torch.empty(sum(num_positions), deals[0].row.states.shape[1], dtype=dtype)
    for deal, into, n in zip(deals, states.split(num_positions), num_positions, strict=True):
        if isinstance(deal.row.states, DiskStates):
            deal.row.states[:n].copy_into(into)
        else:
            into.copy_(deal.row.states[:n])
    _refuse_not_finite(deals, states, num_positions)
    slots = torch.arange(1, block_size)
    labels = [deal.row.ids[(deal.anchors[:, None] + slots).clamp_max(deal.row.num_tokens - 1)] for deal in deals]
    return Packed(
        states,
        num_positions,
        num_blocks,
        torch.cat([deal.anchors for deal in deals]),
        torch.cat([deal.row.ids[deal.anchors] for deal in deals]),
        torch.cat(labels),
        torch.tensor([deal.weight for deal in deals], dtype=torch.float64).repeat_interleave(torch.tensor(num_blocks)),
    )


def nothing(context_size: int, block_size: int, dtype: torch.dtype) -> Packed:
    """No rows: a pass over it takes part in every collective and adds a zero gradient."""
    none = torch.empty(0, dtype=torch.int64)
    labels = torch.empty(0, block_size - 1, dtype=torch.int64)
    return Packed(torch.empty(0, context_size, dtype=dtype), (), (), none, none, labels, none.double())


def _refuse_not_finite(deals: Sequence[Deal], states: Tensor, num_positions: Sequence[int]) -> None:
    # Smallest and largest, which a NaN would be: one pass, where torch.isfinite takes several.
    if not states.numel() or all(torch.isfinite(extreme) for extreme in torch.aminmax(states)):
        return
    parts = zip(deals, states.split(num_positions), strict=True)
    bad = [deal.row.row_id for deal, part in parts if not torch.isfinite(part).all()]
    raise SchemaError(f"rows {bad}: cached states are not finite; capture them again")
