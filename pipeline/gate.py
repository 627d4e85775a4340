"""AcceptanceReport → GateDecision: is the challenger better, how sure is that, and what speaks against it.

The verdict itself is a pure function of the rows and the policy (pipeline/decide.py); here it is written down with
its policy and its page.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.artifacts import (
    AcceptanceReport,
    DrafterCheckpoint,
    GateDecision,
    SpeedReport,
    artifact_dir,
    describe_file,
    find,
    package_versions,
    verify,
    write_durably,
)
from pipeline.config import Config
from pipeline.decide import decide, settled
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import read_tables
from pipeline.sittings import ROLES
from pipeline.stages import Artifact, complete
from pipeline.verdict import Verdict, as_json, policy_id, policy_toml

__all__ = ["Verdict", "as_json", "decide", "run", "settled"]

STAGE_VERSION = 3
_SPEED_FIGURES = {"points", "recommended", "lossless", "settings"}
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

    Raises: FingerprintError when the report's measurements were made with different settings; SchemaError when its
    files are not those that its manifest describes.
    """
    from pipeline.report import render

    measured_speed = speed.manifest if speed else None
    parents = {"report": report.id} | ({"speed": speed.id} if speed else {})

    def build(folder: Path, derivation: str) -> GateDecision:
        verify(report.folder, report.manifest)
        rows = read_tables(report.folder, report.manifest.shards, ACCEPTANCE).to_pylist()
        fractions = [look["fraction"] for look in report.manifest.looks] or [1.0]
        verdict = decide(
            config.gate,
            rows,
            report.manifest.measured,
            speed=measured_speed,
            fractions=fractions,
            drift=report.manifest.drift,
        )
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

    figures = measured_speed.model_dump(mode="json", include=_SPEED_FIGURES) if measured_speed else None
    contents = {"content": report.manifest.content_id, "speed": figures, "names": dict(names or {})}
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
