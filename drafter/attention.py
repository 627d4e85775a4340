"""Attention over what slots see, and no work on masked areas.

Legend: T context positions of all rows, A blocks of all rows, B block size, N heads, G key-value heads, E head width.
On a CPU each row is taken in groups of neighbouring blocks, whose keys are one slice of the context; on a GPU one mask
over all rows does it (drafter/flex.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from drafter.flex import attend_by_mask, block_mask
from drafter.packing import Packed
from drafter.shape import LayerAttention
from drafter.visibility import sees

# A group of neighbouring blocks is multiplied with the context of all of them. It spans so many positions, or so small
# a part of what its first block sees, that little is multiplied in vain.
_SPAN, _SPAN_SHARE = 64, 1 / 8
MAX_GROUP = 64  # blocks: their softmax is held at once


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


Seen = View | BlockMask


def view(layer: LayerAttention, packed: Packed, block_size: int) -> Seen:
    """What ``attend`` needs to know of this pass, in layers of this kind."""
    if packed.anchors.is_cuda:
        return block_mask(layer, packed, block_size)
    slots, anchors = torch.arange(block_size), packed.anchors
    groups, first_block, offset = [], 0, 0
    for num_blocks, num_positions in zip(packed.num_blocks, packed.num_positions, strict=True):
        of_row = anchors[first_block : first_block + num_blocks].tolist()
        for start, end in _neighbours(of_row, layer.window):
            some = anchors[first_block + start : first_block + end, None, None]
            first = 0 if layer.window is None else max(0, of_row[start] - layer.window + 1)
            last = of_row[end - 1]
            seen = sees(layer, some + slots[:, None], some, torch.arange(first, last), is_context=True)  # [g, B, S]
            blocks = slice(first_block + start, first_block + end)
            groups.append(Group(blocks, slice(offset + first, offset + last), None if seen.all() else ~seen))
        first_block, offset = first_block + num_blocks, offset + num_positions
    if not groups:  # keys, values and sinks take part all the same
        groups.append(Group(slice(0, 0), slice(0, 0), None))
    seen = sees(layer, slots[:, None], slots[:1], slots, is_context=False)
    return View(groups, None if seen.all() else ~seen)


def _neighbours(anchors: Sequence[int], window: int | None) -> Iterator[tuple[int, int]]:
    start = 0
    for i, anchor in enumerate(anchors):
        first = anchors[start]
        if anchor - first > max(_SPAN, _SPAN_SHARE * min(first, window or first)) or i - start == MAX_GROUP:
            yield start, i
            start = i
    if anchors:
        yield start, len(anchors)


def attend(
    q: Tensor,  # [A, B, N, E]
    k: Tensor,  # [A, B, G, E]
    v: Tensor,  # [A, B, G, E]
    context_k: Tensor,  # [T, G, E]
    context_v: Tensor,  # [T, G, E]
    seen: Seen,
    sinks: Tensor | None,  # [N], logits that take part in the softmax and have no value
) -> Tensor:  # [A, B, N, E]
    """The blocks' queries over what they see."""
    if isinstance(seen, BlockMask):
        return attend_by_mask(q, k, v, context_k, context_v, seen, sinks)
    return _attend_by_groups(q, k, v, context_k, context_v, sinks, seen, torch.is_grad_enabled())


@torch.compiler.disable  # groups are others in every pass
def _attend_by_groups(*inputs: Any) -> Tensor:
    return _Attend.apply(*inputs)


class _Attend(torch.autograd.Function):
    """Gradients by hand: each group writes its part of them once, in place.

    Heads that share keys are stacked along the queries, so that no key is copied: R = N / G of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        sinks: Tensor | None,
        seen: View,
        keeps_weights: bool,
    ) -> Tensor:
        (A, B, N, E), G = q.shape, k.shape[2]
        R = N // G
        ctx.shape = (A, B, G, R, E)
        queries = torch.mul(q.view(A, B, G, R, E).permute(2, 0, 3, 1, 4), E**-0.5).contiguous()  # [G, A, R, B, E]
        keys, values = k.permute(2, 0, 1, 3).contiguous(), v.permute(2, 0, 1, 3).contiguous()  # [G, A, B, E]
        context_k, context_v = context_k.transpose(0, 1), context_v.transpose(0, 1)  # [G, T, E]
        to_block = _per_block(queries, keys.mT)  # [G, A, R, B, B]
        if seen.is_hidden_in_block is not None:
            to_block.masked_fill_(seen.is_hidden_in_block, float("-inf"))
        mixed, kept = torch.empty_like(queries), []
        for group in seen.groups:
            g, S = group.blocks.stop - group.blocks.start, group.context.stop - group.context.start
            own = queries[:, group.blocks].flatten(1, 3)  # [G, g R B, E]
            weights = own.new_empty(G, g, R, B, S + B + (sinks is not None))
            weights[..., :S] = torch.bmm(own, context_k[:, group.context].mT).view(G, g, R, B, S)
            if group.is_hidden is not None:
                weights[..., :S].masked_fill_(group.is_hidden[:, None], float("-inf"))
            weights[..., S : S + B] = to_block[:, group.blocks]
            if sinks is not None:
                weights[..., -1] = sinks.view(G, 1, R, 1)
            torch._softmax(weights, -1, False, out=weights)
            mixed[:, group.blocks] = _per_block(weights[..., S : S + B], values[:, group.blocks])
            over_context = torch.bmm(weights.flatten(1, 3)[..., :S], context_v[:, group.context])
            mixed[:, group.blocks] += over_context.view(G, g, R, B, E)
            if keeps_weights:
                kept.append(weights)
        ctx.seen, ctx.has_sinks = seen, sinks is not None
        ctx.save_for_backward(queries, keys, values, context_k, context_v, *kept)
        return mixed.permute(1, 3, 0, 2, 4).reshape(A, B, N, E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, context_k, context_v, *kept = ctx.saved_tensors
        A, B, G, R, E = ctx.shape
        wide = torch.promote_types(queries.dtype, torch.float32)
        grad = grad.view(A, B, G, R, E).permute(2, 0, 3, 1, 4).contiguous()  # [G, A, R, B, E]
        by_queries = torch.empty_like(queries)
        by_keys, by_values = torch.empty_like(keys), torch.empty_like(values)
        # Neighbouring groups see the same positions: their shares are added up.
        by_context_k = torch.zeros(context_k.shape, dtype=wide, device=grad.device)
        by_context_v = torch.zeros_like(by_context_k)
        by_sinks = torch.zeros(G, R, dtype=wide, device=grad.device) if ctx.has_sinks else None
        for group, weights in zip(ctx.seen.groups, kept, strict=True):
            S, some = group.context.stop - group.context.start, group.blocks
            own, given = queries[:, some].flatten(1, 3), grad[:, some].flatten(1, 3)  # [G, g R B, E]
            on_context, on_block = weights.flatten(1, 3)[..., :S], weights[..., S : S + B]
            by_context_v[:, group.context] += torch.bmm(on_context.mT, given)
            by_values[:, some] = _per_block_sum(on_block, grad[:, some])
            by_scores = torch.zeros_like(weights)
            by_scores[..., :S] = torch.bmm(given, context_v[:, group.context].mT).view(*weights.shape[:-1], S)
            by_scores[..., S : S + B] = _per_block(grad[:, some], values[:, some].mT)
            by_scores = torch._softmax_backward_data(by_scores, weights, -1, weights.dtype)
            to_context, to_block = by_scores.flatten(1, 3)[..., :S], by_scores[..., S : S + B]
            by_context_k[:, group.context] += torch.bmm(to_context.mT, own)
            by_keys[:, some] = _per_block_sum(to_block, queries[:, some])
            by_queries[:, some] = _per_block(to_block, keys[:, some])
            by_queries[:, some] += torch.bmm(to_context, context_k[:, group.context]).view(by_queries[:, some].shape)
            if by_sinks is not None:
                by_sinks += by_scores[..., -1].sum(dim=(1, 3), dtype=wide)
        by_q = by_queries.mul_(E**-0.5).permute(1, 3, 0, 2, 4).reshape(A, B, G * R, E)
        by_k, by_v = by_keys.permute(1, 2, 0, 3), by_values.permute(1, 2, 0, 3)
        by_context = (part.to(grad.dtype).transpose(0, 1) for part in (by_context_k, by_context_v))
        return by_q, by_k, by_v, *by_context, None if by_sinks is None else by_sinks.flatten(), None, None


def _per_block(a: Tensor, b: Tensor) -> Tensor:  # [G, g, R, B, x], [G, g, x, y] -> [G, g, R, B, y]
    G, g, R, B, x = a.shape
    y = b.shape[-1]
    return torch.bmm(a.reshape(G * g, R * B, x), b.reshape(G * g, x, y)).view(G, g, R, B, y)


def _per_block_sum(a: Tensor, b: Tensor) -> Tensor:  # [G, g, R, B, x], [G, g, R, B, y] -> [G, g, x, y]
    G, g, R, B, x = a.shape
    y = b.shape[-1]
    return torch.bmm(a.reshape(G * g, R * B, x).mT, b.reshape(G * g, R * B, y)).view(G, g, x, y)
