"""How long a CUSUM runs before it alarms though nothing has changed, and the threshold that gives a stated run length.

A statistic S = max(0, S + X) adds up log-likelihood ratios X of "shifted" against "not shifted". With J the distance of
the two means in standard deviations, X is normal with mean -J²/2 before the shift, J²/2 after it, and variance J².
"""

import math
from functools import lru_cache

import numpy as np

_STEPS = 12  # quadrature nodes a standard deviation of a step
_MAX_NODES = 700
_GRID = 0.05  # J is rounded to it, so that few systems are solved


def average_run_length(threshold: float, separation: float) -> float:
    """Mean steps to the first S above ``threshold`` from S = 0 while nothing has changed; ``separation`` is J > 0.

    Source: Page (1954), the integral equation of a CUSUM's run length; solved at Gauss-Legendre nodes.
    """
    from scipy.stats import norm

    nodes = min(_MAX_NODES, max(40, math.ceil(_STEPS * threshold / separation)))
    points, weights = np.polynomial.legendre.leggauss(nodes)
    at, weight = threshold * (points + 1) / 2, threshold * weights / 2
    starts = np.r_[0.0, at]
    to = (at[None, :] - starts[:, None] + separation**2 / 2) / separation
    kernel = norm.pdf(to) * weight[None, :] / separation
    stays_down = norm.cdf((separation**2 / 2 - starts) / separation)
    system = np.eye(nodes + 1)
    system[:, 1:] -= kernel
    system[:, 0] -= stays_down
    return float(np.linalg.solve(system, np.ones(nodes + 1))[0])


def threshold_for(run_length: float, separation: float) -> float:
    """The threshold with this average run length, in steps; ``separation`` is rounded up to a twentieth."""
    return _threshold(float(run_length), max(_GRID, math.ceil(separation / _GRID - 1e-9) * _GRID))


@lru_cache(maxsize=4096)
def _threshold(run_length: float, separation: float) -> float:
    if separation < 4 * _GRID:
        return _siegmund(run_length, separation)
    # The logarithm of the run length is all but a line in the threshold: a few secant steps are enough.
    low = max(0.1, _siegmund(run_length, separation) - 0.5)
    high = low + 1.0
    wanted = math.log(run_length)
    at_low, at_high = (math.log(average_run_length(x, separation)) for x in (low, high))
    for _ in range(12):
        found = max(0.05, high + (wanted - at_high) * (high - low) / (at_high - at_low))
        if abs(found - high) < 1e-4:
            break
        low, at_low = high, at_high
        high, at_high = found, math.log(average_run_length(found, separation))
    return found


def _siegmund(run_length: float, separation: float) -> float:
    """Source: Siegmund (1985), Sequential Analysis, corrected diffusion approximation of a CUSUM's run length."""
    wanted = run_length * separation**2 / 2
    corrected = math.log(1 + wanted)
    for _ in range(50):
        corrected = math.log(wanted + 1 + corrected)
    return max(0.05, corrected - 1.166 * separation)
