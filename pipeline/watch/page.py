"""The watch as one page for people: self-contained HTML, no script, nothing fetched, light and dark."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline import charts, figures
from pipeline.watch.hours import ALL, Hour
from pipeline.watch.state import Seen, State
from pipeline.watch.view import compared_of, series

TEMPLATE = "watch/watch.html.j2"
_MAX_CHARTS = 7
_MAX_ALARMS = 12


def page(body: Mapping[str, Any], state: State, hours: Sequence[Hour], seen: Seen, *, title: str) -> str:
    """The page of the body of alarms.json and of the hours behind it."""
    alarms = list(reversed(body["alarms"]))[:_MAX_ALARMS]
    return _template().render(
        title=title,
        body=body,
        headline=_headline(body),
        firing=[one for one in alarms if one["fires"]],
        others=[one for one in alarms if not one["fires"]],
        charts=_charts(body, state, hours, seen),
        replicas=body["replicas"],
    )


@lru_cache(maxsize=1)
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(figures, name) for name in ("figure", "times", "percent", "rate", "ms")}
    environment.filters["signed"] = _signed
    environment.filters["count"] = lambda number: f"{number:,.0f}"
    environment.globals["label"] = {"served": "served", "expected": "expected", "promised": "promised by the gate"}
    return environment.get_template(TEMPLATE)


def _headline(body: Mapping[str, Any]) -> tuple[str, str]:
    """What a busy reader asks first, and the tone of it."""
    if body["retrain"]:
        return "Retrain: acceptance or what is asked has changed", "reject"
    if body["firing"]:
        return "An alarm holds", "hold"
    if body["phase"] == "learning":
        return "Learning what is usual", "cannot_say"
    return ("Levels are learned anew", "cannot_say") if body["phase"] == "settling" else ("As expected", "promote")


def _charts(body: Mapping[str, Any], state: State, hours: Sequence[Hour], seen: Seen) -> list[tuple[str, Any]]:
    """The whole, the slices that alarms name, and those that moved most, as lines over days from now."""
    slices = body["slices"]
    named = [name for one in body["alarms"] if one["fires"] for name in one["slices"]]
    moved = sorted(slices, key=lambda name: -abs(slices[name].get("change") or 0))
    found, compared = [], compared_of(state, hours)
    for name in [name for name in dict.fromkeys([ALL, *named, *moved]) if name in slices][:_MAX_CHARTS]:
        made = series(state, hours, seen, name, compared=compared, now=body["at_s"])
        lines = {k: v for k, v in made.items() if any(y for _, y in v)}
        if chart := charts.line_chart(lines):
            found.append((name, chart))
    return found


def _signed(share: float | None) -> str:
    return figures.NONE if share is None else f"{share:+.1%}"
