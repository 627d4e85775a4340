"""One training step's loss and gradient, in as many passes as memory wants.

Legend: A blocks of a pass, K predicted slots of a block, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.deal import Deal, StepResult
from drafter.frozen import FrozenTarget
from drafter.loss import SlotWeights, block_loss, decay_weights, dpace_weights
from drafter.model import Drafter
from drafter.packing import Packed, nothing, pack
from drafter.vocabulary import Candidates
from pipeline.config import TrainConfig


def backward(
    drafter: Drafter,
    frozen: FrozenTarget,
    deals: Sequence[Deal],
    slot_weights: SlotWeights,
    *,
    normalizer: float,
    candidates: Candidates | None = None,
    tokens_per_pass: int,
    num_passes: int | None = None,
) -> StepResult:
    """Add the gradient of these deals, whose loss is summed and divided by ``normalizer``; what came out of it.

    ``num_passes``: go forward and backward so many times, the last over nothing, with zero gradients. Processes that
    shard the drafter must all do so equally often.
    """
    shape, dtype = drafter.shape, frozen.head.dtype
    candidates = candidates or Candidates(frozen.head, None, None)
    result = StepResult(0.0, torch.zeros(shape.num_draft_tokens), [])
    passes = passes_of(deals, tokens_per_pass)
    for some in passes + [[]] * ((num_passes or 0) - len(passes)):
        packed = pack(some, shape.block_size, dtype) if some else nothing(shape.context_size, shape.block_size, dtype)
        loss, hits = _pass(drafter, frozen, packed.to(frozen.head.device), slot_weights, normalizer, candidates)
        accepted = hits.cumprod(dim=-1).sum(dim=-1).long().split(packed.num_blocks) if some else ()
        result = StepResult(result.loss + loss, result.hits + hits.sum(dim=0), [*result.accepted, *accepted])
    return result


def passes_of(deals: Sequence[Deal], tokens_per_pass: int) -> list[list[Deal]]:
    """The deals in their order, of at most so many context tokens together, but for a longer one alone."""
    passes, num_tokens = [], 0
    for deal in deals:
        length = int(deal.anchors[-1]) if len(deal.anchors) else 0
        if not passes or num_tokens + length > tokens_per_pass:
            passes.append([])
            num_tokens = 0
        passes[-1].append(deal)
        num_tokens += length
    return passes


def hidden_of(drafter: Drafter, frozen: FrozenTarget, packed: Packed) -> Tensor:  # [A, K, H]
    """What the head reads for the predicted slots."""
    mask_embedding = frozen.embedding[drafter.shape.mask_token_id]
    return drafter(packed, frozen.embedding[packed.anchor_ids], mask_embedding)


def slot_weights_of(config: TrainConfig, block_size: int) -> SlotWeights:
    """The configured weighting of a block's slots."""
    if config.loss == "dpace":
        return dpace_weights(config.dpace_alpha)
    return decay_weights(block_size, config.decay_gamma)


def _pass(
    drafter: Drafter,
    frozen: FrozenTarget,
    packed: Packed,
    slot_weights: SlotWeights,
    normalizer: float,
    candidates: Candidates,
) -> tuple[float, Tensor]:  # loss, and float32 [A, K], 1 where a slot is right
    loss, parts = block_loss(
        hidden_of(drafter, frozen, packed),
        candidates.head,
        candidates.labels(packed.labels),
        slot_weights,
        normalizer=normalizer,
        block_weights=packed.weights,
        logit_offset=candidates.logit_offset,
        logit_scale=drafter.shape.logit_scale,
        logit_soft_cap=frozen.logit_soft_cap,
    )
    loss.backward()
    return float(loss.detach()), parts[1].float().cpu()
