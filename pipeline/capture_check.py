"""The capture check: an engine's states of one prompt against a plain forward pass of the same weights.

A capture that takes the wrong layer, or shifts positions, trains drafters that look good and are never
accepted. So no run begins without this comparison.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.errors import StageError
from pipeline.states import as_float32, median_norms


def compare(
    words: np.ndarray,  # uint16 [n, L, H]: captured alone
    batched: np.ndarray,  # uint16 [n, L, H]: the same prompt, captured among others
    reference: np.ndarray,  # float32 [>= max(layer_ids) + 1, n, H]: outputs of all first decoder layers
    layer_ids: Sequence[int],
) -> dict[str, float]:
    """Per layer: the largest relative error of a position, which layer is nearest, the typical norm."""
    captured, found = as_float32(words), {}
    for index, (layer, norm) in enumerate(zip(layer_ids, median_norms(words), strict=True)):
        errors = [_typical_error(captured[:, index], other) for other in reference]
        found[f"layer_{layer}_error"] = float(_row_errors(captured[:, index], reference[layer]).max())
        found[f"layer_{layer}_nearest"] = float(np.argmin(errors))
        found[f"layer_{layer}_norm"] = norm
    rows = _row_errors(as_float32(batched).reshape(len(batched), -1), captured.reshape(len(captured), -1))
    found["batched_error"] = float(rows.max())
    return found


def judge(check: Mapping[str, float], *, layer_ids: Sequence[int], max_error: float) -> None:
    """Raises: StageError when the captured states are not those of the reference."""
    wrong = []
    for layer in layer_ids:
        error, nearest = check[f"layer_{layer}_error"], int(check[f"layer_{layer}_nearest"])
        if not error <= max_error:  # also when it is no number
            wrong.append(f"layer {layer}: relative error {error:.4f}")
        if nearest != layer:
            wrong.append(f"layer {layer}: nearest to the reference's layer {nearest}")
    if not check["batched_error"] <= max_error:
        wrong.append(f"captured alone and in a batch: relative difference {check['batched_error']:.4f}")
    if wrong:
        raise StageError(
            f"capture check failed: {'; '.join(wrong)} (allowed: capture.max_check_error = {max_error}). The engine's "
            "states are not the target's; nothing was captured. Check vLLM's version, target.dtype and the weights"
        )


def typical_norms(check: Mapping[str, float], layer_ids: Sequence[int]) -> list[float]:
    """The checked prompt's norms, one a layer: what other rows' norms are judged by."""
    return [check[f"layer_{layer}_norm"] for layer in layer_ids]


def _row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:  # [n, D] -> [n]
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def _typical_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.median(_row_errors(found, expected)))
