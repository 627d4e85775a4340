"""Where things lie in a drawing: axes, bars, intervals and lines, for a page that draws them as SVG.

Across, everything is in per cent of the drawing's width, which is the page's affair; down, in CSS pixels. So
drawings stretch and their letters don't. Nothing here knows what the numbers mean.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeline.bootstrap import Interval

HEIGHT = 190
"""CSS pixels of a line chart between its axes."""
_LABEL = 15  # CSS pixels between the names of two lines
_MAX_POINTS = 200  # of a line: more can't be told apart


def known(value: float | None) -> bool:
    """Whether there is a number to draw."""
    return value is not None and math.isfinite(value)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers within the range, about ``count`` of them."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def bars(values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """One bar a role: its length in per cent of the longest, from zero."""
    longest = max((value for value in values.values() if known(value)), default=1) or 1
    return [
        {"role": role, "value": value, "percent": round(100 * value / longest, 1) if known(value) else 0}
        for role, value in values.items()
    ]


def intervals(rows: Mapping[str, Interval], *, floor: float | None = None) -> dict[str, Any]:
    """Ratios and their intervals on one axis, with the place of 1.0, of the floor, and the ticks.

    The axis holds every ratio; an interval that is far wider than they lie apart is cut, and says so.
    """
    low, high = _interval_axis(rows.values(), floor)

    def place(value: float | None) -> float | None:
        return round(100 * (min(max(value, low), high) - low) / (high - low), 2) if known(value) else None

    return {
        "one": place(1.0),
        "floor": place(floor),
        "ticks": [(place(tick), f"{tick:g}") for tick in ticks(low, high, 4)],
        "rows": [
            {
                "name": name,
                "at": place(one.ratio),
                "from": place(one.low),
                "to": place(one.high),
                "cut": (known(one.low) and one.low < low, known(one.high) and one.high > high),
                "interval": one,
            }
            for name, one in rows.items()
        ],
    }


def _interval_axis(rows: Iterable[Interval], floor: float | None) -> tuple[float, float]:
    rows = list(rows)
    ratios = [1.0, *(value for value in (floor, *(one.ratio for one in rows)) if known(value))]
    reach = max(0.6 * (max(ratios) - min(ratios)), 0.1)
    ends = [value for one in rows for value in (one.low, one.high) if known(value)]
    low = max(min([*ratios, *ends]), min(ratios) - reach)
    high = min(max([*ratios, *ends]), max(ratios) + reach)
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float | None]]],
    *,
    from_zero: bool = False,
    log_x: bool = False,
    x_ticks: Sequence[float] | None = None,
) -> dict[str, Any] | None:
    """Lines on one pair of axes, each cut into pieces, with a place for its name at its end; None without a point.

    ``log_x``: every doubling as wide as the next. ``x_ticks``: these instead of round whole numbers.
    """
    series = {name: _thin([p for p in points if known(p[1])]) for name, points in series.items()}
    points = [point for one in series.values() for point in one]
    if not points:
        return None
    x_at = _x_axis([x for x, _ in points], log=log_x)
    y_low, y_high, y_at = _y_axis([y for _, y in points], from_zero=from_zero)
    xs = sorted({x for x, _ in points})
    if x_ticks is None:
        x_ticks = [t for t in ticks(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, 6) if t == int(t) and t <= xs[-1]]
    drawn = {name: [(x_at(x), y_at(y)) for x, y in one] for name, one in series.items() if one}
    names_at = _apart({name: one[-1][1] for name, one in drawn.items()})
    return {
        "height": HEIGHT,
        "x_ticks": [(x_at(t), f"{t:g}") for t in x_ticks],
        "y_ticks": [(y_at(t), f"{t:g}") for t in ticks(y_low, y_high, 4)],
        "x_at": x_at,
        "lines": [
            {
                "role": name,
                "points": one,
                "pieces": [(*a, *b) for a, b in pairwise(one)],
                "name_at": names_at[name],
                "last": series[name][-1][1],
            }
            for name, one in drawn.items()
        ],
    }


def _x_axis(values: Sequence[float], *, log: bool) -> Callable[[float], float]:
    """x → per cent of the width; one value alone lies in the middle."""
    scale = math.log2 if log else float
    low, high = scale(min(values)), scale(max(values))
    if high == low:
        low, high = low - 0.5, high + 0.5
    return lambda x: round(100 * (scale(x) - low) / (high - low), 2)


def _y_axis(values: Sequence[float], *, from_zero: bool) -> tuple[float, float, Callable[[float], float]]:
    """The axis' ends, and y → CSS pixels from the top."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    margin = 0.05 * (high - low) or 0.1
    low, high = (0.0 if from_zero else low - margin), high + margin
    return low, high, lambda y: round(HEIGHT * (high - y) / (high - low), 1)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about ``_MAX_POINTS`` of them, the last one always."""
    every = math.ceil(len(points) / _MAX_POINTS) or 1
    return [*points[:-1:every], *points[-1:]]


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    """The heights, moved as little as keeps their names from lying on each other."""
    placed: dict[str, float] = {}
    previous = -math.inf
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        previous = placed[name] = max(height, previous + _LABEL)
    limit = HEIGHT + _LABEL
    for name in reversed(placed):
        limit = placed[name] = min(placed[name], limit - _LABEL)
    return placed
