"""The page's first screen: how much faster, how sure, what can go wrong."""

from typing import Any

from pipeline import charts
from pipeline.artifacts import AcceptanceReport
from pipeline.charts import known
from pipeline.criteria import Reason
from pipeline.figures import NONE, figure, rate, times
from pipeline.verdict import Verdict

_RISKS = {
    "tail": "99th percentile between tokens",
    "general": "general prompts",
    "speculation": "against the target alone",
    "lossless": "replies that speculation changed",
    "flagged": "requests left out",
}
_DRIFT = {"tokens_per_s": "tokens a second", "emitted_tokens_per_step": "tokens a step"}


def tiles(verdict: Verdict, report: AcceptanceReport) -> list[dict[str, Any]]:
    """How much faster, before and after: at the clients, and at each step of the target."""
    before, after = report.measured["champion"], report.measured["challenger"]
    concurrency = report.settings.get("concurrency", "?")
    speed, lift = verdict.speed, verdict.lift
    return [
        {
            "name": "How much faster?",
            "before": rate(before["tokens_per_s"]),
            "after": rate(after["tokens_per_s"]),
            "unit": f"tokens a second, {concurrency} requests at a time",
            "sure": times(speed) if speed else _ratio(after["tokens_per_s"], before["tokens_per_s"]),
        },
        {
            "name": "How much more a step?",
            "before": figure(before["emitted_tokens_per_step"]),
            "after": figure(after["emitted_tokens_per_step"]),
            "unit": "tokens that clients get from each step of the target",
            "sure": f"{figure(lift.ratio)} ×",
        },
    ]


def _ratio(after: float | None, before: float | None) -> str:
    return f"{after / before:.2f} ×" if known(after) and known(before) and before else NONE


def risks(verdict: Verdict, report: AcceptanceReport) -> list[dict[str, Any]]:
    """What can go wrong, each with its figure and whether the policy let it pass (None: not asked for)."""
    reasons = {reason.code: reason for reason in verdict.reasons}
    found = [_risk(f"weakest slice, {worst.code.partition(':')[2]}", worst)] if (worst := _worst_slice(verdict)) else []
    for code, name in _RISKS.items():
        if (reason := reasons.get(code)) is not None and known(reason.value):
            found.append(_risk(name, reason))
    if drift := {name: value for name, value in (report.drift or {}).items() if known(value)}:
        name, value = max(drift.items(), key=lambda item: abs(item[1] - 1))
        said = f"{figure(value)} ×"
        found.append({"name": f"the machine's drift, {_DRIFT.get(name, name)}", "said": said, "passed": None})
    return found


def _risk(name: str, reason: Reason) -> dict[str, Any]:
    said = f"{reason.value:.2f} ×"
    if reason.code == "flagged":
        said = f"{reason.value:.1%}"
    elif reason.code == "lossless":
        said = f"{reason.value:.0f} of {reason.n}"
    elif known(reason.low) and known(reason.high):
        said += f" ({reason.low:.2f} to {reason.high:.2f})"
    return {"name": name, "said": said, "passed": reason.passed}


def _worst_slice(verdict: Verdict) -> Reason | None:
    """The slice with the lowest lift among those that the policy asks something of; else among all."""
    rows = [reason for reason in verdict.reasons if reason.code.startswith("slice:") and known(reason.value)]
    asked = [reason for reason in rows if reason.passed is not None]
    return min(asked or rows, key=lambda reason: (reason.passed is not False, reason.value), default=None)


def sure(verdict: Verdict, report: AcceptanceReport) -> dict[str, Any]:
    """The lift's interval, drawn and as figures, and what it rests on."""
    lift, level, evidence = verdict.lift, verdict.level, verdict.evidence
    asked = next((reason.limit for reason in verdict.reasons if reason.code == "lift"), None)
    certain = f"{100 * (1 - 2 * level):.3g}% interval" if known(level) else "interval"
    rests_on = f"{lift.num_clusters:,} conversations"
    if evidence is not None and evidence.needed_clusters is not None:
        rests_on += f"; a gain worth having needs about {evidence.needed_clusters:,}"
    lines = [f"{certain} of the gain in tokens a step", rests_on]
    if verdict.looks and verdict.looks[-1] < 1:
        num_looks = f" after {len(verdict.looks)} looks" if len(verdict.looks) > 1 else ""
        lines.append(f"settled early{num_looks}: {verdict.looks[-1]:.0%} of the planned prompts")
    return {
        "figure": f"{lift.low:.2f} to {lift.high:.2f} ×" if lift.is_known else NONE,
        "drawn": charts.intervals({"lift": lift}, floor=asked if asked != 1 else None),
        "lines": lines,
    }
