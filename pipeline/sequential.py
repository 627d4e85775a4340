"""Looking early without fooling oneself: what each look may conclude so that all of them together err as promised.

The error rate is spent over the looks as a function of the share of the planned prompts that is in (Lan and
DeMets), so looks may come at any shares, as many as there are. Each look's boundary follows from those before
by integrating over what has not yet crossed one.
"""

import math
from functools import lru_cache
from typing import Literal

import numpy as np

from pipeline.errors import ConfigError

Spending = Literal["lift", "speed"]
# Power families, error_rate × fraction ** power. The lift's: with eight looks at a gain that a fixed sample finds in
# 80% of gates, power 3 finds it in 78.7% with 0.76 of the prompts, and one four times as large with 0.22 of them;
# power 2 in 77.4% (0.72, 0.19), power 4 in 79.3% (0.79, 0.25), and the function that is like O'Brien and Fleming's
# in 78.5% (0.76, 0.27). Speed, which is asked for in addition, spends evenly: sittings are few, and a late start
# would keep every clear win waiting for them.
_POWERS: dict[str, float] = {"lift": 3.0, "speed": 1.0}
_TAIL = 8.0  # standard deviations that the integration covers
_MAX_POINTS = 4001


@lru_cache(maxsize=4096)
def levels(error_rate: float, fractions: tuple[float, ...], spending: Spending = "lift") -> tuple[float, ...]:
    """The one-sided level of each look's interval: at all looks together, ``error_rate`` is spent up to the last.

    ``fractions`` are the shares of the planned prompts at each look, rising, at most 1.

    Raises: ConfigError when they don't rise within (0, 1].
    Source: Lan and DeMets 1983; Jennison and Turnbull 2000, chapters 7 and 19 (numerical integration).
    """
    from scipy import stats

    steps = np.diff((0.0, *fractions))
    if not fractions or not (steps > 0).all() or not fractions[-1] <= 1 + 1e-9:
        raise ConfigError(f"looks at {fractions}: expected rising shares of the planned prompts, the last at most 1")
    found, spent = [], 0.0
    points, density = np.zeros(1), np.ones(1)  # of the Brownian motion, its weights folded in; it starts at 0
    for k, (fraction, step) in enumerate(zip(fractions, steps, strict=True)):
        share = error_rate * min(fraction, 1.0) ** _POWERS[spending] - spent
        spent += share
        width, scale = _TAIL * math.sqrt(fraction), math.sqrt(step)
        bound = _bound(points, density, scale, share, width)
        found.append(float(stats.norm.sf(bound / math.sqrt(fraction))) if k else share)
        if k + 1 < len(fractions):
            points, density = _advance(points, density, scale, (-width, min(bound, width)), steps[k + 1])
    return tuple(found)


def _bound(points: np.ndarray, density: np.ndarray, scale: float, share: float, width: float) -> float:
    """What the motion exceeds after one more step with probability ``share``; infinite where that is next to never."""
    from scipy import optimize, special

    def crossing(bound: float) -> float:
        return float(density @ special.ndtr((points - bound) / scale)) - share

    return optimize.brentq(crossing, -width, width, xtol=1e-10) if crossing(width) < 0 else math.inf


def _advance(
    points: np.ndarray, density: np.ndarray, scale: float, limits: tuple[float, float], next_step: float
) -> tuple[np.ndarray, np.ndarray]:
    """Points and weighted density of what has not crossed after a look; dense enough for the next step."""
    from scipy import stats

    low, high = limits
    count = 2 * math.ceil(min(_MAX_POINTS - 1, max(200, 6 * (high - low) / math.sqrt(next_step))) / 2) + 1
    after = np.linspace(low, high, count)
    simpson = np.where(np.arange(count) % 2, 4.0, 2.0)
    simpson[[0, -1]] = 1.0
    simpson *= (high - low) / (count - 1) / 3
    return after, simpson * (stats.norm.pdf((after[:, None] - points) / scale) @ density / scale)
