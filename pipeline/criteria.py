"""What a challenger has to show, one function a criterion; each gives reasons, the gate weighs them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.acceptance import accepted_drafts_per_step
from pipeline.bootstrap import Interval, Resamples
from pipeline.config import GateConfig
from pipeline.power import Evidence

_MIN_USABLE_SHARE = 0.5  # of the general prompts: they are few, and small targets loop on some
_MIN_WALKED = 20


@dataclass(frozen=True)
class Reason:
    """One thing that was checked, with its figures."""

    code: str
    message: str
    value: float | None
    limit: float | None
    passed: bool | None
    """None: shown, not required."""
    verdict: str | None = None
    """What the verdict becomes where it failed."""
    low: float | None = None
    high: float | None = None
    """The interval of the value, where it has one."""
    n: int | None = None
    """What the value rests on: conversations, sittings, prompts or trials."""


def lift(policy: GateConfig, lift: Interval, evidence: Evidence, *, level: float) -> Reason:
    """Promotion needs the lower end above min_lift; where that is open, whether more prompts could tell."""
    more = {"low": lift.low, "high": lift.high, "n": lift.num_clusters}
    if not lift.is_known:
        message = "the lift is not a number: no usable step on one side, or one conversation that outweighs all"
        return Reason("lift", message, lift.ratio, policy.min_lift, False, "cannot_say", n=lift.num_clusters)
    message = (
        f"{lift.ratio:.3f} × the champion's emitted tokens a step, "
        f"{1 - 2 * level:.1%} interval {lift.low:.3f} to {lift.high:.3f}; must be above {policy.min_lift:g}"
    )
    passed, verdict = lift.low > policy.min_lift, "hold"
    if lift.high < policy.min_lift:
        verdict = "reject"
    elif not passed and not evidence.is_enough:
        verdict = "cannot_say"
        message += f". Not enough evidence: {_missing(evidence)}"
    elif not passed:
        message += (
            f". Measured well enough: {evidence.needed_clusters} conversations find a gain of "
            f"{policy.worthwhile_lift - 1:.0%} in {policy.power:.0%} of gates, so one is hardly there"
        )
    return Reason("lift", message, lift.ratio, policy.min_lift, passed, verdict, **more)


def _missing(evidence: Evidence) -> str:
    if evidence.needed_clusters is None:
        return f"{evidence.num_clusters} conversations, and how many are needed cannot be told from them"
    return (
        f"{evidence.num_clusters} of about {evidence.needed_clusters} conversations; "
        f"about {evidence.more_prompts} more prompts"
    )


def slices(
    policy: GateConfig, slices: Mapping[str, Resamples], shares: Mapping[str, float], *, level: float
) -> list[Reason]:
    """Which slices are shown to be under their floor, after correction for how many there are.

    One block stops the challenger, whichever slice it is for. Benjamini and Hochberg's correction then errs, over
    all slices that are fine, as often as a single test (Simes), and misses fewer bad ones than Holm's.
    """
    from scipy import stats

    floor = policy.min_slice_lift
    # A slice in which the challenger gets no token past the prefill's has no log ratio, and needs no test.
    p_values = {
        name: one.p_under(floor) if one.ratio else 0.0
        for name, one in slices.items()
        if one.num_clusters >= policy.min_slice_clusters
    }
    known = {name: p for name, p in p_values.items() if math.isfinite(p)}
    adjusted = dict(zip(known, stats.false_discovery_control(list(known.values())), strict=True)) if known else {}
    reasons = []
    for name, one in slices.items():
        interval = one.interval(level)
        message = (
            f"slice {name}: {one.ratio:.3f} × ({interval.low:.3f} to {interval.high:.3f}) on {one.num_clusters} "
            f"conversations, {shares[name]:.0%} of the traffic"
        )
        passed, verdict = True, "reject"
        if one.num_clusters < policy.min_slice_clusters:
            passed = None
            message += f" (fewer than {policy.min_slice_clusters} conversations: shown, not required)"
        elif name not in adjusted:
            passed, verdict = (False, "cannot_say") if not math.isfinite(one.ratio) else (None, None)
            message += ": cannot be told"
        elif adjusted[name] <= policy.error_rate:
            passed = False
            message += f": shown to be under {floor:g} (p = {adjusted[name]:.2g}, corrected for {len(known)} slices)"
        else:
            message += f": not shown to be under {floor:g}"
        more = {"low": interval.low, "high": interval.high, "n": one.num_clusters}
        reasons.append(Reason(f"slice:{name}", message, one.ratio, floor, passed, verdict, **more))
    return reasons


def general(policy: GateConfig, general: Interval | None, num_prompts: tuple[int, int]) -> Reason:
    """The guard against narrowing: general prompts may not be shown to lose more than the policy allows.

    ``num_prompts``: those that can be used, of so many that were served.
    """
    floor = policy.min_general_lift
    if general is None:
        return Reason("general", "general prompts: not measured", None, floor, None)
    more = {"low": general.low, "high": general.high, "n": general.num_clusters}
    usable, served = num_prompts
    if usable < _MIN_USABLE_SHARE * served:
        message = (
            f"general prompts: {usable} of {served} can be used, at least {_MIN_USABLE_SHARE:.0%} are needed: too few "
            "to tell whether the drafter has narrowed; see the rows' flags and the server's log, and measure again"
        )
        return Reason("general", message, general.ratio, floor, False, "cannot_say", n=general.num_clusters)
    lost = general.ratio == 0 and general.num_clusters >= policy.min_slice_clusters  # no interval around it
    if not (lost or general.is_known):
        message = "general prompts: the lift is not a number: no usable step on one side, or a single prompt"
        return Reason("general", message, general.ratio, floor, False, "cannot_say", n=general.num_clusters)
    passed = not (lost or general.high < floor)
    message = (
        f"general prompts: {general.ratio:.3f} × ({general.low:.3f} to {general.high:.3f}) on {general.num_clusters} "
        f"conversations: {'not shown' if passed else 'shown'} to be under {floor:g}"
    )
    if not passed:
        message += "; the drafter has narrowed, mix general prompts into its training"
    return Reason("general", message, general.ratio, floor, passed, "reject", **more)


def control(comparisons: Mapping[str, Interval]) -> list[Reason]:
    """Is it the traffic, or just more training? Shown; a gain is a gain."""
    if (over := comparisons.get("challenger/control")) is None:
        return []
    proof = "above" if over.low > 1 else "not shown to be above"
    message = f"{over.ratio:.3f} × the control ({over.low:.3f} to {over.high:.3f}): {proof} more training alone"
    return [Reason("control", message, over.ratio, 1.0, None, None, over.low, over.high, over.num_clusters)]


def walks(policy: GateConfig, measured: Mapping[str, Any]) -> list[Reason]:
    """Offline walk against serving, in accepted drafts a step, for every role that drafts."""
    reasons = []
    for role, one in measured.items():
        gap = walk_gap(one)
        if gap is None or _num_walked(one) < _walks_needed(one):
            message = f"{role}: no walk over the gate rows to compare serving with"
            if gap is not None:
                message = (
                    f"{role}: the walk covers {_num_walked(one)} of {one['num_requests']} requests, "
                    f"at least {_walks_needed(one)} are needed to compare serving with"
                )
            message += "; capture the gate rows' states again"
            required = False if role == "challenger" and policy.require_walk else None
            reasons.append(Reason(f"walk:{role}", message, None, policy.max_walk_gap, required, "hold"))
            continue
        passed = gap <= policy.max_walk_gap  # False on NaN
        message = f"{role}: accepted drafts a step differ by {gap:.1%} from the walk, at most {policy.max_walk_gap:.0%}"
        if not passed:
            message = f"training and serving disagree. {message}. {_largest_difference(one)}"
        n = one["walk"]["num_drafts"]
        reasons.append(Reason(f"walk:{role}", message, gap, policy.max_walk_gap, passed, "cannot_say", n=n))
    return reasons


def walk_gap(one: Mapping[str, Any]) -> float | None:
    """Relative difference of accepted drafts a step, served against walked; None without a walk.

    Both are counted to the end of the replies: a walk can't know what would have been accepted after it.
    """
    if not (walk := one.get("walk")):
        return None
    return _relative(_served_beside(one), walk, "num_accepted_and_emitted")


def _num_walked(one: Mapping[str, Any]) -> int:
    """Requests that a walk covers: all that are counted where nothing else is said, none where only some are."""
    walk = one["walk"]
    served = walk.get("served") or {}
    return served.get("num_requests", walk.get("num_replies", 0 if served else one["num_requests"]))


def _walks_needed(one: Mapping[str, Any]) -> int:
    """Half of the counted requests; sampled ones can't be walked, so of the traffic's sampling twenty are enough."""
    half = math.ceil(one["num_requests"] / 2)
    return half if is_greedy(one.get("settings", {})) else min(_MIN_WALKED, half)


def is_greedy(settings: Mapping[str, Any]) -> bool:
    """Whether every reply was greedy: sampled ones differ by design. Absent settings are of greedy measurements."""
    return (settings.get("sampling") or {"temperature": 0.0}).get("temperature") == 0.0


def _served_beside(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The served counts of the requests that were walked: all of them where nothing else is said."""
    return one["walk"].get("served") or one


def _relative(served: Mapping[str, Any], walked: Mapping[str, Any], accepted: str) -> float:
    a = accepted_drafts_per_step(served["num_drafts"], served[accepted])
    b = accepted_drafts_per_step(walked["num_drafts"], walked["num_accepted_tokens"])
    return 0.0 if a == b else abs(a - b) / b if b else math.inf


def _largest_difference(one: Mapping[str, Any]) -> str:
    """Where the walk and the served counts of a role lie farthest apart: a position, and a slice."""
    walk, served = one["walk"], _served_beside(one)
    said = []
    ours, theirs = conditional(served), conditional(walk)
    gaps = {k: abs(a - b) for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if math.isfinite(a - b)}
    if gaps:
        k = max(gaps, key=lambda k: gaps[k])
        said.append(f"Most at position {k + 1}, which {ours[k]:.1%} of drafts pass served and {theirs[k]:.1%} walked")
    by_slice = {
        name: _relative(one["slices"][name], part, "num_accepted_and_emitted")
        for name, part in (walk.get("slices") or {}).items()
        if name in (one.get("slices") or {})
    }
    if by_slice:
        worst = max(by_slice, key=lambda name: by_slice[name])
        said.append(f"Most in slice {worst}: {by_slice[worst]:.1%}")
    said.append("Check that both see the same states, layers, positions, template and rows")
    return ". ".join(said)


def conditional(counts: Mapping[str, Any]) -> list[float]:
    """Share of drafts accepted at each position, of those accepted up to the one before; NaN without a trial."""
    accepted = list(counts.get("num_accepted_tokens_per_pos") or [])
    trials = [counts["num_drafts"], *accepted][: len(accepted)]
    return [a / n if n else math.nan for a, n in zip(accepted, trials, strict=True)]
