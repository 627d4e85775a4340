"""Rotary position embedding, in every form that vLLM's DFlash drafter runs.

Legend: R rotary dimensions of a head (the first ones; the others are left alone).
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import Frozen


class Rope(Frozen):
    """How positions turn queries and keys."""

    theta: float
    rotary_dim: int
    """Dimensions of a head that are turned, R."""
    is_interleaved: bool = False
    """Pairs are (2i, 2i + 1); else (i, i + R/2)."""
    kind: str = "default"
    """rope_type: default, linear, dynamic, yarn, llama3, longrope ..."""
    parameters: dict[str, Any] = {}
    """What the kind needs beside theta, as in config.json's rope_parameters."""

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [...] -> 2 x [..., R/2]
        """Cosine and sine of each pair's angle, attention scaling included."""
        exponent = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=torch.float64) / self.rotary_dim
        angles = positions[..., None].double() * self.theta**-exponent
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [..., E], [..., R/2] -> [..., E]
        """``x`` with its first R dimensions turned."""
        turned, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        if self.is_interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
