"""Where a training block may start."""

import torch
from torch import Tensor


def num_legal_anchors(num_reply_tokens: int, block_size: int) -> int:
    """How many blocks may start in a reply: at each of its tokens, from the first on, where a full block fits.

    The anchor is a token that the target emitted, since decoding only ever starts a block there.
    Partial final blocks are not used in training: the walk, which measures, does use them.
    """
    return max(0, num_reply_tokens - block_size + 1)


def draw_anchors(num_prompt_tokens: int, num_tokens: int, block_size: int, limit: int, seed: int) -> Tensor:
    """At most ``limit`` legal anchors of one reply, in order, drawn without replacement by this seed.

    Shape: int64 [m]. Tokens ``num_prompt_tokens .. num_tokens - 1`` are the target's reply.
    """
    num_legal = num_legal_anchors(num_tokens - num_prompt_tokens, block_size)
    chosen = torch.arange(num_legal)
    if num_legal > limit:
        chosen = torch.randperm(num_legal, generator=torch.Generator().manual_seed(seed))[:limit].sort().values
    return num_prompt_tokens + chosen


def anchor_seed(seed: int, epoch: int, row: int) -> int:
    """What a row's anchors are drawn by: anew each epoch, and for each row. Below 2**64, as generators want it."""
    return ((seed * 1_000_003 + epoch) * 1_000_003 + row) % 2**64
