"""watch.false_alarm_days says how rarely acceptance alarms though nothing has changed: simulated in a quick form.

bench/oracles/monitor_months.py counts false alarms over many months of traffic like real one.
"""

import numpy as np
import pytest

from bench.oracles.monitor_months import Month, run
from pipeline.watch.hours import HOUR_S, hour_of
from pipeline.watch.learning import learn
from pipeline.watch_config import WatchConfig
from tests.pipeline.watched import MIX, RATES, START

STATED_DAYS = 4.0
RUNS, DAYS = 100, 40


def noisy_hours(count, rng):
    """Hours whose conversations differ by chance alone."""
    for number in range(count):
        rows = {}
        for cell, conversations in MIX.items():
            for i in range(conversations // 3):
                rate = RATES[cell] * rng.gamma(4.0, 0.25)
                rows[f"{number}-{cell}-{i}", cell] = [1, 20, 20 * rate]
        yield hour_of(START + number * HOUR_S, "1", ("route", "language"), rows)


def test_all_slices_and_both_directions_together_alarm_as_rarely_as_stated():
    """Every slice lies off by all that is tolerated, each by itself: what the statement is about."""
    rng = np.random.default_rng(11)
    config = WatchConfig(dimensions=("route", "language"), false_alarm_days=STATED_DAYS)
    reference = learn(config, list(noisy_hours(7 * 24, rng)))
    assert reference.watched.all() and len(reference.slices) == 5
    separation, threshold = reference.separation, reference.threshold
    sums, alarms = np.zeros((2, RUNS, len(threshold))), 0
    for _ in range(24 * DAYS):
        z = rng.normal(size=sums.shape)
        sums = np.maximum(0.0, sums + separation * (z - separation / 2))
        crossed = (sums > threshold).any(axis=(0, 2))
        alarms += crossed.sum()
        sums[:, crossed] = 0.0  # an alarm begins an event: all begin anew
    between = RUNS * DAYS / alarms
    assert STATED_DAYS * (1 - 4 / np.sqrt(alarms)) < between < 1.6 * STATED_DAYS


@pytest.mark.parametrize("seed", [2001])
def test_traffic_in_which_nothing_changes_alarms_no_oftener_than_stated(seed):
    """With all that real traffic does: rhythm, wobble, days that differ, bursts, an outage."""
    config = WatchConfig(false_alarm_days=5.0)
    found = run(Month(seed, conversations_a_day=3000, config=config, days=20))
    assert len(found.false) <= (20 - config.learn_days) / 5.0
