"""How sure a ratio is: a paired bootstrap over whole conversations.

Replies of one conversation resemble each other, so conversations are drawn, not replies, and both drafters'
counts of a drawn conversation are drawn together.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Conversations in one batch of resamples: bounds the memory, changes nothing else.
_BATCH_DRAWS = 2_000_000


@dataclass(frozen=True)
class Interval:
    """A ratio of emitted tokens a step, and its confidence interval; NaN where it cannot be told."""

    ratio: float
    low: float
    high: float
    num_clusters: int


def compare(
    rows: Iterable[Mapping[str, Any]], first: str, second: str, *, confidence: float, resamples: int, seed: int
) -> Interval:
    """Emitted tokens a step, role ``first`` over role ``second``, with its percentile interval.

    Rows are of schemas.ACCEPTANCE; each request must be there for both roles or for neither.

    Source: scipy.stats.bootstrap (paired, percentile) on sums per conversation.
    """
    from scipy import stats

    sums = _cluster_sums(rows, first, second)
    ratio = float(_ratio(*sums)) if sums.size else math.nan
    if sums.shape[1] < 2 or not math.isfinite(ratio):
        return Interval(ratio, math.nan, math.nan, sums.shape[1])
    interval = stats.bootstrap(
        tuple(sums),
        _ratio,
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=resamples,
        batch=max(1, _BATCH_DRAWS // sums.shape[1]),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(ratio, float(interval.low), float(interval.high), sums.shape[1])


def _cluster_sums(rows: Iterable[Mapping[str, Any]], first: str, second: str) -> np.ndarray:  # [4, clusters]
    """Per conversation: emitted tokens and steps of the first role, then of the second."""
    sums: dict[str, np.ndarray] = {}
    for row in rows:
        if row["role"] not in (first, second):
            continue
        one = sums.setdefault(row["conversation"], np.zeros(4))
        start = 0 if row["role"] == first else 2
        one[start] += row["num_tokens"] - 1
        one[start + 1] += row["num_drafts"]
    return np.array([sums[name] for name in sorted(sums)]).reshape(-1, 4).T


def _ratio(
    first_tokens: np.ndarray, first_drafts: np.ndarray, second_tokens: np.ndarray, second_drafts: np.ndarray, axis=-1
) -> np.ndarray:
    """A ratio of ratios of sums along the axis of the conversations."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (first_tokens.sum(axis) / first_drafts.sum(axis)) / (second_tokens.sum(axis) / second_drafts.sum(axis))
