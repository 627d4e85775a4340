"""What a challenger has to show, one function a criterion; each gives reasons, the gate weighs them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.acceptance import accepted_drafts_per_step
from pipeline.bootstrap import Interval
from pipeline.config import GateConfig

# A slice of fewer conversations is shown, but its lift is mostly noise and blocks nothing.
MIN_SLICE_CLUSTERS = 5
# An incumbent that accepts less than this share of what it accepted when it was last measured: not its fault.
MIN_RECORDED_SHARE = 0.5
# More unusable replies than this, and what is left is a selection.
MAX_FLAGGED_SHARE = 0.2


@dataclass(frozen=True)
class Reason:
    """One thing that was checked."""

    code: str
    message: str
    value: float | None
    limit: float | None
    passed: bool | None
    """None: shown, not required."""
    verdict: str | None = None
    """What the verdict becomes where it failed."""


def measurement(
    config: GateConfig, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any], lift: Interval
) -> list[Reason]:
    """Whether the measurement can carry a verdict at all."""
    n, needed = lift.num_clusters, config.min_clusters
    enough = f"{n} conversations, {needed} are needed"
    if n < needed:
        enough += f": cannot say; collect about {needed - n} more"
    unusable = {row["row_id"] for row in rows if row["flag"] is not None}
    share = len(unusable) / max(1, len({row["row_id"] for row in rows}))
    kinds = ", ".join(sorted({row["flag"] for row in rows if row["flag"] is not None})) or "none"
    accepted = sum(one["num_accepted_tokens"] for one in measured.values())
    nothing = "" if accepted else ": suspect the environment, not the drafters"
    found = [
        Reason("clusters", enough, n, needed, n >= needed, "cannot_say"),
        Reason(
            "flagged",
            f"{share:.0%} of requests left out ({kinds}), at most {MAX_FLAGGED_SHARE:.0%} may be",
            *(share, MAX_FLAGGED_SHARE, share <= MAX_FLAGGED_SHARE, "cannot_say"),
        ),
        Reason(
            "accepted_anything",
            f"{accepted} draft tokens accepted by all drafters together{nothing}",
            *(accepted, 1, accepted > 0, "cannot_say"),
        ),
    ]
    return found + _environment(measured["champion"])


def _environment(champion: Mapping[str, Any]) -> list[Reason]:
    """The incumbent against its own record: far below it, the server is to blame and no verdict is given."""
    recorded = champion.get("recorded_acceptance_length")
    if recorded is None:
        return []
    served = accepted_drafts_per_step(champion["num_drafts"], champion["num_accepted_tokens"])
    limit = MIN_RECORDED_SHARE * (recorded - 1)
    passed = served >= limit
    message = f"champion accepts {served:.3f} drafts a step here, {recorded - 1:.3f} when it was last measured"
    if not passed:
        message += ": environment suspect; check engine version, flags and drafter folder before anything else"
    return [Reason("environment", message, served, limit, passed, "cannot_say")]


def lift(config: GateConfig, lift: Interval) -> Reason:
    if not all(map(math.isfinite, (lift.ratio, lift.low, lift.high))):
        message = "the lift is not a number: no usable step on one side"
        return Reason("lift", message, lift.ratio, config.min_lift, False, "cannot_say")
    message = (
        f"{lift.ratio:.3f} × the champion's emitted tokens a step, "
        f"{config.confidence:.0%} interval {lift.low:.3f} to {lift.high:.3f}; must be above {config.min_lift:g}"
    )
    passed = lift.low > config.min_lift
    if passed or lift.high <= config.min_lift:
        return Reason("lift", message, lift.low, config.min_lift, passed, "reject")
    if lift.ratio > config.min_lift:
        # The interval shrinks with the root of the number of conversations.
        factor = ((lift.ratio - lift.low) / (lift.ratio - config.min_lift)) ** 2
        more = math.ceil(lift.num_clusters * factor) - lift.num_clusters
        message += f"; about {more} more conversations would decide it if the lift is real"
    return Reason("lift", message, lift.low, config.min_lift, False, "hold")


def slices(config: GateConfig, slices: Mapping[str, Interval]) -> list[Reason]:
    reasons = []
    for name, lift in slices.items():
        message = f"slice {name}: {lift.ratio:.3f} × on {lift.num_clusters} conversations"
        if lift.num_clusters < MIN_SLICE_CLUSTERS:
            message += f" (fewer than {MIN_SLICE_CLUSTERS}: shown, not required)"
            passed = None
        else:
            message += f", at least {config.min_slice_lift:g} asked for"
            passed = lift.ratio >= config.min_slice_lift
        reasons.append(Reason(f"slice:{name}", message, lift.ratio, config.min_slice_lift, passed, "reject"))
    return reasons


def speed(config: GateConfig, measured: Mapping[str, Any]) -> Reason:
    before, after = measured["champion"]["tokens_per_s"], measured["challenger"]["tokens_per_s"]
    ratio = after / before if before else math.nan
    message = (
        f"{after:.1f} tokens/s against {before:.1f} at the evaluated concurrency ({ratio:.2f} ×), "
        f"at least {config.min_speed_ratio:g} × asked for"
    )
    verdict = "reject" if math.isfinite(ratio) else "cannot_say"
    return Reason("speed", message, ratio, config.min_speed_ratio, ratio >= config.min_speed_ratio, verdict)


def walks(config: GateConfig, measured: Mapping[str, Any]) -> list[Reason]:
    """Offline walk against serving, in accepted drafts a step, for every role."""
    reasons = []
    for role, one in measured.items():
        gap = walk_gap(one)
        if gap is None:
            message = f"{role}: no walk over the gate rows to compare serving with"
            required = False if role == "challenger" else None
            reasons.append(Reason(f"walk:{role}", message, None, config.max_walk_gap, required, "hold"))
            continue
        passed = gap <= config.max_walk_gap  # False on NaN
        message = f"{role}: accepted drafts a step differ by {gap:.1%} from the walk, at most {config.max_walk_gap:.0%}"
        if not passed:
            message += ": training and serving don't see the same states, layers, positions or rows"
        reasons.append(Reason(f"walk:{role}", message, gap, config.max_walk_gap, passed, "hold"))
    return reasons


def walk_gap(one: Mapping[str, Any]) -> float | None:
    """Relative difference of accepted drafts a step, served against walked; None without a walk.

    Both are counted to the end of the replies: a walk can't know what would have been accepted after it.
    """
    if not (walk := one.get("walk")):
        return None
    served = accepted_drafts_per_step(one["num_drafts"], one["num_accepted_and_emitted"])
    walked = accepted_drafts_per_step(walk["num_drafts"], walk["num_accepted_tokens"])
    if served == walked:
        return 0.0
    return abs(served - walked) / walked if walked else math.inf


def replies(measured: Mapping[str, Any]) -> list[Reason]:
    """Speculation must not change answers; provable where batch shapes don't move near-ties."""
    different = sum(one.get("num_replies_different", 0) for one in measured.values())
    settings = measured["champion"].get("settings", {})
    exact = settings.get("dtype") == "float32" and settings.get("concurrency") == 1
    message = f"{different} replies differ from the champion's"
    message += "; in float32 at one request none may" if exact else " (near-ties move with batch shapes: a sign only)"
    return [Reason("lossless", message, different, 0, different == 0 if exact else None, "reject")]


def control(comparisons: Mapping[str, Interval]) -> list[Reason]:
    """Is it the traffic, or just more training? Shown; a gain is a gain."""
    if (over := comparisons.get("challenger/control")) is None:
        return []
    proof = "above" if over.low > 1 else "not shown to be above"
    message = f"{over.ratio:.3f} × the control ({over.low:.3f} to {over.high:.3f}): {proof} more training alone"
    return [Reason("control", message, over.low, 1.0, None)]
