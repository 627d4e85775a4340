"""What the page shows of a verdict and its report, part by part: which figures, in what order, in which words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import acceptance, charts
from pipeline.acceptance import accepted_drafts_per_step
from pipeline.artifacts import AcceptanceReport, SpeedReport
from pipeline.charts import known
from pipeline.criteria import walk_gap
from pipeline.verdict import Verdict

# A dimension with more slices than this shows its worst ones and folds the others.
MAX_ROWS = 8
_FLAGS = {
    acceptance.FAILED: "no reply came",
    acceptance.NO_METRICS: "the engine gave no counts",
    acceptance.NO_STEP: "too short for a single step",
    acceptance.COUNTS_DISAGREE: "its counts contradict each other",
    acceptance.OVERCOUNT: "more accepted drafts than its length has room for",
    acceptance.UNDERCOUNT: "fewer steps than its length needs",
    acceptance.LOOP: "repeats itself, and loops are easy to draft",
}


def comparisons(verdict: Verdict, label: Mapping[str, str]) -> dict[str, Any]:
    """Every comparison of two drafters on one axis."""
    rows = {}
    for name, one in verdict.comparisons.items():
        a, b = name.split("/")
        rows[f"{label.get(a, a)} over {label.get(b, b)}"] = one
    return charts.intervals(rows)


def slices(verdict: Verdict, report: AcceptanceReport) -> dict[str, Any] | None:
    """Every slice on one axis, by dimension; of a dimension with many, the worst in sight."""
    if not verdict.slices:
        return None
    floors = {reason.code: reason for reason in verdict.reasons if reason.code.startswith("slice:")}
    floor = next((reason.limit for reason in floors.values() if reason.limit is not None), None)
    drawn = charts.intervals(verdict.slices, floor=floor)
    dimensions: dict[str, list[dict[str, Any]]] = {}
    for row in drawn["rows"]:
        dimension, _, value = row["name"].rpartition("=")
        reason = floors.get(f"slice:{row['name']}")
        dimensions.setdefault(dimension or "slice", []).append(
            row | {"value": value, "passed": reason.passed if reason else None, **_slice_counts(row["name"], report)}
        )
    return drawn | {"floor_value": floor, "dimensions": {name: _folded(rows) for name, rows in dimensions.items()}}


def _slice_counts(name: str, report: AcceptanceReport) -> dict[str, Any]:
    before, after = (report.measured[role]["slices"].get(name, {}) for role in ("champion", "challenger"))
    everything = report.measured["champion"]["num_requests"]
    return {
        "before": before.get("emitted_tokens_per_step"),
        "after": after.get("emitted_tokens_per_step"),
        "share": before["num_requests"] / everything if everything and "num_requests" in before else None,
    }


def _folded(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows in sight, and rows to unfold: few in their natural order, many from the worst on."""
    if len(rows) <= MAX_ROWS:
        return {"rows": sorted(rows, key=lambda row: _natural(row["value"])), "more": []}
    worst = sorted(rows, key=lambda row: (row["passed"] is not False, row["at"] is None, row["at"]))
    return {"rows": worst[:MAX_ROWS], "more": worst[MAX_ROWS:]}


def _natural(value: str) -> list[tuple[int, float, str]]:
    """Sorts ≤128 before ≤2048, and >8192 after both."""
    parts = re.findall(r"\d+(?:\.\d+)?|[^\d]+", value.replace("≤", "").replace(">", "9" * 12))
    return [(0, float(part), "") if part[0].isdigit() else (1, 0.0, part) for part in parts]


def latencies(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Role by role, time to first token and between tokens; empty where replies came whole."""
    rows = [{"role": role, **(one.get("latency") or {})} for role, one in measured.items()]
    return rows if any(known(value) for row in rows for name, value in row.items() if name != "role") else []


def positions(verdict: Verdict, measured: Mapping[str, Any]) -> dict[str, Any] | None:
    """Share of drafts accepted up to each position, as lines and as a table.

    Beside it, of the challenger's drafts that got to a position, the share accepted there: what the gate judges.
    """
    series = {role: points for role, one in measured.items() if (points := _per_position(one))}
    if (chart := charts.line_chart(series, from_zero=True)) is None:
        return None
    there = {one.position: one for one in verdict.positions}
    rows = [
        {
            "position": k + 1,
            "shares": [points[k][1] if k < len(points) else None for points in series.values()],
            "there": there.get(k + 1),
        }
        for k in range(max(len(points) for points in series.values()))
    ]
    return {"chart": chart, "roles": list(series), "rows": rows}


def _per_position(one: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(position from 1, share of drafts accepted up to there, in per cent)."""
    counts = one["num_accepted_tokens_per_pos"]
    return [(k + 1, 100 * accepted_drafts_per_step(one["num_drafts"], count)) for k, count in enumerate(counts)]


def general(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Role by role, tokens a step on the general prompts."""
    rows = {role: one["general"] for role, one in measured.items() if one.get("general")}
    return charts.bars({role: one["emitted_tokens_per_step"] for role, one in rows.items()})


def walk_row(role: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """Accepted drafts a step, walked offline and served."""
    walk = one["walk"]
    beside = walk.get("served") or one
    return {
        "role": role,
        "walked": accepted_drafts_per_step(walk["num_drafts"], walk["num_accepted_tokens"]),
        "served": accepted_drafts_per_step(beside["num_drafts"], beside["num_accepted_and_emitted"]),
        "gap": walk_gap(one),
    }


def curves(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, Any] | None]:
    """What was recorded while training, by step."""
    keys = {"Walk acceptance length on validation rows": "walk_acceptance_length", "Training loss": "loss"}
    return {
        name: charts.line_chart(
            {role: [(p["step"], p[key]) for p in curve if key in p] for role, curve in curves.items()}
        )
        for name, key in keys.items()
    }


def looks(report: AcceptanceReport) -> list[dict[str, Any]]:
    """Where early stopping looked: share of the planned prompts, and what was settled there."""
    return [{"share": look.get("fraction"), "settled": look.get("settled")} for look in report.looks]


def flags(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Why replies were left out, and how many of each role's."""
    names = dict.fromkeys(flag for one in measured.values() for flag in one["flagged"])
    return [
        {
            "name": flag,
            "why": _FLAGS.get(flag, ""),
            "counts": [one["flagged"].get(flag, 0) for one in measured.values()],
        }
        for flag in names
    ]


def prompts(verdict: Verdict) -> list[tuple[str, list[dict[str, Any]]]]:
    """The prompts that gained and that lost most, by id."""
    found = {"Gained most": verdict.gained, "Lost most": verdict.lost}
    return [(name, [_prompt(row) for row in rows]) for name, rows in found.items() if rows]


def _prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    groups = " · ".join(name.partition("=")[2] or name for name in row.get("slices") or ())
    return {"row_id": row["row_id"], "groups": groups, "before": row["champion"], "after": row["challenger"]}


def lineage(report: AcceptanceReport, speed: SpeedReport | None) -> list[tuple[str, str]]:
    """Name and id of everything that this verdict rests on."""
    rows = [("report", report.derivation_id), *report.parents.items()]
    return [*rows, ("speed report", speed.derivation_id)] if speed else rows
