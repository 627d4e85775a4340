"""Block losses against a frozen head, without ever holding [tokens, vocabulary].

The head is not trained, so the gradient that reaches the drafter is computed chunk by chunk in the
forward pass, while a chunk's logits are at hand; backward only scales it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Weights of the K slots of each block, from the slots' cross-entropy: [N, K] -> [N, K].
SlotWeights = Callable[[Tensor], Tensor]

_CHUNK_LOGITS = 1 << 23  # values of logits held at once: 32 MB in float32


def decay_weights(block_size: int, gamma: float | None = None) -> SlotWeights:
    """Weights exp(-(k - 1) / gamma) of slot k.

    Source: DFlash, arXiv 2602.06036: gamma 7, 5 and 4 for blocks of 16, 10 and 8; scaled between them.
    """
    if gamma is None:
        gamma = {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, 7.0 * block_size / 16))
    weights = torch.exp(-torch.arange(block_size - 1, dtype=torch.float64) / gamma)
    return lambda cross_entropy: weights.to(cross_entropy).expand_as(cross_entropy)


def dpace_weights(alpha: float) -> SlotWeights:
    """Weights by how much each slot's log-probability moves the expected accepted length.

    Source: D-PACE, arXiv 2605.18810, equations 7 and 8: smoothed confidence (1 - alpha) q + alpha, weight of
    slot j the sum over m >= j of the product of the first m confidences. No gradient flows through them.
    """

    def weights(cross_entropy: Tensor) -> Tensor:  # [N, K] -> [N, K]
        confidence = (1 - alpha) * torch.exp(-cross_entropy) + alpha
        reach = confidence.cumprod(dim=-1)
        return reach.flip(-1).cumsum(dim=-1).flip(-1)

    return weights


def block_loss(
    hidden: Tensor,  # [A, K, H], the drafter's output for slots 1..K of A blocks
    head: Tensor,  # [V, H], frozen
    labels: Tensor,  # [A, K], the target's tokens at those positions
    slot_weights: SlotWeights,
    *,
    normalizer: float,
    block_weights: Tensor | None = None,  # [A]; None: 1
    logit_offset: Tensor | None = None,  # [V], added to every slot's logits
    logit_scale: float = 1.0,
    logit_soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted cross-entropy summed over blocks and divided by ``normalizer``, and its parts.

    Logits are scale * cap * tanh(head @ hidden / cap) + offset. Returns (loss [], slot cross-entropy and argmax hits
    stacked [2, A, K], without gradient).
    """
    if block_weights is None:
        block_weights = hidden.new_ones(len(hidden))
    scaling = (logit_scale, logit_soft_cap)
    loss, parts = _BlockLoss.apply(
        hidden, head, labels, slot_weights, block_weights / normalizer, logit_offset, scaling
    )
    return loss, parts


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        slot_weights: SlotWeights,
        block_weights: Tensor,
        logit_offset: Tensor | None,
        scaling: tuple[float, float | None],
    ) -> tuple[Tensor, Tensor]:
        A, K, H = hidden.shape
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scale, cap = scaling
        gradient = torch.empty_like(hidden)
        parts = hidden.new_empty(2, A, K, dtype=wide)
        loss = hidden.new_zeros((), dtype=wide)
        blocks = max(1, _CHUNK_LOGITS // (K * head.shape[0]))
        for start in range(0, A, blocks):
            chunk = slice(start, start + blocks)
            h, target = hidden[chunk].reshape(-1, H), labels[chunk].reshape(-1, 1)
            logits = (h @ head.T).to(wide)  # [n*K, V]
            slope = scale
            if cap is not None:
                logits = logits.div_(cap).tanh_()
                slope = scale * (1 - logits**2)
                logits.mul_(cap)
            logits *= scale
            if logit_offset is not None:
                logits += logit_offset
            top = logits.max(dim=-1, keepdim=True)
            at_label = logits.gather(1, target)
            probabilities = logits.sub_(top.values).exp_()  # in place: still unnormalised
            total = probabilities.sum(dim=-1, keepdim=True)
            cross_entropy = (total.log() + top.values - at_label).view(-1, K)
            weight = slot_weights(cross_entropy) * block_weights[chunk, None].to(wide)
            # d loss / d logits = weight * (softmax - one-hot of the label)
            at_logits = probabilities.div_(total).scatter_add_(1, target, -torch.ones_like(total))
            at_logits *= weight.reshape(-1, 1) * slope
            gradient[chunk] = (at_logits.to(head.dtype) @ head).view(-1, K, H)
            loss += (weight * cross_entropy).sum()
            parts[0, chunk] = cross_entropy
            parts[1, chunk] = (top.indices == target).view(-1, K).to(wide)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return loss, parts

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_parts: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), *[None] * 6
