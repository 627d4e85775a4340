import numpy as np
import pytest

from pipeline.watch.arl import average_run_length, threshold_for


@pytest.mark.parametrize(
    ("k", "h", "published"),
    # One-sided CUSUMs of normal steps, allowance k and limit h in standard deviations: Montgomery, Introduction to
    # Statistical Quality Control, table 9.3 and the pairs of the two-sided table times two.
    [(0.5, 4.0, 336.0), (0.5, 5.0, 930.0), (0.25, 8.01, 740.0), (1.0, 2.52, 740.0), (0.75, 3.34, 740.0)],
)
def test_run_lengths_are_those_of_the_published_tables(k, h, published):
    separation = 2 * k
    assert average_run_length(h * separation, separation) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("separation", [0.3, 1.0, 2.0])
def test_a_simulated_cusum_runs_as_long_as_computed(separation):
    rng, threshold, runs = np.random.default_rng(3), 3.0, 2000
    lengths, sums, alive = np.zeros(runs), np.zeros(runs), np.ones(runs, bool)
    while alive.any():
        steps = rng.normal(-(separation**2) / 2, separation, runs)
        sums = np.maximum(0, sums + steps)
        lengths += alive
        alive &= sums <= threshold
    error = lengths.std() / np.sqrt(runs)
    assert abs(lengths.mean() - average_run_length(threshold, separation)) < 4 * error


@pytest.mark.parametrize("separation", [0.2, 0.7, 1.3, 2.0])
@pytest.mark.parametrize("run_length", [500.0, 172_800.0])
def test_a_threshold_gives_the_run_length_that_was_asked_for(separation, run_length):
    assert average_run_length(threshold_for(run_length, separation), separation) == pytest.approx(run_length, rel=1e-3)


def test_the_run_length_is_never_under_the_bound_that_holds_for_every_likelihood_ratio():
    for separation in (0.3, 1.0, 2.0):
        assert average_run_length(6.0, separation) >= np.exp(6.0)


def test_rarer_false_alarms_and_hours_that_say_little_have_their_price():
    assert threshold_for(1e6, 1.0) > threshold_for(1e4, 1.0)
    assert threshold_for(1e5, 0.1) < threshold_for(1e5, 1.0)  # in log-likelihood; in hours it is the other way round
    assert threshold_for(1e5, 0.1) / 0.1**2 > threshold_for(1e5, 1.0)
