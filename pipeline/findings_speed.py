"""What the page shows of a SpeedReport: tokens/s and latencies against concurrency, and where speculation stops paying.

A setting is a number of speculated tokens; 0 is the target alone.
"""

import math
from collections.abc import Mapping
from typing import Any

from pipeline import charts
from pipeline.artifacts import SpeedReport
from pipeline.charts import known
from pipeline.speed_points import batch_size_schedule, pays_up_to

ALONE = "target alone"
_MAX_TICKS = 8


def speed(report: SpeedReport, evaluated: int | None) -> dict[str, Any]:
    """The lines, the mark where the target alone is faster, the table, and what is recommended.

    ``evaluated``: the concurrency of the verdict, marked too.
    """
    points = sorted(report.points, key=lambda p: (p["concurrency"], p["num_speculative_tokens"]))
    settings = sorted({p["num_speculative_tokens"] for p in points})
    concurrencies = sorted({p["concurrency"] for p in points})
    series = {
        name_of(k): [(p["concurrency"], p["tokens_per_s"]) for p in points if p["num_speculative_tokens"] == k]
        for k in settings
    }
    every = math.ceil(len(concurrencies) / _MAX_TICKS)
    chart = charts.line_chart(series, from_zero=True, log_x=True, x_ticks=concurrencies[::every])
    recommended = {int(c): k for c, k in report.recommended.items()}
    up_to = pays_up_to(report.recommended)
    return {
        "chart": chart
        and chart
        | {
            "beyond": _beyond(chart, concurrencies, up_to),
            "upright": chart["x_at"](evaluated) if evaluated in concurrencies else None,
        },
        "evaluated": evaluated,
        "styles": {name_of(k): "alone" if k == 0 else f"line{i % 5}" for i, k in enumerate(settings)},
        "rows": [{**p, "name": name_of(p["num_speculative_tokens"]), "best": _is_best(p, recommended)} for p in points],
        "recommended": [(c, name_of(k), _gain(report, c, k)) for c, k in sorted(recommended.items())],
        "pays_up_to": up_to,
        "schedule": batch_size_schedule(report.recommended),
        "lossless": report.lossless,
    }


def name_of(num_speculative_tokens: int) -> str:
    """A setting as the page calls it."""
    if num_speculative_tokens == 0:
        return ALONE
    return f"{num_speculative_tokens} token{'s' if num_speculative_tokens > 1 else ''}"


def _beyond(chart: Mapping[str, Any], concurrencies: list[int], up_to: int | None) -> float | None:
    """Where, across, the target alone becomes faster: halfway to the first concurrency above; None: nowhere."""
    above = [c for c in concurrencies if up_to is not None and c > up_to]
    if not above:
        return None
    below = [c for c in concurrencies if c <= up_to]
    return chart["x_at"](math.sqrt(below[-1] * above[0])) if below else 0.0


def _is_best(point: Mapping[str, Any], recommended: Mapping[int, int]) -> bool:
    return recommended.get(point["concurrency"]) == point["num_speculative_tokens"]


def _gain(report: SpeedReport, concurrency: int, num_speculative_tokens: int) -> float | None:
    """Tokens/s with that setting over the target alone's; None where one is missing."""
    found = {p["num_speculative_tokens"]: p["tokens_per_s"] for p in report.points if p["concurrency"] == concurrency}
    with_it, alone = found.get(num_speculative_tokens), found.get(0)
    return with_it / alone if known(with_it) and known(alone) and alone else None
