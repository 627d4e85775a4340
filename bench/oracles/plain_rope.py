"""By how much each position turns each pair of a head's dimensions, written out scalar by scalar."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rotation:
    """How positions turn the first ``size`` dimensions of a head."""

    kind: str  # config.json's rope_type
    theta: float
    size: int
    are_neighbours_paired: bool = False  # (0, 1), (2, 3), ...; else the first half with the second
    settings: Mapping[str, Any] | None = None  # what config.json says beside

    def frequency(self, i: int) -> float:
        """Radians a position by which pair i turns. Source: the papers that each kind's function names."""
        plain = self.theta ** (-2 * i / self.size)
        return _FREQUENCIES[self.kind](self, i, plain)

    def length(self) -> float:
        """By how much a turned vector grows."""
        return _yarn_length(self) if self.kind == "yarn" else 1.0


def _ntk(rotation: Rotation, i: int, plain: float) -> float:
    """Fixed (theta grows) and mixed NTK scaling. Source: kexue.fm/archives/9706."""
    factor, mixed = rotation.settings["factor"], rotation.settings.get("mixed_b")
    if mixed is None:
        return (rotation.theta * factor) ** (-2 * i / rotation.size) / factor ** (2 / rotation.size)
    return plain / factor ** (((i + 1) / (rotation.size / 2)) ** mixed)


def _dynamic(rotation: Rotation, i: int, plain: float) -> float:
    """NTK scaling for one fixed length, or by a given alpha (Hunyuan)."""
    settings, n = rotation.settings, rotation.size
    if "alpha" in settings:
        growth = settings["alpha"]
    else:
        longer = settings["max_position_embeddings"] / settings["max_trained_positions"]
        growth = settings["factor"] * longer - settings["factor"] + 1
    return plain * growth ** (-2 * i / (n - 2))


def _yarn(rotation: Rotation, i: int, plain: float) -> float:
    """Slow pairs are interpolated, fast ones kept, a ramp between. Source: YaRN, arXiv 2309.00071, section 3.2."""
    settings, n = rotation.settings, rotation.size

    def pair_that_turns(times: float) -> float:
        return (
            n
            * math.log(settings["original_max_position_embeddings"] / (times * 2 * math.pi))
            / (2 * math.log(rotation.theta))
        )

    first, last = pair_that_turns(settings.get("beta_fast", 32)), pair_that_turns(settings.get("beta_slow", 1))
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n - 1)
    last += 0.001 if first == last else 0
    slow = min(1.0, max(0.0, (i - first) / (last - first)))
    return plain * (1 - slow) + plain / settings["factor"] * slow


def _yarn_length(rotation: Rotation) -> float:
    settings = rotation.settings

    def length(weight: float) -> float:
        return 0.1 * weight * math.log(settings["factor"]) + 1 if settings["factor"] > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return length(settings["mscale"]) / length(settings["mscale_all_dim"])
    return length(1)


def _llama3(rotation: Rotation, i: int, plain: float) -> float:
    """By wavelength: short ones kept, long ones interpolated. Source: Llama 3.1's release."""
    settings = rotation.settings
    wavelength, original = 2 * math.pi / plain, settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return plain / settings["factor"]
    kept = (original / wavelength - low) / (high - low) if high != low else 0.0
    return (1 - kept) * plain / settings["factor"] + kept * plain


def _proportional(rotation: Rotation, i: int, plain: float) -> float:
    """The first pairs alone turn, spread as if all did. Source: Gemma 4's release."""
    return plain if i < rotation.settings["num_turning_pairs"] else 0.0


_FREQUENCIES: dict[str, Callable[[Rotation, int, float], float]] = {
    "default": lambda rotation, i, plain: plain,
    "linear": lambda rotation, i, plain: plain / rotation.settings["factor"],
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "proportional": _proportional,
}
