"""Rows and measurements → Verdict: every criterion weighed, at the end or at a look on the way.

Five verdicts. ``promote``: everything that was asked for holds. ``cannot_say``: the measurement carries no
verdict. ``reject``: it shows that the challenger is not good enough. ``dont_speculate``: the target alone is
faster where the fleet serves. ``hold``: not shown either way, or a check found something for a person to look at.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline import criteria, losslessness, pace, positions, sequential, slices
from pipeline.acceptance import unflagged_everywhere
from pipeline.artifacts import SpeedReport
from pipeline.bootstrap import Interval, Resamples, cluster_sums, compare, effective, resample
from pipeline.config import GateConfig
from pipeline.criteria import Reason
from pipeline.evidence import measurement, sound
from pipeline.fingerprint import require_same_settings
from pipeline.positions import Position
from pipeline.power import Evidence, evidence
from pipeline.verdict import Verdict, movers

SEVERITY = ("cannot_say", "reject", "dont_speculate", "hold")
_FEWEST = 2  # conversations of a small slice that a look goes by: one alone says nothing


@dataclass(frozen=True)
class _Figures:
    """Everything that is computed of a measurement before anything is judged."""

    usable: Sequence[Mapping[str, Any]]  # the gate set's rows that are compared
    levels: tuple[float, float]  # of the lift's intervals and of the sittings'
    comparisons: dict[str, Interval]
    evidence: Evidence
    slices: dict[str, Resamples]
    shares: dict[str, float]
    general: Interval | None
    num_general: tuple[int, int]  # general prompts that can be used, of so many that were served
    speed: Interval
    tail: Interval | None
    positions: list[Position]


def decide(
    policy: GateConfig,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    *,
    speed: SpeedReport | None = None,
    fractions: Sequence[float] = (1.0,),
    drift: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict on rows of schemas.ACCEPTANCE and what was measured of each role.

    ``fractions``: shares of the planned prompts at every look so far, the present one last. ``drift``: figure → the
    champion's second visit over its first; None where it came in turns. A ``speed`` of other settings is not used.

    Raises: FingerprintError when two roles were measured with different settings.
    """
    for role, one in measured.items():
        require_same_settings(
            measured["champion"].get("settings", {}), one.get("settings", {}), where=f"gate, champion and {role}"
        )
    unlike = pace.differences(measured["champion"].get("settings", {}), speed.settings) if speed else []
    if unlike:
        speed = None
    found = _figures(policy, rows, measured, fractions=fractions)
    reasons = _reasons(policy, found, rows, measured, speed)
    reasons += [*pace.unlike(unlike), *pace.drift(policy, drift)]
    failed = {reason.verdict for reason in reasons if reason.passed is False}
    gained, lost = movers(found.usable)
    return Verdict(
        decision=next((verdict for verdict in SEVERITY if verdict in failed), "promote"),
        reasons=reasons,
        comparisons=found.comparisons,
        slices={name: one.interval(policy.error_rate) for name, one in found.slices.items()},
        general=found.general,
        speed=found.speed,
        tail=found.tail,
        positions=found.positions,
        evidence=found.evidence,
        level=found.levels[0],
        speed_level=found.levels[1],
        looks=list(fractions),
        gained=gained,
        lost=lost,
        speculate_up_to=pace.speculate_up_to(speed) if speed else None,
        recommended=dict(speed.recommended) if speed else {},
    )


def settled(
    policy: GateConfig,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    *,
    fractions: Sequence[float],
) -> str | None:
    """``promote`` or ``reject`` where the evidence so far ends the evaluation, else None.

    A promotion has to hold in everything, and no slice that the planned prompts would judge may lie under its floor
    even unproved: the first few conversations could not prove it. A rejection is a clear loss: the lift's upper end
    is under min_lift.
    """
    # More prompts would not compare speculation with the target alone: the end asks for that.
    policy = policy.model_copy(update={"require_losslessness": False})
    usable = _usable(rows, "gate")
    draws = {"resamples": policy.resamples, "seed": policy.seed}
    lift = compare(usable, "challenger", "champion", level=_levels(policy, fractions)[0], **draws)
    if not (lift.low > policy.min_lift or lift.high < policy.min_lift):
        return None
    verdict = decide(policy, rows, measured, fractions=fractions)
    failed = {reason.code: reason.verdict for reason in verdict.reasons if reason.passed is False}
    if verdict.decision == "promote" and not _in_doubt(policy, verdict, fractions[-1]):
        return "promote"
    return "reject" if verdict.decision == "reject" and failed.get("lift") == "reject" else None


def _usable(rows: Sequence[Mapping[str, Any]], prompt_set: str) -> list[Mapping[str, Any]]:
    """The rows of a set that a paired comparison can be computed with."""
    return unflagged_everywhere(sound([row for row in rows if row["prompt_set"] == prompt_set]))


def _in_doubt(policy: GateConfig, verdict: Verdict, fraction: float) -> bool:
    """Whether a slice, or the general prompts, may still turn out to lose: too few so far, or under its floor."""
    enough = policy.min_slice_clusters
    guards = [(one, policy.min_slice_lift, _FEWEST) for one in verdict.slices.values()]
    if verdict.general:
        guards.append((verdict.general, policy.min_general_lift, enough))
    return any(
        one.num_clusters < fewest or not one.ratio >= floor
        for one, floor, fewest in guards
        if one.num_clusters >= enough * min(1.0, fraction)  # else the planned prompts are too few to judge it as well
    )


def _levels(policy: GateConfig, fractions: Sequence[float]) -> tuple[float, float]:
    """What the intervals of the lift, and of what sittings repeat, leave on either side at the last look."""
    lift, speed = (sequential.levels(policy.error_rate, tuple(fractions), name)[-1] for name in ("lift", "speed"))
    return lift, speed


def _figures(
    policy: GateConfig,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    *,
    fractions: Sequence[float],
) -> _Figures:
    level, speed_level = _levels(policy, fractions)
    usable, general_rows = _usable(rows, "gate"), _usable(rows, "general")
    served = {row["row_id"] for row in rows if row["prompt_set"] == "general"}
    draws = {"resamples": policy.resamples, "seed": policy.seed}
    sums = cluster_sums(usable, "challenger", "champion")
    comparisons = {"challenger/champion": resample(sums, **draws).interval(level)}
    if "control" in measured:
        others = (("control", "champion"), ("challenger", "control"))
        comparisons |= {f"{a}/{b}": compare(usable, a, b, level=level, **draws) for a, b in others}
    by_slice, shares = _slices(policy, usable, draws)
    general = compare(general_rows, "challenger", "champion", level=policy.error_rate, **draws)
    return _Figures(
        usable=usable,
        levels=(level, speed_level),
        comparisons=comparisons,
        evidence=evidence(
            sums,
            num_prompts=len({row["row_id"] for row in usable}),
            gain=policy.worthwhile_lift,
            level=level,
            power=policy.power,
        ),
        slices=by_slice,
        shares=shares,
        general=general if served else None,
        num_general=(len({row["row_id"] for row in general_rows}), len(served)),
        speed=pace.tokens_per_s(measured, level=speed_level),
        tail=pace.between_tokens(measured, level=speed_level),
        positions=positions.judge(policy, usable),
    )


def _reasons(
    policy: GateConfig,
    found: _Figures,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    speed: SpeedReport | None,
) -> list[Reason]:
    level, speed_level = found.levels
    return [
        *measurement(policy, rows, measured, num_clusters=found.evidence.num_clusters),
        criteria.lift(policy, found.comparisons["challenger/champion"], found.evidence, level=level),
        *criteria.slices(policy, found.slices, found.shares, level=policy.error_rate),
        criteria.general(policy, found.general, found.num_general),
        pace.speed(policy, measured, found.speed, level=speed_level),
        pace.tail(policy, found.tail, level=speed_level),
        *pace.speculation(measured, speed),
        positions.block(policy, found.positions),
        *criteria.walks(policy, measured),
        losslessness.replies(measured),
        losslessness.speculation(policy, measured, speed),
        *criteria.control(found.comparisons),
    ]


def _slices(
    policy: GateConfig, rows: Sequence[Mapping[str, Any]], draws: Mapping[str, int]
) -> tuple[dict[str, Resamples], dict[str, float]]:
    """The lift of every slice, and its share of the traffic; no interval where it is too small to be judged."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in slices.names(row["slices"]):
            groups.setdefault(name, []).append(row)
    everything = math.fsum(row["weight"] for row in rows)
    lifts, shares = {}, {}
    for name in sorted(groups):
        sums = cluster_sums(groups[name], "challenger", "champion")
        judged = sums.shape[1] >= policy.min_slice_clusters
        lifts[name] = resample(sums, **draws) if judged else _alone(sums)
        shares[name] = math.fsum(row["weight"] for row in groups[name]) / everything if everything else 0.0
    return lifts, shares


def _alone(sums: np.ndarray) -> Resamples:  # [4, clusters]
    """The ratio without resamples: there may be hundreds of slices of a conversation or two."""
    a, b, c, d = sums.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float((a / b) / (c / d))
    return Resamples(ratio, np.empty(0), sums.shape[1], effective(sums[3]))
