"""AcceptanceReport → GateDecision: is the challenger better, how sure is that, and what speaks against it.

Five verdicts. ``promote``: everything that was asked for holds. ``cannot_say``: the measurement carries no
verdict. ``reject``: it shows that the challenger is not good enough. ``dont_speculate``: the target alone is
faster where the fleet serves. ``hold``: not shown either way, or a check found something for a person to look at.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import criteria, losslessness, pace, positions, sequential, slices
from pipeline.acceptance import unflagged_everywhere
from pipeline.artifacts import (
    AcceptanceReport,
    DrafterCheckpoint,
    GateDecision,
    SpeedReport,
    artifact_dir,
    describe_file,
    find,
    package_versions,
    write_durably,
)
from pipeline.bootstrap import Resamples, cluster_sums, compare, resample
from pipeline.config import Config, GateConfig
from pipeline.evidence import measurement
from pipeline.fingerprint import require_same_settings
from pipeline.power import evidence
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import read_tables
from pipeline.sittings import ROLES
from pipeline.stages import Artifact, complete
from pipeline.verdict import Verdict, as_json, movers, policy_id, policy_toml

STAGE_VERSION = 2
SEVERITY = ("cannot_say", "reject", "dont_speculate", "hold")
_FILES = ("decision.json", "policy.toml", "report.html")


def run(
    config: Config,
    report: Artifact[AcceptanceReport],
    *,
    speed: Artifact[SpeedReport] | None = None,
    names: Mapping[str, str] | None = None,
) -> Artifact[GateDecision]:
    """The verdict on a report; decision.json, policy.toml and report.html lie beside its manifest.

    ``names``: role → what the page calls it.

    Raises: FingerprintError when the report's measurements were made with different settings.
    """
    from pipeline.report import render

    measured_speed = speed.manifest if speed else None
    parents = {"report": report.id} | ({"speed": speed.id} if speed else {})

    def build(folder: Path, derivation: str) -> GateDecision:
        rows = read_tables(report.folder, report.manifest.shards, ACCEPTANCE).to_pylist()
        fractions = [look["fraction"] for look in report.manifest.looks] or [1.0]
        verdict = decide(config.gate, rows, report.manifest.measured, speed=measured_speed, fractions=fractions)
        policy, body = policy_id(config.gate), as_json(verdict)
        page = render(
            verdict,
            report.manifest,
            curves=_curves(config.root, report.manifest),
            title=config.model_name,
            speed=measured_speed,
            names=names,
            policy_id=policy,
        )
        decision = json.dumps(body | {"policy_id": policy}, indent=1, allow_nan=False) + "\n"
        for name, text in zip(_FILES, (decision, policy_toml(config.gate), page), strict=True):
            write_durably(folder / name, text.encode())
        return GateDecision(
            derivation_id=derivation,
            parents=parents,
            shards=tuple(describe_file(folder / name) for name in _FILES),
            config=config.gate.model_dump(mode="json"),
            versions=package_versions(),
            decision=verdict.decision,
            reasons=body["reasons"],
            **{name: body[name] for name in ("lift", "ci_low", "ci_high")},
        )

    contents = {"content": report.manifest.content_id, "names": dict(names or {})}
    return complete(
        config.root,
        GateDecision,
        stage="gate",
        version=STAGE_VERSION,
        parents=parents,
        # The report's own hash too: measuring again gives the same derivation and other counts.
        meaning={**config.gate.model_dump(mode="json"), **contents},
        build=build,
    )


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
    level = sequential.levels(policy.error_rate, tuple(fractions), "lift")[-1]
    pace_level = sequential.levels(policy.error_rate, tuple(fractions), "speed")[-1]
    draws = {"resamples": policy.resamples, "seed": policy.seed}
    gate_rows = [row for row in rows if row["prompt_set"] == "gate"]
    usable = unflagged_everywhere(gate_rows)
    general_rows = unflagged_everywhere([row for row in rows if row["prompt_set"] == "general"])

    sums = cluster_sums(usable, "challenger", "champion")
    lift = resample(sums, **draws).interval(level)
    comparisons = {"challenger/champion": lift}
    if "control" in measured:
        others = (("control", "champion"), ("challenger", "control"))
        comparisons |= {f"{a}/{b}": compare(usable, a, b, level=level, **draws) for a, b in others}
    num_prompts = len({row["row_id"] for row in usable})
    enough = evidence(sums, num_prompts=num_prompts, gain=policy.worthwhile_lift, level=level, power=policy.power)
    by_slice, shares = _slices(usable, draws)
    general = (
        compare(general_rows, "challenger", "champion", level=policy.error_rate, **draws) if general_rows else None
    )
    tokens_per_s = pace.tokens_per_s(measured, level=pace_level)
    tail = pace.between_tokens(measured, level=pace_level)
    block = positions.judge(policy, usable)
    gained, lost = movers(usable)
    reasons = [
        *measurement(policy, gate_rows, measured, num_clusters=sums.shape[1]),
        criteria.lift(policy, lift, enough, level=level),
        *criteria.slices(policy, by_slice, shares, level=policy.error_rate),
        criteria.general(policy, general),
        pace.speed(policy, measured, tokens_per_s, level=pace_level),
        pace.tail(policy, tail, level=pace_level),
        *pace.speculation(measured, speed),
        positions.block(policy, block),
        *criteria.walks(policy, measured),
        losslessness.replies(measured),
        losslessness.speculation(policy, measured, speed),
        *criteria.control(comparisons),
    ]
    failed = {reason.verdict for reason in reasons if reason.passed is False}
    return Verdict(
        decision=next((verdict for verdict in SEVERITY if verdict in failed), "promote"),
        reasons=reasons,
        comparisons=comparisons,
        slices={name: one.interval(policy.error_rate) for name, one in by_slice.items()},
        general=general,
        speed=tokens_per_s,
        tail=tail,
        positions=block,
        evidence=enough,
        level=level,
        speed_level=pace_level,
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

    A promotion has to hold in everything, and no slice may lie under its floor even unproved: a look at the first
    few conversations could not show it. A rejection is a clear loss: the lift's upper end is under min_lift.
    """
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


def _curves(root: Path, report: AcceptanceReport) -> dict[str, list[dict[str, float]]]:
    """Role → training curve, for the candidates that were trained under this root."""
    curves = {}
    for role, derivation in report.parents.items():
        if role not in ROLES:
            continue
        found = find(artifact_dir(root, DrafterCheckpoint, derivation), DrafterCheckpoint)
        if found is not None and found.curve:
            curves[role] = found.curve
    return curves
