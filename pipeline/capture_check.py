"""The capture check: an engine's states of one prompt, at its own precision, against what they must be.

A capture that takes the wrong layer, or shifts positions, trains drafters that look good and are never accepted. So
no run begins without it. Always: the prompt read alone, among others, and as the engine answered it, must agree.
Then, by the target's size, one of two. *Reference*: a plain forward pass of the same weights. *Head*: the last decoder
layer's states, through the engine's own final norm and head, must give the engine's own next tokens.

Shapes: n positions, L layers, H hidden size.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.errors import StageError

# The engine's next token may have a rebuilt log probability this far below the best one's: a near-tie, which rounding
# to bf16 decides. A wrong layer or position is off by several nats somewhere.
MAX_HEAD_MARGIN = 0.5


def compare_runs(
    alone: np.ndarray,  # float32 [n, L, H]: read alone
    batched: np.ndarray,  # float32 [n, L, H]: the same ids, read among others
    answered: np.ndarray,  # float32 [n, L, H]: the same ids, kept while the engine answered
    layer_ids: Sequence[int],
) -> dict[str, float]:
    """The largest relative difference of a position's states between the runs, and each layer's typical norm."""
    found = {f"layer_{layer}_norm": norm for layer, norm in zip(layer_ids, _median_norms(alone), strict=True)}
    for name, other in (("batched_error", batched), ("answered_error", answered)):
        found[name] = max(float(_row_errors(other[:, i], alone[:, i]).max()) for i in range(len(layer_ids)))
    return found


def compare_reference(
    states: np.ndarray,  # float32 [n, L, H]
    reference: np.ndarray,  # float32 [>= max(layer_ids) + 1, n, H]: outputs of all first decoder layers
    layer_ids: Sequence[int],
) -> dict[str, float]:
    """Per layer: the largest relative error of a position, and which of the reference's layers is nearest."""
    found = {}
    for index, layer in enumerate(layer_ids):
        errors = [float(np.median(_row_errors(states[:, index], other))) for other in reference]
        found[f"layer_{layer}_error"] = float(_row_errors(states[:, index], reference[layer]).max())
        found[f"layer_{layer}_nearest"] = float(np.argmin(errors))
    return found


def compare_head(
    rebuilt: Sequence[float],  # log probability of each emitted token, from the captured last layer
    best: Sequence[float],  # the largest log probability there
    emitted: Sequence[float],  # the engine's own log probability of the token
) -> dict[str, float]:
    """How well the last layer's states give the engine's own next tokens back.

    ``head_top1``: share of tokens that are the rebuilt best. ``head_margin``: nats that one is below it at most.
    ``head_error``: the largest difference of a token's probability.
    """
    margins = np.asarray(best) - np.asarray(rebuilt)
    errors = np.abs(np.exp(rebuilt) - np.exp(emitted))
    return {
        "head_top1": float((margins <= 0).mean()),
        "head_margin": float(margins.max()),
        "head_error": float(errors.max()),
    }


def judge(check: Mapping[str, float], *, layer_ids: Sequence[int], max_error: float) -> None:
    """Raises: StageError when the captured states are not the target's."""
    wrong = [
        f"{what}: relative difference {check[name]:.4f}"
        for name, what in (("batched_error", "read alone and in a batch"), ("answered_error", "read and answered"))
        if not check[name] <= max_error  # also when it is no number
    ]
    wrong += _judge_head(check, max_error) if "head_error" in check else _judge_layers(check, layer_ids, max_error)
    if wrong:
        raise StageError(
            f"capture check failed: {'; '.join(wrong)} (allowed: capture.max_check_error = {max_error}). The engine's "
            "states are not the target's; nothing was captured. Check vLLM's version, target.dtype and the weights"
        )


def worst_error(check: Mapping[str, float]) -> float:
    """The largest of a check's errors, for a log line."""
    return max(value for name, value in check.items() if name.endswith("_error"))


def typical_norms(check: Mapping[str, float], layer_ids: Sequence[int]) -> list[float]:
    """The checked prompt's norms, one a layer: what other rows' norms are judged by."""
    return [check[f"layer_{layer}_norm"] for layer in layer_ids]


def _judge_layers(check: Mapping[str, float], layer_ids: Sequence[int], max_error: float) -> list[str]:
    wrong = []
    for layer in layer_ids:
        error, nearest = check[f"layer_{layer}_error"], int(check[f"layer_{layer}_nearest"])
        if not error <= max_error:
            wrong.append(f"layer {layer}: relative error {error:.4f}")
        if nearest != layer:
            wrong.append(f"layer {layer}: nearest to the reference's layer {nearest}")
    return wrong


def _judge_head(check: Mapping[str, float], max_error: float) -> list[str]:
    wrong = []
    if not check["head_margin"] <= MAX_HEAD_MARGIN:
        wrong.append(
            f"the last layer's states give {check['head_top1']:.0%} of the engine's next tokens back, one of them "
            f"{check['head_margin']:.2f} nats below the best (a near-tie has up to {MAX_HEAD_MARGIN})"
        )
    if not check["head_error"] <= max_error:
        wrong.append(f"a next token's probability is off by {check['head_error']:.4f}")
    return wrong


def _row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:  # [n, H] -> [n]
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def _median_norms(states: np.ndarray) -> list[float]:  # [n, L, H] -> L root mean squares
    return [float(x) for x in np.median(np.sqrt(np.mean(states**2, axis=2)), axis=0)]
