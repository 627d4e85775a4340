"""AcceptanceReport → GateDecision: is the challenger better, how sure is that, and what speaks against it.

Four verdicts. ``promote``: everything that was asked for holds. ``reject``: the measurement shows that the
challenger is not good enough. ``hold``: not shown either way, or a check found something for a person to
look at. ``cannot_say``: the measurement itself carries no verdict.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline import criteria
from pipeline.acceptance import unflagged_everywhere
from pipeline.artifacts import (
    AcceptanceReport,
    DrafterCheckpoint,
    GateDecision,
    artifact_dir,
    describe_file,
    find,
    package_versions,
    write_durably,
)
from pipeline.bootstrap import Interval, compare
from pipeline.config import Config, GateConfig
from pipeline.criteria import Reason
from pipeline.fingerprint import require_same_settings
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import read_tables
from pipeline.sittings import ROLES
from pipeline.stages import Artifact, complete

STAGE_VERSION = 1
SEVERITY = ("cannot_say", "reject", "hold")


@dataclass(frozen=True)
class Verdict:
    """The decision, everything it rests on, and the intervals of all comparisons."""

    decision: str
    reasons: list[Reason]
    comparisons: dict[str, Interval]
    """"challenger/champion" and, with a control, "control/champion" and "challenger/control"."""
    slices: dict[str, Interval] = field(default_factory=dict)

    @property
    def lift(self) -> Interval:
        """Challenger over champion."""
        return self.comparisons["challenger/champion"]


def run(config: Config, report: Artifact[AcceptanceReport]) -> Artifact[GateDecision]:
    """The verdict on a report; decision.json and report.html lie beside its manifest.

    Raises: FingerprintError when the report's measurements were made with different settings.
    """
    from pipeline.report import render

    def build(folder: Path, derivation: str) -> GateDecision:
        rows = read_tables(report.folder, report.manifest.shards, ACCEPTANCE).to_pylist()
        verdict = decide(config.gate, rows, report.manifest.measured)
        curves = _curves(config.root, report.manifest)
        page = render(verdict, report.manifest, curves=curves, title=config.model_name)
        decision = json.dumps(as_json(verdict), indent=1, allow_nan=False) + "\n"
        write_durably(folder / "decision.json", decision.encode())
        write_durably(folder / "report.html", page.encode())
        return GateDecision(
            derivation_id=derivation,
            parents={"report": report.id},
            shards=tuple(describe_file(folder / name) for name in ("decision.json", "report.html")),
            config=config.gate.model_dump(mode="json"),
            versions=package_versions(),
            decision=verdict.decision,
            reasons=as_json(verdict)["reasons"],
            lift=_or_none(verdict.lift.ratio),
            ci_low=_or_none(verdict.lift.low),
            ci_high=_or_none(verdict.lift.high),
        )

    return complete(
        config.root,
        GateDecision,
        stage="gate",
        version=STAGE_VERSION,
        parents={"report": report.id},
        # The report's own hash too: measuring again gives the same derivation and other counts.
        meaning={**config.gate.model_dump(mode="json"), "content": report.manifest.content_id},
        build=build,
    )


def decide(config: GateConfig, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> Verdict:
    """The verdict on rows of schemas.ACCEPTANCE and what was measured of each role.

    Raises: FingerprintError when two roles were measured with different settings.
    """
    for role, one in measured.items():
        require_same_settings(
            measured["champion"].get("settings", {}), one.get("settings", {}), where=f"gate, champion and {role}"
        )
    usable = unflagged_everywhere(rows)
    settings = {"confidence": config.confidence, "resamples": config.resamples, "seed": config.seed}
    pairs = [("challenger", "champion")]
    if "control" in measured:
        pairs += [("control", "champion"), ("challenger", "control")]
    comparisons = {f"{a}/{b}": compare(usable, a, b, **settings) for a, b in pairs}
    slices = {
        name: compare([r for r in usable if r["slice"] == name], "challenger", "champion", **settings)
        for name in sorted({row["slice"] for row in usable})
    }
    lift = comparisons["challenger/champion"]
    reasons = [
        *criteria.measurement(config, rows, measured, lift),
        criteria.lift(config, lift),
        *criteria.slices(config, slices),
        criteria.speed(config, measured),
        *criteria.walks(config, measured),
        *criteria.replies(measured),
        *criteria.control(comparisons),
    ]
    failed = {reason.verdict for reason in reasons if reason.passed is False}
    decision = next((verdict for verdict in SEVERITY if verdict in failed), "promote")
    return Verdict(decision, reasons, comparisons, slices)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The body of decision.json: plain JSON, null where something could not be measured."""
    return {
        "decision": verdict.decision,
        "lift": _or_none(verdict.lift.ratio),
        "ci_low": _or_none(verdict.lift.low),
        "ci_high": _or_none(verdict.lift.high),
        "reasons": [{**asdict(reason), "value": _or_none(reason.value)} for reason in verdict.reasons],
        "comparisons": {name: _interval(one) for name, one in verdict.comparisons.items()},
        "slices": {name: _interval(one) for name, one in verdict.slices.items()},
    }


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


def _interval(one: Interval) -> dict[str, float | int | None]:
    return {name: _or_none(value) for name, value in asdict(one).items()}


def _or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
