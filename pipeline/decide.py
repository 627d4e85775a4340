"""Rows and measurements → Verdict: every criterion weighed, at the end or at a look on the way.

Five verdicts. ``promote``: everything that was asked for holds. ``cannot_say``: the measurement carries no
verdict. ``reject``: it shows that the challenger is not good enough. ``dont_speculate``: the target alone is
faster where the fleet serves. ``hold``: not shown either way, or a check found something for a person to look at.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import criteria, losslessness, pace, positions, sequential, slices
from pipeline.acceptance import unflagged_everywhere
from pipeline.artifacts import SpeedReport
from pipeline.bootstrap import Interval, Resamples, cluster_sums, compare, resample
from pipeline.config import GateConfig
from pipeline.criteria import Reason
from pipeline.evidence import measurement, sound
from pipeline.fingerprint import require_same_settings
from pipeline.positions import Position
from pipeline.power import Evidence, evidence
from pipeline.verdict import Verdict, movers

# What speed and acceptance must have been measured with alike; load and speculation differ by design.
_ENGINE = ("vllm", "dtype", "max_model_len")
SEVERITY = ("cannot_say", "reject", "dont_speculate", "hold")


@dataclass(frozen=True)
class _Figures:
    """Everything that is computed of a measurement before anything is judged."""

    levels: tuple[float, float]  # of the lift's intervals and of the sittings'
    comparisons: dict[str, Interval]
    evidence: Evidence
    slices: dict[str, Resamples]
    shares: dict[str, float]
    general: Interval | None
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
) -> Verdict:
    """The verdict on rows of schemas.ACCEPTANCE and what was measured of each role.

    ``fractions``: shares of the planned prompts at every look so far, the present one last.

    Raises: FingerprintError when two roles were measured with different settings.
    """
    for role, one in measured.items():
        require_same_settings(
            measured["champion"].get("settings", {}), one.get("settings", {}), where=f"gate, champion and {role}"
        )
    if speed:
        _require_same_engine(measured["champion"].get("settings", {}), speed.settings)
    gate_rows = [row for row in rows if row["prompt_set"] == "gate"]
    usable = unflagged_everywhere(sound(gate_rows))
    general_rows = unflagged_everywhere(sound([row for row in rows if row["prompt_set"] == "general"]))
    found = _figures(policy, usable, general_rows, measured, fractions=fractions)
    reasons = _reasons(policy, found, gate_rows, measured, speed)
    failed = {reason.verdict for reason in reasons if reason.passed is False}
    gained, lost = movers(usable)
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


def _require_same_engine(evaluated: Mapping[str, Any], timed: Mapping[str, Any]) -> None:
    """Raises: FingerprintError where speed was measured on another engine than acceptance."""
    both = [name for name in _ENGINE if name in evaluated and name in timed]
    ours, theirs = ({name: one[name] for name in both} for one in (evaluated, timed))
    require_same_settings(ours, theirs, where="gate, acceptance and speed")


def settled(
    policy: GateConfig,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    *,
    fractions: Sequence[float],
) -> str | None:
    """``promote`` or ``reject`` where the evidence so far ends the evaluation, else None.

    A promotion has to hold in everything, and no slice may lie under its floor even unproved: the first few
    conversations could not prove it. A rejection is a clear loss: the lift's upper end is under min_lift.
    """
    usable = unflagged_everywhere(sound([row for row in rows if row["prompt_set"] == "gate"]))
    draws = {"resamples": policy.resamples, "seed": policy.seed}
    lift = compare(usable, "challenger", "champion", level=_levels(policy, fractions)[0], **draws)
    if not (lift.low > policy.min_lift or lift.high < policy.min_lift):
        return None
    verdict = decide(policy, rows, measured, fractions=fractions)
    failed = {reason.code: reason.verdict for reason in verdict.reasons if reason.passed is False}
    in_doubt = [
        name
        for name, one in verdict.slices.items()
        if one.num_clusters >= policy.min_slice_clusters and one.ratio < policy.min_slice_lift
    ]
    if verdict.decision == "promote" and not in_doubt:
        return "promote"
    return "reject" if verdict.decision == "reject" and failed.get("lift") == "reject" else None


def _levels(policy: GateConfig, fractions: Sequence[float]) -> tuple[float, float]:
    """What the intervals of the lift, and of what sittings repeat, leave on either side at the last look."""
    lift, speed = (sequential.levels(policy.error_rate, tuple(fractions), name)[-1] for name in ("lift", "speed"))
    return lift, speed


def _figures(
    policy: GateConfig,
    usable: Sequence[Mapping[str, Any]],
    general_rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    *,
    fractions: Sequence[float],
) -> _Figures:
    level, speed_level = _levels(policy, fractions)
    draws = {"resamples": policy.resamples, "seed": policy.seed}
    sums = cluster_sums(usable, "challenger", "champion")
    comparisons = {"challenger/champion": resample(sums, **draws).interval(level)}
    if "control" in measured:
        others = (("control", "champion"), ("challenger", "control"))
        comparisons |= {f"{a}/{b}": compare(usable, a, b, level=level, **draws) for a, b in others}
    by_slice, shares = _slices(usable, draws)
    general = compare(general_rows, "challenger", "champion", level=policy.error_rate, **draws)
    return _Figures(
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
        general=general if general_rows else None,
        speed=pace.tokens_per_s(measured, level=speed_level),
        tail=pace.between_tokens(measured, level=speed_level),
        positions=positions.judge(policy, usable),
    )


def _reasons(
    policy: GateConfig,
    found: _Figures,
    gate_rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
    speed: SpeedReport | None,
) -> list[Reason]:
    level, speed_level = found.levels
    return [
        *measurement(policy, gate_rows, measured, num_clusters=found.evidence.num_clusters),
        criteria.lift(policy, found.comparisons["challenger/champion"], found.evidence, level=level),
        *criteria.slices(policy, found.slices, found.shares, level=policy.error_rate),
        criteria.general(policy, found.general),
        pace.speed(policy, measured, found.speed, level=speed_level),
        pace.tail(policy, found.tail, level=speed_level),
        *pace.speculation(measured, speed),
        positions.block(policy, found.positions),
        *criteria.walks(policy, measured),
        losslessness.replies(measured),
        losslessness.speculation(policy, speed),
        *criteria.control(found.comparisons),
    ]


def _slices(
    rows: Sequence[Mapping[str, Any]], draws: Mapping[str, int]
) -> tuple[dict[str, Resamples], dict[str, float]]:
    """The lift of every slice, and its share of the traffic."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in slices.names(row["slices"]):
            groups.setdefault(name, []).append(row)
    everything = math.fsum(row["weight"] for row in rows)
    names = sorted(groups)
    lifts = {name: resample(cluster_sums(groups[name], "challenger", "champion"), **draws) for name in names}
    return lifts, {name: math.fsum(row["weight"] for row in groups[name]) / everything for name in names}
