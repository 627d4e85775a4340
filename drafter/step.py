"""One training step's loss and gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.dataset import CachedRow, collate
from drafter.frozen import FrozenTarget
from drafter.loss import SlotWeights, block_loss, decay_weights, dpace_weights
from drafter.model import Drafter
from drafter.vocabulary import Candidates
from pipeline.config import TrainConfig


def backward(
    drafter: Drafter,
    frozen: FrozenTarget,
    share: Sequence[tuple[CachedRow, Tensor]],
    slot_weights: SlotWeights,
    *,
    normalizer: float,
    candidates: Candidates | None = None,
) -> tuple[float, Tensor]:
    """Add the gradient of these rows and their anchors; returns their loss and the number of hits per slot, [K]."""
    if not share:
        return 0.0, torch.zeros(drafter.shape.num_draft_tokens)
    rows, anchors = zip(*share, strict=True)
    batch = collate(rows, anchors, drafter.shape.block_size, frozen.head.dtype)
    hidden = drafter(
        batch.states,
        batch.anchors,
        frozen.embedding[batch.anchor_ids],
        frozen.embedding[drafter.shape.mask_token_id],
    )
    real = batch.is_real
    candidates = candidates or Candidates(frozen.head, None, None)
    loss, parts = block_loss(
        hidden[real],
        candidates.head,
        candidates.labels(batch.labels[real]),
        slot_weights,
        normalizer=normalizer,
        logit_offset=candidates.logit_offset,
    )
    loss.backward()
    return float(loss.detach()), parts[1].sum(dim=0)


def slot_weights_of(config: TrainConfig, block_size: int) -> SlotWeights:
    """The configured weighting of a block's slots."""
    if config.loss == "dpace":
        return dpace_weights(config.dpace_alpha)
    return decay_weights(block_size, config.decay_gamma)
