"""Which groups a request is in, dimension by dimension: what is reported apart, and may not get worse unseen.

What only the request says (its route, tenant, language, thinking) is written down when it is collected; what depends
on how it is rendered and sampled (length, temperature) is added when it is served.
"""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.canonical import canonical_json

_LENGTHS = (128, 512, 2048, 8192)  # prompt tokens: upper ends of the buckets
_TEMPERATURES = (0.0, 0.5, 1.0)


def served_slices(collected: str | None, *, num_prompt_tokens: int, temperature: float) -> str:
    """The slices of a request that is served, as canonical JSON: those collected, its length and its temperature."""
    own: dict[str, Any] = json.loads(collected) if collected else {}
    derived = {"length": _bucket(num_prompt_tokens, _LENGTHS), "temperature": _bucket(temperature, _TEMPERATURES)}
    return canonical_json({**own, **derived})


def names(slices: str) -> list[str]:
    """``dimension=value`` for every slice that a request is in."""
    found: Mapping[str, Any] = json.loads(slices)
    return [f"{dimension}={found[dimension]}" for dimension in sorted(found)]


def _bucket(value: float, ends: tuple[float, ...]) -> str:
    """The bucket of a value, by its upper end: small or equal, or above the last."""
    return next((f"≤{end:g}" for end in ends if value <= end), f">{ends[-1]:g}")
