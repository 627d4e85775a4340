"""Who sees whom, and attention over just that: no work on masked areas.

Legend: T context positions of all rows, A blocks of all rows, B block size, N heads, G key-value heads, E head width.
On a CPU each row is taken in groups of neighbouring blocks, whose keys are one slice of the context; on a GPU flex
attention skips the empty tiles of one mask over [contexts | blocks].

Source: DFlash, arXiv 2602.06036, section 3; windows as in vLLM's drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from drafter.packing import Packed
from drafter.shape import LayerAttention

# Neighbouring blocks whose context is multiplied at once: fewer waste less on what only the last may see, more
# make larger products.
_BLOCKS_A_GROUP = 16


def sees(layer: LayerAttention, position: Tensor, anchor: Tensor, key: Tensor, *, is_context: bool) -> Tensor:
    """Where the slot at ``position`` of the block at ``anchor`` sees ``key``, a position of its context or its block.

    All positions are those of one row; shapes broadcast.
    """
    last = anchor - 1 if is_context else position  # of what may be seen
    seen = key <= last if is_context or layer.is_causal else key == key
    return seen if layer.window is None else seen & ((position - key).abs() < layer.window)


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks of one row and the slice of the packed context that any of them sees."""

    blocks: slice
    context: slice
    is_hidden: Tensor | None  # bool [g, B, context]; None where every slot sees all of it


@dataclass(frozen=True)
class View:
    """What each slot of a pass sees in layers of one kind."""

    groups: Sequence[Group]
    is_hidden_in_block: Tensor | None  # bool [B, B]; None where every slot sees all of its block


def view(layer: LayerAttention, packed: Packed, block_size: int) -> View:
    """The groups of this pass, for layers of this kind."""
    slots = torch.arange(block_size)
    groups, first_block, offset = [], 0, 0
    anchors = packed.anchors.cpu()
    for num_blocks, num_positions in zip(packed.num_blocks, packed.num_positions, strict=True):
        last_block = first_block + num_blocks
        for start, end in pairwise([*range(first_block, last_block, _BLOCKS_A_GROUP), last_block]):
            some = anchors[start:end]
            first = 0 if layer.window is None else max(0, int(some[0]) - layer.window + 1)
            context = torch.arange(first, int(some[-1]))
            seen = sees(
                layer, some[:, None, None] + slots[:, None], some[:, None, None], context, is_context=True
            )  # [g, B, context]
            keys = slice(offset + first, offset + int(some[-1]))
            groups.append(Group(slice(start, end), keys, None if seen.all() else ~seen))
        first_block, offset = last_block, offset + num_positions
    if not groups:  # keys, values and sinks take part all the same
        groups.append(Group(slice(0, 0), slice(0, 0), None))
    seen = sees(layer, slots[:, None], slots[:1], slots, is_context=False)
    return View(groups, None if seen.all() else ~seen)


def attend(
    q: Tensor,  # [A, B, N, E]
    k: Tensor,  # [A, B, G, E]
    v: Tensor,  # [A, B, G, E]
    context_k: Tensor,  # [T, G, E]
    context_v: Tensor,  # [T, G, E]
    seen: View,
    sinks: Tensor | None,  # [N], logits that take part in the softmax and have no value
) -> Tensor:  # [A, B, N, E]
    """The blocks' queries over what they see."""
    A, B, N, E = q.shape
    G = k.shape[2]
    # Heads that share keys are stacked along the queries, so that no key is copied.
    q = (q * E**-0.5).view(A, B, G, N // G, E).permute(0, 2, 3, 1, 4)  # [A, G, N/G, B, E]
    k, v = k.transpose(1, 2)[:, :, None], v.transpose(1, 2)[:, :, None]  # [A, G, 1, B, E]
    context_k, context_v = context_k.transpose(0, 1), context_v.transpose(0, 1)  # [G, T, E]
    if sinks is not None:
        sinks = sinks.view(G, N // G, 1, 1)
    to_block = q @ k.transpose(-1, -2)
    if seen.is_hidden_in_block is not None:
        to_block = to_block.masked_fill(seen.is_hidden_in_block, float("-inf"))
    out = []
    for group in seen.groups:
        keys, values = context_k[:, group.context], context_v[:, group.context]
        g, S = group.blocks.stop - group.blocks.start, keys.shape[1]
        queries = q[group.blocks].transpose(0, 1).reshape(G, -1, E)
        scores = (queries @ keys.transpose(-1, -2)).view(G, g, N // G, B, S).transpose(0, 1)
        if group.is_hidden is not None:
            scores = scores.masked_fill(group.is_hidden[:, None, None], float("-inf"))
        parts = [scores, to_block[group.blocks]]
        if sinks is not None:
            parts.append(sinks.to(q.dtype).expand(g, G, N // G, B, 1))
        weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
        on_context = weights[..., :S].transpose(0, 1).reshape(G, g * N // G * B, S)
        mixed = (on_context @ values).view(G, g, N // G, B, E).transpose(0, 1)
        out.append(mixed + weights[..., S : S + B] @ v[group.blocks])
    return torch.cat(out).permute(0, 3, 1, 2, 4).reshape(A, B, N, E)
