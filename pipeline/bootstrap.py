"""How sure a ratio is: a paired bootstrap over whole conversations.

Replies of one conversation resemble each other, so conversations are drawn, not replies, and both drafters'
counts of a drawn conversation are drawn together. Percentile intervals are too narrow for few conversations;
they are expanded as a t interval is over a normal one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

# Conversations in one batch of resamples: bounds the memory, changes nothing else.
_BATCH_DRAWS = 2_000_000
# A tail of fewer resamples than this is noise: beyond, it is continued as a normal one from there.
_MIN_TAIL_RESAMPLES = 20
_LOG = 50.0  # log ratios beyond this are as good as infinite


@dataclass(frozen=True)
class Interval:
    """A ratio of challenger over champion, and its central interval; NaN where it cannot be told."""

    ratio: float
    low: float
    high: float
    num_clusters: int
    """What was repeated: conversations, or sittings."""

    @property
    def is_known(self) -> bool:
        """Whether ratio and both ends are numbers."""
        return all(map(math.isfinite, (self.ratio, self.low, self.high)))


UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Resamples:
    """A ratio and what the bootstrap made of it."""

    ratio: float
    logs: np.ndarray  # [resamples], the log ratio of every resample, sorted; empty where it cannot be told
    num_clusters: int
    num_effective: float
    """Conversations that weigh alike and tell as much (Kish): fewer than there are where a few weigh most."""

    def interval(self, level: float) -> Interval:
        """The central interval that leaves ``level`` on either side.

        Source: Hesterberg 2015, What Teachers Should Know About the Bootstrap, 4.4 (expanded percentile).
        """
        if not len(self.logs) or not level > 0:
            return Interval(self.ratio, math.nan, math.nan, self.num_clusters)
        low, high = (math.exp(min(max(self._quantile(tail, level), -_LOG), _LOG)) for tail in ("low", "high"))
        return Interval(self.ratio, low, high, self.num_clusters)

    def p_under(self, floor: float) -> float:
        """One-sided p-value against "the ratio is ``floor`` or more"; NaN where it cannot be told."""
        if not len(self.logs):
            return math.nan
        resolved = _MIN_TAIL_RESAMPLES / len(self.logs)
        share = 1 - np.searchsorted(self.logs, math.log(floor), side="left") / len(self.logs)
        if resolved < share < 1 - resolved:
            z = -special.ndtri(share)
        else:
            centre, edge = self._at(0.5), self._at(1 - resolved if share <= resolved else resolved)
            if edge == centre:
                return float(centre >= math.log(floor))
            z = -special.ndtri(resolved) * (math.log(floor) - centre) / abs(edge - centre)
        return float(special.stdtr(self.num_effective - 1, -z / self._expansion))

    @property
    def _expansion(self) -> float:
        return math.sqrt(self.num_effective / (self.num_effective - 1))

    def _at(self, share: float) -> float:
        """The log ratio below which this share of the resamples lies."""
        place = share * (len(self.logs) - 1)
        below = min(int(place), len(self.logs) - 2)
        return float(self.logs[below] + (place - below) * (self.logs[below + 1] - self.logs[below]))

    def _quantile(self, tail: str, level: float) -> float:
        # By the lower tail, where a tiny level stays exact.
        z = -self._expansion * float(special.stdtrit(self.num_effective - 1, level))
        resolved = _MIN_TAIL_RESAMPLES / len(self.logs)
        share = max(float(special.ndtr(-z)), resolved)
        end = self._at(share if tail == "low" else 1 - share)
        if share > resolved:
            return end
        centre = self._at(0.5)
        return centre - (end - centre) * z / float(special.ndtri(resolved))


def compare(
    rows: Iterable[Mapping[str, Any]], first: str, second: str, *, level: float, resamples: int, seed: int
) -> Interval:
    """Emitted tokens a step, role ``first`` over role ``second``, and the interval that leaves ``level`` on each side.

    Rows are of schemas.ACCEPTANCE; each request must be there for both roles or for neither.
    """
    return resample(cluster_sums(rows, first, second), resamples=resamples, seed=seed).interval(level)


def resample(sums: np.ndarray, *, resamples: int, seed: int) -> Resamples:  # sums [4, clusters]
    """The ratio (a/b) / (c/d) of the sums over conversations, and of so many resamples of the conversations.

    Source: scipy.stats.bootstrap (paired).
    """
    from scipy import stats

    ratio = float(np.exp(_log_ratio(*sums))) if sums.size else math.nan
    num_clusters, num_effective = sums.shape[1], effective(sums[3])
    if not (num_effective > 1 and 0 < ratio < math.inf):
        return Resamples(ratio, np.empty(0), num_clusters, num_effective)
    found = stats.bootstrap(
        tuple(sums),
        _log_ratio,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=resamples,
        batch=max(1, _BATCH_DRAWS // num_clusters),
        rng=np.random.default_rng(seed),
    ).bootstrap_distribution
    # A resample without a step has no ratio; one without a token is infinitely low, and counts.
    return Resamples(ratio, np.sort(found[~np.isnan(found)]).clip(-_LOG, _LOG), num_clusters, num_effective)


def effective(weights: np.ndarray) -> float:
    """Kish's effective number of conversations; 0 where nothing weighs."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def cluster_sums(rows: Iterable[Mapping[str, Any]], first: str, second: str) -> np.ndarray:  # [4, clusters]
    """Per conversation: emitted tokens and steps of the first role, then of the second, weighted to the traffic."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row["role"] not in (first, second):
            continue
        one = sums.setdefault(row["conversation"], [0.0, 0.0, 0.0, 0.0])
        start = 0 if row["role"] == first else 2
        # Each reply's first token came from its prefill.
        one[start] += row["weight"] * (row["num_tokens"] - 1)
        one[start + 1] += row["weight"] * row["num_drafts"]
    return np.array([sums[name] for name in sorted(sums)], dtype=float).reshape(-1, 4).T


def _log_ratio(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int = -1) -> np.ndarray:
    """Log of a ratio of ratios of sums along the axis of the conversations."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log((a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis)))
