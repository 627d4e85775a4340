"""Does the drafter draft a block, or one good token with nothing behind it?

A length that comes from position 0 alone hides a block that is broken behind it: a wrong mask, states that only
the first slot sees, positions that don't advance. So each later position is judged by its own trials: the drafts
that were accepted up to the one before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.bootstrap import resample
from pipeline.config import GateConfig
from pipeline.criteria import Reason

# The normal rule for counts: where the floor held, fewer acceptances than this would be expected, and none by chance.
_MIN_EXPECTED = 10


@dataclass(frozen=True)
class Position:
    """Conditional acceptance of the challenger at one position of the block, from 1."""

    position: int
    num_trials: int
    """The challenger's drafts that were accepted up to the position before; all of them at the first."""
    rate: float
    champion_rate: float
    p_own: float | None = None
    """One-sided p-value, corrected for the positions: under the floor against the challenger's first position."""
    p_champion: float | None = None
    """And against the champion at the same position. None: too few trials to judge, or the first."""


def judge(policy: GateConfig, rows: Sequence[Mapping[str, Any]]) -> list[Position]:
    """Every position of the challenger's block, with what is shown about it; unweighted, since it is about the drafter.

    Clustered by conversation. Empty where the challenger doesn't draft.
    """
    challenger, champion = (_counts(rows, role) for role in ("challenger", "champion"))
    if not challenger.size:
        return []
    found, judged, floor = [], [], policy.min_position_ratio
    ours, theirs = challenger.sum(0), champion.sum(0)
    for k in range(1, challenger.shape[1]):
        rates = [
            counts[k] / counts[k - 1] if len(counts) > k and counts[k - 1] else math.nan for counts in (ours, theirs)
        ]
        found.append(Position(k, int(ours[k - 1]), *rates))
        if k > 1 and ours[0] and floor * ours[k - 1] * ours[1] / ours[0] >= _MIN_EXPECTED:
            own = _p_under(policy, challenger[:, [k, k - 1]], challenger[:, [1, 0]])
            other = math.nan
            if champion.shape[1] > k and theirs[k]:
                other = _p_under(policy, challenger[:, [k, k - 1]], champion[:, [k, k - 1]])
            judged.append((k - 1, own, other))
    for (k, *_), own, other in zip(judged, *(_corrected([j[i] for j in judged]) for i in (1, 2)), strict=True):
        found[k] = Position(**{**found[k].__dict__, "p_own": own, "p_champion": other})
    return found


def block(policy: GateConfig, positions: Sequence[Position]) -> Reason:
    """A block that collapses behind its first position: rejected where the champion's doesn't, else held."""
    floor, judged = policy.min_position_ratio, [p for p in positions if p.p_own is not None]
    if not judged:
        message = "positions behind the first: too few drafts reach them to judge"
        return Reason("positions", message, None, floor, None)
    collapsed = [p for p in judged if p.p_own <= policy.error_rate]
    lost = [p for p in collapsed if p.p_champion is not None and p.p_champion <= policy.error_rate]
    worst = min(judged, key=lambda p: p.rate)
    first = positions[0]
    value = worst.rate / first.rate
    n = worst.num_trials
    if not collapsed:
        message = (
            f"drafts are accepted at {worst.rate:.0%} or more at every position with enough trials, "
            f"{first.rate:.0%} at the first"
        )
        return Reason("positions", message, value, floor, True, n=n)
    where = ", ".join(f"{p.position} ({p.rate:.1%}, champion {p.champion_rate:.1%})" for p in collapsed)
    message = (
        f"good at the first position ({first.rate:.1%}) and broken behind it: of the drafts that get there, few are "
        f"accepted at position {where}; at least {floor:.0%} of the first's rate is expected. "
        "Check the block's mask, positions and states in training"
    )
    return Reason("positions", message, value, floor, False, "reject" if lost else "hold", n=n)


def _counts(rows: Sequence[Mapping[str, Any]], role: str) -> np.ndarray:  # [conversations, 1 + positions]
    """Per conversation, drafts, and drafts accepted at each position; conversations in one order for all roles."""
    names = {name: i for i, name in enumerate(sorted({row["conversation"] for row in rows}))}
    own = [row for row in rows if row["role"] == role]
    width = max((len(row["accepted_per_pos"]) for row in own), default=0)
    if not width:
        return np.zeros((0, 0))
    counts = np.zeros((len(names), 1 + width))
    for row in own:
        one = counts[names[row["conversation"]]]
        one[0] += row["num_drafts"]
        one[1 : 1 + len(row["accepted_per_pos"])] += row["accepted_per_pos"]
    return counts


def _p_under(policy: GateConfig, first: np.ndarray, second: np.ndarray) -> float:
    a, b, c, d = sums = np.concatenate([first, second], axis=1).T  # [4, conversations]
    if not a.any():
        return 0.0  # none where at least ten would be expected
    if a.sum() / b.sum() >= policy.min_position_ratio * c.sum() / d.sum():
        return 1.0  # not under the floor, and so not shown to be
    return resample(sums, resamples=policy.resamples, seed=policy.seed).p_under(policy.min_position_ratio)


def _corrected(p_values: Sequence[float]) -> list[float | None]:
    """Benjamini and Hochberg over the positions that could be compared."""
    from scipy import stats

    known = [i for i, p in enumerate(p_values) if math.isfinite(p)]
    found: list[float | None] = [None] * len(p_values)
    if known:
        for i, p in zip(known, stats.false_discovery_control([p_values[i] for i in known]), strict=True):
            found[i] = float(p)
    return found
