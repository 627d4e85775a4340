"""Where a training block may start."""

import torch
from torch import Tensor


def legal_anchors(supervised: Tensor, block_size: int) -> Tensor:  # bool [n] -> int64 [m]
    """Positions where a block may start: the anchor is supervised and the full block fits.

    The anchor is a token that the target emitted, since decoding only ever starts a block there.
    Partial final blocks are not used in training: the walk, which measures, does use them.
    """
    last = supervised.shape[0] - block_size
    return supervised[: max(0, last + 1)].nonzero().squeeze(-1)


def draw_anchors(num_prompt_tokens: int, num_tokens: int, block_size: int, limit: int, seed: int) -> Tensor:
    """At most ``limit`` legal anchors of one reply, in order, drawn without replacement by this seed.

    Shape: int64 [m]. Tokens ``num_prompt_tokens .. num_tokens - 1`` are the target's reply.
    """
    supervised = torch.arange(num_tokens) >= num_prompt_tokens
    legal = legal_anchors(supervised, block_size)
    if len(legal) <= limit:
        return legal
    chosen = torch.randperm(len(legal), generator=torch.Generator().manual_seed(seed))[:limit]
    return legal[chosen.sort().values]


def anchor_seed(seed: int, epoch: int, row: int) -> int:
    """What a row's anchors are drawn by: anew each epoch, and for each row."""
    return (seed * 1_000_003 + epoch) * 1_000_003 + row
