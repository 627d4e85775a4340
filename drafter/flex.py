"""Attention on a GPU: one sparse mask over [contexts | blocks], whose empty tiles flex attention skips.

Legend: T context positions of all rows, A blocks of all rows, B block size, N heads, G key-value heads, E head width.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from drafter.packing import Packed
from drafter.shape import LayerAttention
from drafter.visibility import sees


def block_mask(layer: LayerAttention, packed: Packed, block_size: int) -> BlockMask:
    """What each of the A B slots sees of the T context positions and, after them, of the A B slots."""
    T, device = len(packed.states), packed.anchors.device
    slots = torch.arange(block_size, device=device)
    position = (packed.anchors[:, None] + slots).flatten()  # [A B]
    anchor = packed.anchors.repeat_interleave(block_size)
    row_of_block = _repeated(packed.num_blocks, device)
    row = torch.cat([_repeated(packed.num_positions, device), row_of_block.repeat_interleave(block_size)])  # [T + A B]
    starts = [torch.arange(n, device=device) for n in packed.num_positions]
    key = torch.cat([*starts, position])  # [T + A B]

    def mask(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = (position[q], anchor[q], key[k])
        in_context = (k < T) & (row[T + q] == row[k]) & sees(layer, *at, is_context=True)
        in_block = (q // block_size == (k - T) // block_size) & sees(layer, *at, is_context=False)
        return in_context | ((k >= T) & in_block)

    return create_block_mask(mask, None, None, len(position), len(key), device=device)


def attend_by_mask(
    q: Tensor,  # [A, B, N, E]
    k: Tensor,  # [A, B, G, E]
    v: Tensor,  # [A, B, G, E]
    context_k: Tensor,  # [T, G, E]
    context_v: Tensor,  # [T, G, E]
    mask: BlockMask,
    sinks: Tensor | None,  # [N]
) -> Tensor:  # [A, B, N, E]
    """The blocks' queries over what the mask lets them see."""
    queries = q.flatten(0, 1).transpose(0, 1)[None]  # [1, N, A B, E]
    keys = torch.cat([context_k, k.flatten(0, 1)]).transpose(0, 1)[None]  # [1, G, T + A B, E]
    values = torch.cat([context_v, v.flatten(0, 1)]).transpose(0, 1)[None]
    attention = _compiled() if q.is_cuda else flex_attention
    out, aux = attention(
        queries, keys, values, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=sinks is not None)
    )
    if sinks is not None:  # a sink takes its share of the softmax and gives nothing
        out = (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(q.dtype)
    return out[0].transpose(0, 1).reshape(q.shape)


@cache
def _compiled() -> Callable:
    # Every pass has its own lengths.
    return torch.compile(flex_attention, dynamic=True)


def _repeated(counts: tuple[int, ...], device: torch.device) -> Tensor:  # [sum of counts], each index so often
    counts = torch.tensor(counts, dtype=torch.int64, device=device)
    return torch.arange(len(counts), device=device).repeat_interleave(counts)
