"""Figures of a bench: a value, what it has to be, whether it is; a table for people and one line of JSON."""

import json
from typing import Any

from pipeline.artifacts import package_versions

Figure = dict[str, Any]


def at_most(value: float, limit: float, **more: Any) -> Figure:
    """A figure that must not exceed its limit."""
    return {"value": value, "target": f"<={limit:g}", "met": value <= limit, **more}


def at_least(value: float, limit: float, **more: Any) -> Figure:
    """A figure that must reach its limit."""
    return {"value": value, "target": f">={limit:g}", "met": value >= limit, **more}


def above(value: float | None, limit: float, **more: Any) -> Figure:
    """A figure that must exceed its limit."""
    return {"value": value, "target": f">{limit:g}", "met": value is not None and value > limit, **more}


def unknown(reason: str) -> Figure:
    """A figure that could not be measured here."""
    return {"value": None, "met": None, "reason": reason}


def shown(value: float, **more: Any) -> Figure:
    """A figure that is printed, and has no limit."""
    return {"value": value, "met": None, "reason": "printed", **more}


def table(figures: dict[str, Figure]) -> str:
    """The figures for people."""
    lines = [f"{'figure':44}{'value':>14}  {'target':10}met"]
    for name, figure in figures.items():
        value = "-" if figure["value"] is None else f"{figure['value']:.6g}"
        met = {True: "yes", False: "NO", None: f"- {figure.get('reason', '')}"}[figure["met"]]
        lines.append(f"{name:44}{value:>14}  {figure.get('target', ''):10}{met}  {figure.get('on', '')}")
    return "\n".join(lines)


def finish(bench: str, figures: dict[str, Figure]) -> None:
    """Print the table, and last the line of JSON."""
    print(table(figures))
    print(json.dumps({"bench": bench, "figures": figures, "versions": package_versions()}))
