"""Acceptance as decoding would meet it, from cached states: no engine, no target.

For every anchor of a reply, the drafts that match the target's own tokens are counted; the walk then starts
at the reply's first token, jumps over what was accepted and the token the target adds, and so on to the end,
exactly the steps that greedy speculative decoding takes. Averages over random anchors overweight easy
stretches, which decoding crosses in few steps; the walk does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafter.attention import MAX_GROUP
from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.packing import pack
from drafter.shape import DrafterShape
from drafter.step import hidden_of

# Memory of one pass. Each pass of a reply reads its context again, so that few and large ones are faster.
PASS_BYTES = 1 << 30


@dataclass
class WalkCounts:
    """Counts over replies; lengths are derived, never averaged."""

    num_replies: int = 0
    num_tokens: int = 0
    """Reply tokens, each reply's first (which prefill emits) included."""
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts; the token the target adds counts."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def emitted_tokens_per_step(self) -> float:
        """(tokens - replies) / drafts: what a step really emitted, the ends of replies trimmed."""
        return (self.num_tokens - self.num_replies) / max(1, self.num_drafts)

    def add(self, accepted: Sequence[int], num_reply_tokens: int, num_draft_tokens: int) -> None:
        """Count one reply's steps; ``accepted`` holds the accepted drafts of each."""
        per_pos = self.num_accepted_tokens_per_pos or [0] * num_draft_tokens
        self.num_accepted_tokens_per_pos = [n + sum(a > k for a in accepted) for k, n in enumerate(per_pos)]
        self.num_replies += 1
        self.num_tokens += num_reply_tokens
        self.num_drafts += len(accepted)
        self.num_accepted_tokens += sum(accepted)

    def as_dict(self) -> dict[str, Any]:
        """Counts and derived lengths, for manifests and reports."""
        return {
            "num_replies": self.num_replies,
            "num_tokens": self.num_tokens,
            "num_drafts": self.num_drafts,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": self.num_accepted_tokens_per_pos,
            "acceptance_length": self.acceptance_length,
            "emitted_tokens_per_step": self.emitted_tokens_per_step,
        }


def jumps(accepted: Sequence[int], first: int, last: int) -> list[int]:
    """Anchors that decoding visits, given the accepted drafts at every position.

    The first token of the reply is at ``first``; decoding stops when the token at ``last`` is out.
    """
    visited, anchor = [], first
    while anchor < last:
        visited.append(anchor)
        anchor += accepted[anchor] + 1
    return visited


def is_walked(row: CachedRow) -> bool:
    """Whether decoding takes a step in it: prefill emits a reply's first token."""
    return row.num_tokens - row.num_prompt_tokens > 1


@torch.no_grad()
def walk(
    drafter: Drafter, frozen: FrozenTarget, rows: Sequence[CachedRow], *, pass_bytes: int = PASS_BYTES
) -> tuple[WalkCounts, dict[str, WalkCounts]]:
    """Counts of all replies together, and by slice."""
    total, slices = WalkCounts(), {}
    K = drafter.shape.num_draft_tokens
    rows = [row for row in rows if is_walked(row)]
    for row, accepted in zip(rows, accepted_everywhere(drafter, frozen, rows, pass_bytes=pass_bytes), strict=True):
        steps = [int(accepted[p]) for p in jumps(accepted.tolist(), row.num_prompt_tokens, row.num_tokens - 1)]
        num_reply_tokens = row.num_tokens - row.num_prompt_tokens
        total.add(steps, num_reply_tokens, K)
        slices.setdefault(row.slice, WalkCounts()).add(steps, num_reply_tokens, K)
    return total, slices


@torch.no_grad()
def accepted_everywhere(
    drafter: Drafter, frozen: FrozenTarget, rows: Sequence[CachedRow], *, pass_bytes: int = PASS_BYTES
) -> list[Tensor]:
    """For each row int64 [n]: drafts accepted by a block that starts at each reply position, 0 elsewhere.

    Beside the drafter it takes ``pass_bytes`` of memory, or what one group of blocks of the longest row needs.
    """
    found = [torch.zeros(row.num_tokens, dtype=torch.int64) for row in rows]
    for some in _passes(rows, *_bytes_of(drafter.shape, frozen.head), pass_bytes):
        deals = [Deal(rows[index], anchors, 1.0) for index, anchors in some]
        for (index, anchors), accepted in zip(some, _accepted(drafter, frozen, deals), strict=True):
            found[index][anchors] = accepted
    return found


def _accepted(drafter: Drafter, frozen: FrozenTarget, deals: Sequence[Deal]) -> tuple[Tensor, ...]:
    """Drafts accepted by each block, int64 [m] for each deal.

    A slot's logits are computed only where every earlier slot was right, since nothing else counts.
    """
    K, device = drafter.shape.num_draft_tokens, frozen.head.device
    packed = pack(deals, drafter.shape.block_size, frozen.head.dtype).to(device)
    hidden = hidden_of(drafter, frozen, packed)  # [A, K, H]
    last = torch.tensor([deal.row.num_tokens - 1 for deal in deals])
    room = last.repeat_interleave(torch.tensor(packed.num_blocks)).to(device) - packed.anchors
    alive = torch.ones_like(packed.anchors, dtype=torch.bool)
    accepted = torch.zeros_like(packed.anchors)
    for slot in range(K):
        alive &= room > slot
        where = alive.nonzero().squeeze(1)
        guess = (hidden[where, slot] @ frozen.head.T).argmax(dim=-1)
        alive[where] = guess == packed.labels[where, slot]
        accepted += alive
    return accepted.cpu().split(packed.num_blocks)


def _passes(
    rows: Sequence[CachedRow], position_bytes: int, block_bytes: int, pass_bytes: int
) -> list[list[tuple[int, Tensor]]]:
    """Indices of rows with the anchors to take of them, pass by pass; only a reply too long for a pass alone is cut."""
    passes: list[list[tuple[int, Tensor]]] = []
    left = 0
    for index, row in enumerate(rows):
        first, last = row.num_prompt_tokens, row.num_tokens - 1
        while first < last:
            if not passes or position_bytes * last + block_bytes * (last - first) > left:
                passes.append([])
                left = pass_bytes
            room = (left - position_bytes * first) // (position_bytes + block_bytes)
            end = min(last, first + max(MAX_GROUP, room))
            passes[-1].append((index, torch.arange(first, end)))
            left -= position_bytes * end + block_bytes * (end - first)
            first = end
    return passes


def _bytes_of(shape: DrafterShape, head: Tensor) -> tuple[int, int]:
    """What a context position takes of a pass's memory, and what a block does."""
    H, B = shape.hidden_size, shape.block_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Of one group of blocks over this position, as scores and in their place; a GPU holds none.
    softmax = 0 if head.is_cuda else 2 * MAX_GROUP * B * shape.num_attention_heads
    position = shape.context_size + 3 * H + 6 * keys + softmax
    in_layers = B * (3 * shape.intermediate_size + 6 * H + 4 * queries + 4 * keys)
    block = max(in_layers, B * H + head.shape[0])
    return position * head.itemsize, block * head.itemsize
