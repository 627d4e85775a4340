"""The verdict as one page for people: self-contained HTML, no script, nothing fetched, light and dark.

The first screen answers what a busy reader asks: promote or not, how much faster, how sure, what can go wrong. What
each part shows is worked out in answers.py and findings.py, where things lie in a drawing in charts.py; the template
(report.html.j2, with report.css.j2 and report_parts.html.j2) only places and names things.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import answers, charts, figures, findings, findings_speed
from pipeline.artifacts import AcceptanceReport, SpeedReport
from pipeline.verdict import Verdict

TEMPLATE = "report.html.j2"
TITLES = {
    "promote": "Promote",
    "hold": "Hold",
    "reject": "Reject",
    "cannot_say": "Cannot say",
    "dont_speculate": "Don't speculate",
}
_MAX_FAILED = 6  # reasons in sight; a page of them is no answer
_MEANING = {
    "promote": "Better, and nothing that was asked for got worse.",
    "hold": "Not shown either way, or there is something for a person to look at.",
    "reject": "Shown not to be good enough.",
    "cannot_say": "This measurement carries no verdict.",
    "dont_speculate": "Where the fleet serves, the target alone is faster.",
}


def render(
    verdict: Verdict,
    report: AcceptanceReport,
    *,
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    title: str,
    speed: SpeedReport | None = None,
    names: Mapping[str, str] | None = None,
    policy_id: str | None = None,
) -> str:
    """The page, as HTML. ``names``: role → what the page calls it; ``curves``: role → training curve."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    label = {**{role: role for role in [*report.measured, *curves]}, **(names or {})}
    label = {role: findings_speed.ALONE if name == "none" else name for role, name in label.items()}
    environment.filters |= {
        "figure": figures.figure,
        "times": figures.times,
        "percent": figures.percent,
        "rate": figures.rate,
        "ms": figures.ms,
    }
    environment.globals |= {"label": label, "max_failed": _MAX_FAILED}
    return environment.get_template(TEMPLATE).render(
        title=title,
        verdict=verdict,
        verdict_title=_title(verdict),
        meaning=_MEANING[verdict.decision],
        summary=_summary(verdict, label),
        policy_id=policy_id,
        report=report,
        measured=report.measured,
        target=report.fingerprint.model_dump(mode="json") if report.fingerprint else report.settings.get("target"),
        settings={name: value for name, value in report.settings.items() if name != "target"},
        **_reasons(verdict),
        **_parts(verdict, report, curves=curves, speed=speed, label=label),
    )


def _parts(
    verdict: Verdict,
    report: AcceptanceReport,
    *,
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    speed: SpeedReport | None,
    label: Mapping[str, str],
) -> dict[str, Any]:
    """What every part of the page draws from."""
    measured = report.measured
    return {
        "tiles": answers.tiles(verdict, report),
        "sure": answers.sure(verdict, report),
        "risks": answers.risks(verdict, report),
        "comparisons": findings.comparisons(verdict, label),
        "slices": findings.slices(verdict, report),
        "acceptance": charts.bars({role: one["served_acceptance_length"] for role, one in measured.items()}),
        "tokens_per_s": charts.bars({role: one["tokens_per_s"] for role, one in measured.items()}),
        "latency": findings.latencies(measured),
        "positions": findings.positions(verdict, measured),
        "flags": findings.flags(measured),
        "speed": findings_speed.speed(speed, report.settings.get("concurrency")) if speed and speed.points else None,
        "general": findings.general(measured),
        "walks": [findings.walk_row(role, one) for role, one in measured.items() if one.get("walk")],
        "prompts": findings.prompts(verdict),
        "curves": [(name, chart) for name, chart in findings.curves(curves).items() if chart],
        "drift": report.drift or {},
        "lineage": findings.lineage(report, speed),
    }


def _reasons(verdict: Verdict) -> dict[str, Any]:
    """The reasons by what came out; what failed in the order of its weight."""
    weight = {verdict.decision: 0}
    failed = [reason for reason in verdict.reasons if reason.passed is False]
    return {
        "failed": sorted(failed, key=lambda reason: weight.get(reason.verdict, 1)),
        "passed": [reason for reason in verdict.reasons if reason.passed is True],
        "shown": [reason for reason in verdict.reasons if reason.passed is None],
    }


def _title(verdict: Verdict) -> str:
    title, up_to = TITLES[verdict.decision], verdict.speculate_up_to
    if verdict.decision == "dont_speculate" and up_to:
        title += f" above {up_to} request{'s' if up_to > 1 else ''} at a time"
    return title


def _summary(verdict: Verdict, label: Mapping[str, str]) -> str:
    """What was found, in one sentence."""
    lift, speed = verdict.lift, verdict.speed
    if not lift.is_known:
        return "The lift could not be measured; the reasons say why."
    than = f"the {name}" if (name := label["champion"]) in ("champion", findings_speed.ALONE) else name
    if lift.low <= 1 <= lift.high:
        said = f"No difference to {than} is shown in tokens a step: {figures.times(lift)}"
    else:
        word = "more" if lift.ratio > 1 else "fewer"
        said = f"Clients get {abs(lift.ratio - 1):.0%} {word} tokens from each step of the target than with {than}"
    if speed is not None and speed.is_known:
        shown = "" if speed.low > 1 or speed.high < 1 else " (not shown to differ)"
        said += f", {abs(speed.ratio - 1):.0%} {'more' if speed.ratio >= 1 else 'fewer'} a second{shown}"
    if verdict.decision == "cannot_say":
        said = f"As measured, {said[0].lower()}{said[1:]}"
    return f"{said}."
