"""The paired, clustered bootstrap: against a loop in plain Python, and on data with nothing to find."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from pipeline.bootstrap import cluster_sums, compare, resample


def rows_of(clusters):
    """clusters: per conversation, a list of (role, emitted tokens without the prefill's, steps)."""
    return [
        {"role": role, "conversation": f"c{i:04d}", "weight": 1, "num_tokens": tokens + 1, "num_drafts": steps}
        for i, replies in enumerate(clusters)
        for role, tokens, steps in replies
    ]


def simulated(rng, *, num_clusters, lift, noise=0.15):
    clusters = []
    for _ in range(num_clusters):
        length = rng.lognormvariate(0.7, 0.3)  # conversations differ more than drafters do
        replies = []
        for _ in range(rng.randint(1, 3)):
            tokens = rng.randint(30, 120)
            for role, factor in (("champion", 1.0), ("challenger", lift)):
                steps = max(1, round(tokens / (1 + length * factor * rng.lognormvariate(0, noise))))
                replies.append((role, tokens, steps))
        clusters.append(replies)
    return clusters


def plain_interval(clusters, *, level, resamples, seed):
    """The same by the book: draw conversations, add up, divide, sort, cut; nothing is corrected."""
    rng = random.Random(seed)
    ratios = []
    for _ in range(resamples):
        sums = {"champion": [0, 0], "challenger": [0, 0]}
        for _ in clusters:
            for role, tokens, steps in clusters[rng.randrange(len(clusters))]:
                sums[role][0] += tokens
                sums[role][1] += steps
        (a, b), (c, d) = sums["challenger"], sums["champion"]
        ratios.append((a / b) / (c / d))
    ratios.sort()
    return ratios[round(level * resamples)], ratios[round((1 - level) * resamples) - 1]


def test_the_ratio_is_counted_by_hand():
    rows = rows_of([[("champion", 10, 10), ("challenger", 10, 5)], [("champion", 30, 10), ("challenger", 30, 10)]])
    # (40 / 15) / (40 / 20)
    assert compare(rows, "challenger", "champion", level=0.025, resamples=1000, seed=0).ratio == pytest.approx(4 / 3)


def test_the_interval_is_that_of_a_plain_loop():
    clusters = simulated(random.Random(5), num_clusters=60, lift=1.3)
    found = compare(rows_of(clusters), "challenger", "champion", level=0.05, resamples=4000, seed=1)
    low, high = plain_interval(clusters, level=0.05, resamples=4000, seed=2)
    assert found.num_clusters == 60
    assert found.low == pytest.approx(low, abs=0.006)
    assert found.high == pytest.approx(high, abs=0.006)


def test_replies_of_one_conversation_do_not_count_as_many():
    one_each = [[("champion", 100, 50), ("challenger", 100, 40 + i % 20)] for i in range(40)]
    # The same conversations, each with its replies four times: no new information.
    four_each = [replies * 4 for replies in one_each]
    settings = {"level": 0.025, "resamples": 4000, "seed": 0}
    narrow = compare(rows_of(four_each), "challenger", "champion", **settings)
    wide = compare(rows_of(one_each), "challenger", "champion", **settings)
    assert narrow == wide


def test_equal_drafters_are_rarely_told_apart():
    rng = random.Random(11)
    wrong = 0
    for trial in range(150):
        clusters = simulated(rng, num_clusters=40, lift=1.0)
        found = compare(rows_of(clusters), "challenger", "champion", level=0.025, resamples=1000, seed=trial)
        wrong += found.low > 1
    # One side of a 95% interval: 2.5% of 150 is 3.75; 10 or more would happen once in 200 runs.
    assert wrong < 10


def test_a_real_lift_is_found():
    clusters = simulated(random.Random(3), num_clusters=60, lift=1.5)
    assert compare(rows_of(clusters), "challenger", "champion", level=0.025, resamples=1000, seed=0).low > 1


def test_a_drafter_against_itself_is_exactly_one():
    clusters = [[("champion", 50 + i, 20), ("challenger", 50 + i, 20)] for i in range(30)]
    found = compare(rows_of(clusters), "challenger", "champion", level=0.025, resamples=1000, seed=0)
    assert (found.ratio, found.low, found.high) == (1.0, 1.0, 1.0)


def test_what_cannot_be_told_is_not_a_number():
    settings = {"level": 0.025, "resamples": 1000, "seed": 0}
    assert math.isnan(compare([], "challenger", "champion", **settings).ratio)
    one = compare(rows_of([[("champion", 9, 3), ("challenger", 9, 3)]]), "challenger", "champion", **settings)
    assert (one.ratio, one.num_clusters) == (1.0, 1)
    assert math.isnan(one.low)


def test_few_conversations_widen_the_interval_as_students_does():
    # Log ratios alone vary, a little: the bootstrap's deviation is the plain one, √((n-1)/n) too narrow.
    rng = np.random.default_rng(0)
    logs = rng.normal(0, 0.01, 6)
    sums = np.array([np.exp(logs) * 1e6, np.full(6, 1e6), np.full(6, 1e6), np.full(6, 1e6)])
    found = resample(sums, resamples=20_000, seed=0).interval(0.05)
    half = stats.t.isf(0.05, 5) * logs.std(ddof=1) / math.sqrt(6)
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=0.12)


def test_a_level_that_the_resamples_cannot_resolve_is_continued_and_not_cut():
    clusters = simulated(random.Random(8), num_clusters=200, lift=1.1)
    found = resample(cluster_sums(rows_of(clusters), "challenger", "champion"), resamples=1000, seed=0)
    widths = [math.log(found.ratio / found.interval(level).low) for level in (0.05, 1e-3, 1e-5)]
    expected = [stats.t.isf(level, 199) for level in (0.05, 1e-3, 1e-5)]
    assert widths[1] / widths[0] == pytest.approx(expected[1] / expected[0], rel=0.1)
    assert widths[2] / widths[0] == pytest.approx(expected[2] / expected[0], rel=0.1)


def test_the_p_value_and_the_interval_say_the_same():
    clusters = simulated(random.Random(9), num_clusters=60, lift=1.0)
    found = resample(cluster_sums(rows_of(clusters), "challenger", "champion"), resamples=4000, seed=0)
    for level in (0.2, 0.05, 0.01, 1e-4):
        assert found.p_under(found.interval(level).high) == pytest.approx(level, rel=0.05)
    assert found.p_under(found.interval(0.1).low) == pytest.approx(0.9, abs=0.01)


def test_one_conversation_that_weighs_nearly_everything_does_not_count_as_many():
    rows = rows_of([[("champion", 100, 50), ("challenger", 100, 40 + i % 20)] for i in range(40)])
    even = compare(rows, "challenger", "champion", level=0.05, resamples=2000, seed=0)
    for row in rows[:2]:
        row["weight"] = 100_000
    uneven = compare(rows, "challenger", "champion", level=0.05, resamples=2000, seed=0)
    assert math.log(uneven.high / uneven.low) > 10 * math.log(even.high / even.low)
