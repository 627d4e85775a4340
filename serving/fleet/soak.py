"""The canary replica's soak: does its drafter accept what the others' does, or what the gate promised?

Looks are few and planned: after ``min_s``, and each time that has doubled, until ``max_s``. Look k is judged at
error_rate / 2^k (k = 1, 2, …), so that all of them together keep to the error rate. Between looks nothing is decided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

MIN_INTERVALS = 8
"""Fewer intervals with traffic say too little about their own scatter."""


@dataclass(frozen=True)
class SoakPolicy:
    """When a soak ends, and how."""

    min_steps: int
    """Verification steps of the canary replica before anything is judged."""
    min_s: float
    max_s: float
    min_ratio: float
    """Acceptance length of the canary replica over that of the others."""
    error_rate: float = 0.05
    undecided: Literal["abort", "go_on"] = "abort"
    """What ``max_s`` without a verdict means."""


@dataclass(frozen=True)
class Interval:
    """Drafts and accepted tokens between two scrapes."""

    canary_drafts: int
    canary_accepted: int
    other_drafts: int
    other_accepted: int


@dataclass(frozen=True)
class Verdict:
    """What a look says."""

    outcome: Literal["pass", "fail", "extend"]
    why: str


def is_due(looks: int, elapsed_s: float, policy: SoakPolicy) -> bool:
    """Whether the next look's time has come, after so many looks."""
    return elapsed_s >= min(policy.min_s * 2**looks, policy.max_s)


def steps_of(intervals: Sequence[Interval]) -> int:
    """Verification steps that the canary replica has counted."""
    return sum(one.canary_drafts for one in intervals)


def judge(
    intervals: Sequence[Interval], policy: SoakPolicy, *, looks: int, elapsed_s: float, promise: float | None = None
) -> Verdict:
    """The verdict of look number ``looks`` + 1.

    The other replicas' counts of the same time are compared with; where they counted nothing, the gate's ``promise``
    (an acceptance length).
    """
    found = _compare(intervals, policy.error_rate / 2 ** (looks + 1), policy.min_steps, promise)
    if isinstance(found, str):
        return _undecided(found, policy) if elapsed_s >= policy.max_s else Verdict("extend", found)
    ratio, low, high, against = found
    told = f"acceptance length is {ratio:.3f} of {against} [{low:.3f}, {high:.3f}], at least {policy.min_ratio:g} asked"
    if low >= policy.min_ratio:
        return Verdict("pass", told)
    if high < policy.min_ratio:
        return Verdict("fail", told)
    return _undecided(told, policy) if elapsed_s >= policy.max_s else Verdict("extend", told)


def _undecided(why: str, policy: SoakPolicy) -> Verdict:
    told = f"{why}; undecided after {policy.max_s:g} s"
    return Verdict("pass" if policy.undecided == "go_on" else "fail", told)


def _compare(
    intervals: Sequence[Interval], error_rate: float, min_steps: int, promise: float | None
) -> tuple[float, float, float, str] | str:
    """Ratio, its two one-sided bounds and what it was compared with; or why there is none."""
    own = [one for one in intervals if one.canary_drafts]
    steps = steps_of(own)
    if steps < min_steps:
        return f"the canary replica counted {steps} steps of {min_steps}"
    both = [one for one in own if one.other_drafts]
    if len(both) >= MIN_INTERVALS:
        used, against = both, "the other replicas'"
    elif promise is not None:
        used, against = own, f"the {promise:.3f} that the gate measured"
    else:
        return f"the other replicas counted drafts in {len(both)} intervals of {MIN_INTERVALS}, and no gate measured it"
    if len(used) < MIN_INTERVALS:
        return f"{len(used)} intervals with traffic of {MIN_INTERVALS}"
    fixed = None if used is both else promise
    ratio = math.log(_ratio(used, fixed))
    # The jackknife over intervals: steps of one reply, and of one kind of traffic, come together.
    left_out = [math.log(_ratio([*used[:i], *used[i + 1 :]], fixed)) for i in range(len(used))]
    mean, n = sum(left_out) / len(used), len(used)
    spread = math.sqrt((n - 1) / n * sum((one - mean) ** 2 for one in left_out))
    reach = _t_quantile(1 - error_rate, n - 1) * spread
    return math.exp(ratio), math.exp(ratio - reach), math.exp(ratio + reach), against


def _ratio(intervals: Sequence[Interval], promise: float | None) -> float:
    own = _length(sum(i.canary_drafts for i in intervals), sum(i.canary_accepted for i in intervals))
    if promise is not None:
        return own / promise
    return own / _length(sum(i.other_drafts for i in intervals), sum(i.other_accepted for i in intervals))


def _length(num_drafts: int, num_accepted: int) -> float:
    return 1 + num_accepted / num_drafts


def _t_quantile(p: float, df: int) -> float:
    """Student's t by the first terms of its expansion around the normal. Source: Abramowitz & Stegun 26.7.5."""
    z = NormalDist().inv_cdf(p)
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
