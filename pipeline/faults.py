"""What a row's states must be to enter the cache. Capture must not wait for it: a pass or two over the words.

Shapes: n positions, L layers, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.quantize import as_float32

# A row's typical norm may differ from the checked prompt's by this factor, a layer at a time, before something
# else than the prompt must be the cause.
MAX_NORM_RATIO = 32.0
# Positions of a row that its typical norm is taken over: a median needs no more.
NORM_POSITIONS = 64


@dataclass(frozen=True)
class RowFault:
    """Why a row's states cannot be trained on."""

    reason: str
    detail: dict[str, Any]


def find_fault(words: np.ndarray, *, num_states: int, typical_norms: Sequence[float] = ()) -> RowFault | None:
    """The first fault of a row's states, or None: length, finiteness, zeros, norm.

    ``typical_norms`` are the checked prompt's, one a layer; without them the norms are not judged.
    """
    if len(words) != num_states or not num_states:
        return RowFault("wrong_length", {"num_states": len(words), "expected": num_states})
    peaks = (words & 0x7FFF).max(axis=2)  # [n, L], magnitudes: their words have the same order
    if (peaks >= 0x7F80).any():  # all exponent bits set: infinite, or no number
        position, layer = (int(n) for n in np.argwhere(peaks >= 0x7F80)[0])
        element = int(np.argmax((words[position, layer] & 0x7FFF) >= 0x7F80))
        return RowFault("not_finite", {"position": position, "layer_index": layer, "element": element})
    if not peaks.all():
        position, layer = (int(n) for n in np.argwhere(peaks == 0)[0])
        share = float((peaks == 0).any(axis=1).mean())
        return RowFault("zero_states", {"share": round(share, 4), "position": position, "layer_index": layer})
    for layer, (norm, typical) in enumerate(zip(median_norms(words), typical_norms, strict=False)):
        if not typical / MAX_NORM_RATIO <= norm <= typical * MAX_NORM_RATIO:
            return RowFault("norm_out_of_range", {"layer_index": layer, "norm": norm, "expected_about": typical})
    return None


def median_norms(words: np.ndarray) -> list[float]:  # uint16 [n, L, H]
    """The median of each layer's root mean square, over positions that are spread evenly over the row."""
    some = words[:: -(-len(words) // NORM_POSITIONS)]
    with np.errstate(over="ignore"):
        return [float(x) for x in np.median(np.sqrt(np.mean(as_float32(some) ** 2, axis=2)), axis=0)]
