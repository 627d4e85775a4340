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

from pipeline.acceptance import accepted_drafts_per_step, unflagged_everywhere
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
from pipeline.evaluate import require_same_settings
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import read_tables
from pipeline.sittings import ROLES
from pipeline.stages import Artifact, complete

STAGE_VERSION = 1
SEVERITY = ("cannot_say", "reject", "hold")

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
        *_measurement(config, rows, measured, lift),
        _lift(config, lift),
        *_slices(config, slices),
        _speed(config, measured),
        *_walks(config, measured),
        *_replies(measured),
        *_control(comparisons),
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


def _measurement(
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


def _lift(config: GateConfig, lift: Interval) -> Reason:
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


def _slices(config: GateConfig, slices: Mapping[str, Interval]) -> list[Reason]:
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


def _speed(config: GateConfig, measured: Mapping[str, Any]) -> Reason:
    before, after = measured["champion"]["tokens_per_s"], measured["challenger"]["tokens_per_s"]
    ratio = after / before if before else math.nan
    message = (
        f"{after:.1f} tokens/s against {before:.1f} at the evaluated concurrency ({ratio:.2f} ×), "
        f"at least {config.min_speed_ratio:g} × asked for"
    )
    verdict = "reject" if math.isfinite(ratio) else "cannot_say"
    return Reason("speed", message, ratio, config.min_speed_ratio, ratio >= config.min_speed_ratio, verdict)


def _walks(config: GateConfig, measured: Mapping[str, Any]) -> list[Reason]:
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


def _replies(measured: Mapping[str, Any]) -> list[Reason]:
    """Speculation must not change answers; provable where batch shapes don't move near-ties."""
    different = sum(one.get("num_replies_different", 0) for one in measured.values())
    settings = measured["champion"].get("settings", {})
    exact = settings.get("dtype") == "float32" and settings.get("concurrency") == 1
    message = f"{different} replies differ from the champion's"
    message += "; in float32 at one request none may" if exact else " (near-ties move with batch shapes: a sign only)"
    return [Reason("lossless", message, different, 0, different == 0 if exact else None, "reject")]


def _control(comparisons: Mapping[str, Interval]) -> list[Reason]:
    """Is it the traffic, or just more training? Shown; a gain is a gain."""
    if (over := comparisons.get("challenger/control")) is None:
        return []
    proof = "above" if over.low > 1 else "not shown to be above"
    message = f"{over.ratio:.3f} × the control ({over.low:.3f} to {over.high:.3f}): {proof} more training alone"
    return [Reason("control", message, over.low, 1.0, None)]


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
