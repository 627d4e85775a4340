"""Rotary position embedding, in every form that vLLM's DFlash drafter runs.

In all of them position p turns pair i by ``p * frequencies[i]`` and lengthens it by ``length``; they differ in how
both follow from the settings. vLLM's own dynamic kinds are fixed, too: they take the longest position, not the
current one.

Legend: R rotary dimensions of a head (the first ones; the others are left alone), E head width.
"""

import math
from functools import cached_property
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
    """rope_type: default, linear, ntk, dynamic, yarn, llama3 or proportional."""
    parameters: dict[str, Any] = {}
    """What the kind needs beside theta: config.json's rope_parameters, defaults filled in (drafter/rope_config.py)."""

    @cached_property
    def frequencies(self) -> tuple[float, ...]:  # R/2
        """Radians by which one position turns each pair."""
        return tuple(_FREQUENCIES[self.kind](self).tolist())

    @cached_property
    def length(self) -> float:
        """What turned vectors are multiplied with: the attention scaling of yarn, else 1."""
        return _yarn_length(self) if self.kind == "yarn" else 1.0

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # [...] -> 2 x [..., R/2]
        """Cosine and sine of each pair's angle, attention scaling included."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angles = positions[..., None].double() * frequencies
        return (angles.cos() * self.length).to(dtype), (angles.sin() * self.length).to(dtype)

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


def _powers(theta: float, rotary_dim: int) -> Tensor:  # [R/2]
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def _default(rope: Rope) -> Tensor:
    return _powers(rope.theta, rope.rotary_dim)


def _linear(rope: Rope) -> Tensor:
    """Positions are divided. Source: position interpolation, arXiv 2306.15595."""
    return _default(rope) / rope.parameters["factor"]


def _ntk(rope: Rope) -> Tensor:
    """Fixed NTK, or mixed with ``mixed_b``. Source: kexue.fm/archives/9706; vLLM's ntk_scaling_rope.py."""
    factor, mixed, pairs = rope.parameters["factor"], rope.parameters.get("mixed_b"), rope.rotary_dim // 2
    if mixed is None:
        return _powers(rope.theta * factor, rope.rotary_dim) / factor ** (1 / pairs)
    steps = torch.arange(1, pairs + 1, dtype=torch.float64)
    return _default(rope) / torch.exp(math.log(factor) * (steps / pairs) ** mixed)


def _dynamic(rope: Rope) -> Tensor:
    """NTK for the longest position, or by alpha. Source: vLLM's dynamic_ntk_scaling_rope.py, _alpha_rope.py."""
    given, R = rope.parameters, rope.rotary_dim
    growth = given.get("alpha")
    if growth is None:
        times_longer = given["max_position_embeddings"] / given["max_trained_positions"]
        growth = given["factor"] * times_longer - (given["factor"] - 1)
    return _powers(rope.theta * growth ** (R / (R - 2)), R)


def _yarn(rope: Rope) -> Tensor:
    """Slow pairs interpolated, fast ones as they were, a ramp between. Source: YaRN, arXiv 2309.00071, 3.2."""
    given, R = rope.parameters, rope.rotary_dim

    def dimension(rotations: float) -> float:
        """The one that makes so many rotations within the original length."""
        wavelength = given["original_max_position_embeddings"] / rotations
        return R * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(given.get("beta_fast", 32)), dimension(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(R // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return _default(rope) * (1 - ramp + ramp / given["factor"])


def _yarn_length(rope: Rope) -> float:
    """Source: YaRN, arXiv 2309.00071, section 3.4; which setting wins: vLLM's yarn_scaling_rope.py."""
    given, factor = rope.parameters, rope.parameters["factor"]

    def length(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return length(given["mscale"]) / length(given["mscale_all_dim"])
    return length(1.0)


def _llama3(rope: Rope) -> Tensor:
    """Long waves interpolated, short ones as they were. Source: Llama 3.1's release; vLLM's llama3_rope.py."""
    given, plain = rope.parameters, _default(rope)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    rotations = given["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = (rotations - low) / (high - low) if high != low else torch.zeros_like(plain)
    kept = torch.where(rotations > high, 1.0, torch.where(rotations < low, 0.0, kept))
    return plain * (kept + (1 - kept) / given["factor"])


def _proportional(rope: Rope) -> Tensor:
    """The first pairs turn as if all did, the others not at all. Source: Gemma 4's release; vLLM's gemma4_rope.py."""
    plain = _default(rope)
    plain[rope.parameters["num_turning_pairs"] :] = 0
    return plain


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "proportional": _proportional,
}
