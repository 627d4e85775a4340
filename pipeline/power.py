"""How much evidence is enough: the conversations at which a gain worth having would be found.

The spread comes from the measurement itself: what each conversation adds to the log of the ratio.
"""

import math
from dataclasses import dataclass

import numpy as np

_MAX_CLUSTERS = 10_000_000


@dataclass(frozen=True)
class Evidence:
    """What there is and what is needed."""

    num_clusters: int
    num_prompts: int
    spread: float
    """Standard deviation of a conversation's influence on the log of the ratio; NaN where it cannot be told."""
    needed_clusters: int | None
    """Conversations with which a worthwhile gain would be found; None where it cannot be told."""

    @property
    def is_enough(self) -> bool:
        """Whether a worthwhile gain would have been found."""
        return self.needed_clusters is not None and self.num_clusters >= self.needed_clusters

    @property
    def more_prompts(self) -> int | None:
        """Prompts still missing, at the present number of prompts a conversation."""
        if self.needed_clusters is None or not self.num_clusters:
            return None
        missing = max(0, self.needed_clusters - self.num_clusters)
        return math.ceil(missing * self.num_prompts / self.num_clusters)


def evidence(sums: np.ndarray, *, num_prompts: int, gain: float, level: float, power: float) -> Evidence:
    """The evidence in sums per conversation [4, clusters] for a gain of ``gain`` times the asked for ratio."""
    num_clusters = sums.shape[1]
    spread = float(np.std(influence(sums), ddof=1)) if num_clusters > 1 else math.nan
    needed = needed_clusters(spread, gain=gain, level=level, power=power) if math.isfinite(spread) else None
    return Evidence(num_clusters, num_prompts, spread, needed)


def influence(sums: np.ndarray) -> np.ndarray:  # [4, clusters] → [clusters]
    """What each conversation adds to log((a/b) / (c/d)); their mean is 0, their spread / √n its standard error.

    Source: the delta method for a ratio of sums (Cochran 1977, Sampling Techniques, 6.3).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b, c, d = sums / sums.sum(axis=1, keepdims=True)
    return sums.shape[1] * (a - b - c + d)


def needed_clusters(spread: float, *, gain: float, level: float, power: float) -> int | None:
    """The fewest conversations with which a one-sided t test at ``level`` finds ``gain`` with probability ``power``.

    None where even ten million are too few.
    """
    from scipy import stats

    if spread == 0:
        return 2

    def found(n: int) -> float:
        return float(stats.nct.sf(stats.t.isf(level, n - 1), n - 1, math.sqrt(n) * math.log(gain) / spread))

    low, high = 1, 2
    while not found(high) >= power:
        low, high = high, 2 * high
        if high > _MAX_CLUSTERS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) >= power else (middle, high)
    return high
