"""Block losses against a frozen head, without ever holding [tokens, vocabulary].

The head is not trained, so the gradient that reaches the drafter is computed in the forward pass, while logits are at
hand, and backward only scales it. Tokens and vocabulary are both cut into pieces that stay in the processor's cache:
after matrix units, what a large head costs is the way to memory. A piece of logits is turned into its own softmax in
place, and pieces are put together by their log-sum-exps, as attention over long contexts is.

Legend: A blocks, K predicted slots of a block, n tokens (slots) of a piece, V vocabulary, v tokens of it in a piece,
H width.

Source: the softmax over pieces is that of FlashAttention, arXiv 2205.14135, section 3.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter.precision import product_dtype

# Weights of the K slots of each block, from the slots' cross-entropy: [A, K] -> [A, K].
SlotWeights = Callable[[Tensor], Tensor]


class Piece(NamedTuple):
    """How much of the logits is held at once."""

    tokens: int
    vocabulary: int


_PIECES = {"cpu": Piece(1024, 2048), "cuda": Piece(8192, 16384)}


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

    def weights(cross_entropy: Tensor) -> Tensor:  # [A, K] -> [A, K]
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
    stacked [2, A, K], without gradient), in float32 at least. In bfloat16 logits and probabilities are rounded to it
    once each, as by a bfloat16 head; their sums are not. A CPU that multiplies it slowly rounds neither.
    """
    if block_weights is None:
        block_weights = torch.ones(len(hidden), dtype=torch.float64, device=hidden.device)
    logits = _Logits(head, logit_offset, logit_scale, logit_soft_cap)
    loss, parts = _BlockLoss.apply(hidden, logits, labels, slot_weights, block_weights / normalizer)
    return loss, parts


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, logits: "_Logits", labels: Tensor, slot_weights: SlotWeights, block_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        (A, K, H), wide = hidden.shape, torch.promote_types(hidden.dtype, torch.float32)
        gradient = torch.empty_like(hidden)
        parts = hidden.new_empty(2, A, K, dtype=wide)
        loss = hidden.new_zeros((), dtype=wide)
        blocks = max(1, _PIECES[hidden.device.type].tokens // K)
        for chunk in (slice(start, start + blocks) for start in range(0, A, blocks)):
            found = logits.against(hidden[chunk].reshape(-1, H), labels[chunk].flatten())
            cross_entropy = found.cross_entropy.view(-1, K)
            weight = slot_weights(cross_entropy) * block_weights[chunk, None].to(wide)
            loss += (weight * cross_entropy).sum()
            gradient[chunk] = found.gradient.mul_(weight.view(-1, 1)).view(-1, K, H)
            parts[0, chunk], parts[1, chunk] = cross_entropy, found.is_hit.view(-1, K)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts)
        return loss, parts

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_parts: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


class _Found(NamedTuple):
    cross_entropy: Tensor  # [n]
    gradient: Tensor  # [n, H], of the cross-entropy by the head's input
    is_hit: Tensor  # bool [n]


class _Logits(NamedTuple):
    head: Tensor  # [V, H]
    offset: Tensor | None  # [V]
    scale: float
    soft_cap: float | None

    def against(self, x: Tensor, labels: Tensor) -> _Found:  # [n, H], [n]
        """The cross-entropy of these tokens, piece of the vocabulary by piece."""
        x = x.to(product_dtype(x.dtype, x.device))
        (n, H), V = x.shape, len(self.head)
        size, wide = min(V, _PIECES[x.device.type].vocabulary), torch.promote_types(x.dtype, torch.float32)
        room = x.new_empty(2 if self.soft_cap else 1, n, size)
        of_piece, of_piece_wide, labels = x.new_empty(n, H), x.new_empty(n, H, dtype=wide), labels[:, None]
        at_label = x.new_empty(n, 1, dtype=wide)
        slope_at_label = x.new_empty(n, 1)
        total = x.new_full((n, 1), float("-inf"), dtype=wide)  # log-sum-exp of the pieces so far
        mean = x.new_zeros(n, H, dtype=wide)  # of head, by the softmax over the pieces so far
        top = x.new_full((n, 1), float("-inf"))
        is_hit = torch.zeros_like(labels, dtype=torch.bool)
        for start in range(0, V, size):
            part = slice(start, min(start + size, V))
            head = self.head[part].to(x.dtype)
            logits, slope = self._of(x, head, part, room)
            inside = (labels >= part.start) & (labels < part.stop)
            place = (labels - start).clamp(0, logits.shape[1] - 1)
            at_label = torch.where(inside, logits.gather(1, place).to(wide), at_label)
            highest = logits.amax(dim=-1, keepdim=True)
            # A search for the place is slow: only where the label itself is highest can an equal one come before it.
            leads = inside & (highest > top) & (logits.gather(1, place) == highest)
            rows = leads.squeeze(1).nonzero().squeeze(1)
            leads[rows] = logits[rows].argmax(dim=-1, keepdim=True) == place[rows]
            is_hit = torch.where(highest > top, leads, is_hit)
            top = torch.maximum(highest, top)
            probabilities = torch._softmax(logits, -1, False, out=logits)
            of_part = highest.to(wide) - probabilities.amax(dim=-1, keepdim=True).to(wide).log()
            total = torch.logaddexp(total, of_part)
            if slope is not None:
                slope_at_label = torch.where(inside, slope.gather(1, place), slope_at_label)
                probabilities *= slope
            torch.mm(probabilities, head, out=of_piece)
            mean.lerp_(of_piece_wide.copy_(of_piece), (of_part - total).exp())
        of_label = self.head[labels.squeeze(1)].to(wide)
        if self.soft_cap:
            of_label *= slope_at_label.to(wide)
        gradient = mean.sub_(of_label)
        if self.scale != 1:
            gradient *= self.scale
        return _Found((total - at_label).squeeze(1), gradient, is_hit.squeeze(1))

    def _of(self, x: Tensor, head: Tensor, part: slice, room: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [n, v], and where they are capped by how much each follows what it is made of, [n, v]."""
        v = len(head)
        logits, slope = room[0].view(-1)[: len(x) * v].view(-1, v), None
        torch.mm(x, head.T, out=logits)
        if self.soft_cap:
            logits.div_(self.soft_cap).tanh_()
            slope = torch.mul(logits, logits, out=room[1].view(-1)[: len(x) * v].view(-1, v)).neg_().add_(1)
            logits.mul_(self.soft_cap)
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.offset is not None:
            logits.add_(self.offset[part])
        return logits, slope
