"""Root-mean-square norm and rope, with gradients by hand: on a CPU small operations cost as much as products.

Legend: E norm width, R rotary dimensions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafter.rope import Rope


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, in float32 at least."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., E] -> [..., E]
        return _norm(x, self.weight, self.eps, None, None, None)

    def and_turn(self, x: Tensor, rope: Rope, cos: Tensor, sin: Tensor) -> Tensor:  # [..., E], [..., R/2] -> [..., E]
        """Norm, then rope, rounded to the dtype of ``x`` once."""
        return _norm(x, self.weight, self.eps, rope, cos, sin)


def _norm(x: Tensor, gain: Tensor, eps: float, rope: Rope | None, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if not torch.compiler.is_compiling():
        return _Norm.apply(x, gain, eps, rope, cos, sin)
    # The compiler puts small operations together itself, and cannot trace what is written in place.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gain.to(wide.dtype)
    return (y if rope is None else rope.turn(y, cos, sin)).to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, rope: Rope | None, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        shrink = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # [..., 1], 1 / root mean square
        shrink.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, shrink, cos, sin)
        ctx.rope = rope
        y = (x * shrink).mul_(gain.to(wide))
        return (y if rope is None else rope.turn(y, cos, sin)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, shrink, cos, sin = ctx.saved_tensors
        wide, E = shrink.dtype, x.shape[-1]
        if ctx.rope is not None:
            grad = ctx.rope.turn(grad, cos, -sin)  # a turn's transpose is the turn back
        gain_wide, y = gain.to(wide), x * shrink
        by_gain = (grad * y).reshape(-1, E)
        along = (by_gain @ gain_wide).view(shrink.shape).div_(-E)
        by_x = (grad * gain_wide).addcmul_(y, along).mul_(shrink)
        return by_x.to(x.dtype), by_gain.sum(0).to(gain.dtype), None, None, None, None
