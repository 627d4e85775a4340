"""The verdict as one page for people: self-contained HTML, no script, nothing fetched, light and dark.

Geometry is worked out here, in the units the template draws with: per cent for bars and intervals, a fixed
grid for line charts. The template (report.html.j2) only places and names things.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.acceptance import accepted_drafts_per_step
from pipeline.artifacts import AcceptanceReport
from pipeline.bootstrap import Interval
from pipeline.criteria import walk_gap
from pipeline.gate import Verdict

TEMPLATE = "report.html.j2"
TITLES = {"promote": "Promote", "hold": "Hold", "reject": "Reject", "cannot_say": "Cannot say"}

# Line charts: the drawing inside its margins, in units of about a CSS pixel.
_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 10, 10, 30


def render(
    verdict: Verdict, report: AcceptanceReport, *, curves: Mapping[str, Sequence[Mapping[str, float]]], title: str
) -> str:
    """The page, as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    measured = report.measured
    return environment.get_template(TEMPLATE).render(
        title=title,
        verdict=verdict,
        verdict_title=TITLES[verdict.decision],
        summary=_summary(verdict),
        failed=[reason for reason in verdict.reasons if reason.passed is False],
        passed=[reason for reason in verdict.reasons if reason.passed is True],
        shown=[reason for reason in verdict.reasons if reason.passed is None],
        tiles=_tiles(measured),
        comparisons=intervals(verdict.comparisons),
        slices=_slices(verdict.slices, measured),
        acceptance=bars({role: one["served_acceptance_length"] for role, one in measured.items()}),
        speed=bars({role: one["tokens_per_s"] for role, one in measured.items()}),
        positions=line_chart({role: _per_position(one) for role, one in measured.items()}, from_zero=True),
        curves=[(name, chart) for name, chart in _curve_charts(curves).items() if chart],
        walks=[_walk_row(role, one) for role, one in measured.items() if one.get("walk")],
        measured=measured,
        report=report,
    )


def figure(value: float | None, digits: int = 2) -> str:
    """A number as the page shows it; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def bars(values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """One bar a role: its length in per cent of the longest, from zero."""
    longest = max((value for value in values.values() if _known(value)), default=1) or 1
    return [
        {"role": role, "value": value, "percent": 100 * value / longest if _known(value) else 0}
        for role, value in values.items()
    ]


def intervals(rows: Mapping[str, Interval]) -> dict[str, Any]:
    """Ratios and their intervals on one axis in per cent, with the place of 1.0 and the ticks."""
    known = [v for one in rows.values() for v in (one.ratio, one.low, one.high) if _known(v)]
    low, high = min([*known, 1.0]), max([*known, 1.0])
    margin = 0.06 * (high - low) or 0.1
    low, high = low - margin, high + margin

    def place(value: float) -> float | None:
        return round(100 * (value - low) / (high - low), 2) if _known(value) else None

    return {
        "one": place(1.0),
        "ticks": [(place(tick), f"{tick:g}") for tick in ticks(low, high, 4)],
        "rows": [
            {"name": name, "at": place(i.ratio), "from": place(i.low), "to": place(i.high), "interval": i}
            for name, i in rows.items()
        ],
    }


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]], *, from_zero: bool = False
) -> dict[str, Any] | None:
    """Lines on one pair of axes, in the template's grid; None without a point."""
    series = {name: [p for p in points if _known(p[1])] for name, points in series.items()}
    points = [point for one in series.values() for point in one]
    if not points:
        return None
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = (0.0 if from_zero else min(y for _, y in points)), max(y for _, y in points)
    if x_high == x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    margin = 0.05 * (y_high - y_low) or 0.1
    y_low, y_high = (0.0 if from_zero else y_low - margin), y_high + margin

    def x_at(x: float) -> float:
        return round(_LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y_at(y: float) -> float:
        return round(_HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": _HEIGHT - _BOTTOM,
        "x_ticks": [(x_at(t), f"{t:g}") for t in ticks(x_low, x_high, 8) if t == int(t)],
        "y_ticks": [(y_at(t), f"{t:g}") for t in ticks(y_low, y_high, 4)],
        "lines": [
            {"role": name, "points": [(x_at(x), y_at(y)) for x, y in one], "last": one[-1][1]}
            for name, one in series.items()
            if one
        ],
    }


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers within the range, about ``count`` of them."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _summary(verdict: Verdict) -> str:
    lift = verdict.lift
    if not all(map(_known, (lift.ratio, lift.low, lift.high))):
        return "The lift could not be measured; the reasons below say why."
    word = "more" if lift.ratio >= 1 else "fewer"
    return (
        f"Clients get {abs(lift.ratio - 1):.0%} {word} tokens from each step of the target: {lift.ratio:.2f} × the "
        f"champion, interval {lift.low:.2f} to {lift.high:.2f}, {lift.num_clusters} conversations."
    )


def _tiles(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The three figures that a busy reader looks for, before and after."""
    before, after = measured["champion"], measured["challenger"]
    names = {
        "emitted_tokens_per_step": ("Emitted tokens a step", 2),
        "served_acceptance_length": ("Acceptance length, as the engine counts", 2),
        "tokens_per_s": ("Output tokens a second", 1),
    }
    return [
        {"name": name, "before": before[key], "after": after[key], "digits": digits}
        for key, (name, digits) in names.items()
    ]


def _slices(lifts: Mapping[str, Interval], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each slice's interval on the common axis, with its length before and after."""
    drawn = intervals(lifts)
    for row in drawn["rows"]:
        for role in ("champion", "challenger"):
            row[role] = measured[role]["slices"].get(row["name"], {}).get("emitted_tokens_per_step")
    return drawn


def _per_position(one: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(position from 1, share of drafts accepted up to there, in per cent)."""
    counts = one["num_accepted_tokens_per_pos"]
    return [(k + 1, 100 * accepted_drafts_per_step(one["num_drafts"], count)) for k, count in enumerate(counts)]


def _curve_charts(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, Any] | None]:
    keys = {"Walk acceptance length on validation rows": "walk_acceptance_length", "Training loss": "loss"}
    return {
        name: line_chart({role: [(p["step"], p[key]) for p in curve if key in p] for role, curve in curves.items()})
        for name, key in keys.items()
    }


def _walk_row(role: str, one: Mapping[str, Any]) -> dict[str, Any]:
    walk = one["walk"]
    return {
        "role": role,
        "walked": accepted_drafts_per_step(walk["num_drafts"], walk["num_accepted_tokens"]),
        "served": accepted_drafts_per_step(one["num_drafts"], one["num_accepted_and_emitted"]),
        "gap": walk_gap(one),
    }


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
