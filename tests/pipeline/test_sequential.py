"""The looks together err as often as promised: against random walks, and against what is known in closed form."""

import numpy as np
import pytest
from scipy import stats

from pipeline.errors import ConfigError
from pipeline.sequential import levels


@pytest.mark.parametrize(
    "fractions", [(0.2, 0.4, 0.6, 0.8, 1.0), (0.1, 0.15, 0.7, 1.0), (0.5, 0.52, 1.0), tuple(np.arange(1, 13) / 12)]
)
@pytest.mark.parametrize("spending", ["lift", "speed"])
def test_random_walks_without_a_drift_cross_at_some_look_in_five_per_cent(fractions, spending):
    rng = np.random.default_rng(3)
    steps = np.sqrt(np.diff((0.0, *fractions)))
    walks = np.cumsum(rng.standard_normal((400_000, len(fractions))) * steps, axis=1)
    crossed = walks / np.sqrt(fractions) > stats.norm.isf(levels(0.05, tuple(fractions), spending))
    # 4 standard errors of 400,000 walks.
    assert crossed.any(axis=1).mean() == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 / 400_000))


def test_one_look_at_the_end_is_an_ordinary_test():
    assert levels(0.05, (1.0,)) == (pytest.approx(0.05),)


def test_the_first_look_spends_what_the_spending_function_says():
    assert levels(0.05, (0.5, 1.0), "lift")[0] == pytest.approx(0.05 * 0.5**3)
    assert levels(0.05, (0.5, 1.0), "speed")[0] == pytest.approx(0.05 * 0.5)


def test_two_looks_are_those_of_the_bivariate_normal():
    first, last = stats.norm.isf(levels(0.05, (0.4, 1.0)))
    together = stats.multivariate_normal.cdf([first, last], cov=[[1, np.sqrt(0.4)], [np.sqrt(0.4), 1]])
    assert 1 - together == pytest.approx(0.05, abs=1e-6)


def test_a_later_look_never_changes_an_earlier_one():
    assert levels(0.05, (0.2, 0.5, 0.9))[:2] == levels(0.05, (0.2, 0.5))


def test_an_evaluation_that_ends_early_spends_only_its_share():
    assert levels(0.05, (0.5,))[0] < 0.05


@pytest.mark.parametrize("fractions", [(), (0.5, 0.5), (0.6, 0.4), (0.0, 1.0), (0.5, 1.2)])
def test_looks_that_do_not_rise_are_refused(fractions):
    with pytest.raises(ConfigError, match="rising shares"):
        levels(0.05, fractions)
