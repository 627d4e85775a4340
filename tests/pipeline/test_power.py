"""How much is enough: against simulated gates and against a hand count."""

import numpy as np
import pytest
from scipy import stats

from pipeline.power import evidence, influence, needed_clusters


def sums_of(rng, clusters, *, lift=1.0, noise=0.3):
    """[4, clusters]: the challenger's tokens a step scatter around ``lift`` times the champion's."""
    tokens = rng.integers(50, 200, clusters).astype(float)
    steps = tokens / rng.lognormal(0.7, 0.3, clusters)
    return np.array([tokens, steps / lift * rng.lognormal(0, noise, clusters), tokens, steps])


def test_influence_is_what_leaving_a_conversation_out_changes():
    sums = sums_of(np.random.default_rng(0), 2000)
    log_ratio = lambda s: np.log(s[0].sum() / s[1].sum() / (s[2].sum() / s[3].sum()))  # noqa: E731
    without = np.array([log_ratio(np.delete(sums, i, axis=1)) for i in range(50)])
    assert np.allclose(influence(sums)[:50], 1999 * (log_ratio(sums) - without), rtol=0.01, atol=1e-3)


def test_the_number_is_that_of_simulated_t_tests():
    spread, gain = 0.35, 1.06
    n = needed_clusters(spread, gain=gain, level=0.05, power=0.8)
    samples = np.random.default_rng(1).normal(np.log(gain), spread, (40_000, n))
    t = samples.mean(1) / samples.std(1, ddof=1) * np.sqrt(n)
    assert (t > stats.t.isf(0.05, n - 1)).mean() == pytest.approx(0.8, abs=0.008)


def test_a_tighter_level_a_smaller_gain_and_a_wider_spread_need_more():
    base = needed_clusters(0.3, gain=1.05, level=0.05, power=0.8)
    assert needed_clusters(0.3, gain=1.05, level=0.02, power=0.8) > base
    assert needed_clusters(0.3, gain=1.03, level=0.05, power=0.8) > base
    assert needed_clusters(0.6, gain=1.05, level=0.05, power=0.8) == pytest.approx(4 * base, rel=0.03)


def test_what_is_missing_is_said_in_prompts():
    found = evidence(sums_of(np.random.default_rng(2), 60), num_prompts=150, gain=1.05, level=0.05, power=0.8)
    assert not found.is_enough
    assert found.more_prompts == -(-(found.needed_clusters - 60) * 150 // 60)


def test_drafters_that_never_differ_need_hardly_any():
    sums = np.ones((4, 40))
    assert evidence(sums, num_prompts=40, gain=1.05, level=0.05, power=0.8).is_enough


def test_what_cannot_be_told_is_not_enough():
    for sums in (np.zeros((4, 0)), np.ones((4, 1)), np.zeros((4, 9))):
        found = evidence(sums, num_prompts=9, gain=1.05, level=0.05, power=0.8)
        assert (found.needed_clusters, found.is_enough) == (None, False)
    assert needed_clusters(1e9, gain=1.01, level=0.05, power=0.8) is None
