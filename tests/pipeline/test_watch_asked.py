import numpy as np
import pytest

from pipeline.errors import SchemaError
from pipeline.watch.asked import DAY_S, Asked, as_rows, drifts, from_rows, lowest, rank_of, read_days, write_day
from pipeline.watch.served import BUCKETS
from pipeline.watch_config import WatchConfig
from tests.pipeline.watched import START

CONFIG = WatchConfig()
DIMENSIONS = ("route", "language")


def day(number, *, mail=0.6, de=0.3, words=0, size=250):
    """A day's sample: shares wobble a little from day to day, as those of a fleet do."""
    rng = np.random.default_rng(number)
    mail, de = mail + rng.normal(0, 0.02), de + rng.normal(0, 0.02)
    usual = np.random.default_rng(words).gamma(2.0, 1.0, BUCKETS)
    found = []
    for i in range(size):
        cell = ("mail" if rng.random() < mail else "code", "de" if rng.random() < de else "en")
        sketch = np.minimum(rng.poisson(60 * usual / usual.sum()), 255).astype(np.uint8)
        found.append(Asked(f"{number}-{i}", float(rng.random()), cell, sketch))
    return found


def starts(count, first=0):
    return [START + number * DAY_S for number in range(first, first + count)]


@pytest.fixture(scope="module")
def fortnight():
    return {start: day(i) for i, start in enumerate(starts(14))}


def alarms(sample, reference, at):
    return [one.dimension for one in drifts(CONFIG, DIMENSIONS, sample, reference, at)]


def found(sample, reference, at):
    return [one.dimension for one in drifts(CONFIG, DIMENSIONS, sample, reference, at) if one.is_alarm]


def test_days_like_the_reference_are_no_drift(fortnight):
    for i, start in enumerate(starts(14, first=14)):
        assert found(day(100 + i), fortnight, start) == []


@pytest.mark.parametrize(
    ("changed", "dimension"), [({"mail": 0.15}, "route"), ({"de": 0.8}, "language"), ({"words": 1}, "words")]
)
def test_a_drift_is_told_by_its_dimension_alone(fortnight, changed, dimension):
    assert found(day(200, **changed), fortnight, starts(1, first=14)[0]) == [dimension]


def test_a_value_that_nobody_knew_is_a_drift(fortnight):
    sample = [
        Asked(a.conversation, a.rank, ("new", a.cell[1]), a.sketch) if i % 3 == 0 else a for i, a in enumerate(day(7))
    ]
    assert found(sample, fortnight, starts(1, first=14)[0]) == ["route"]


def test_the_statistic_is_the_population_stability_index():
    # Sixty and forty of a hundred against fifty and fifty: (0.6 - 0.5) ln(0.6 / 0.5) + (0.4 - 0.5) ln(0.4 / 0.5).
    def sample(mail, size):
        sketch = np.ones(BUCKETS, np.uint8)
        return [Asked(str(i), i, ("mail" if i < mail * size else "code", "en"), sketch) for i in range(size)]

    reference = {start: sample(0.5, 10_000) for start in starts(5, first=3)}
    (route, *_) = drifts(CONFIG, DIMENSIONS, sample(0.6, 10_000), reference, starts(1, first=10)[0])
    assert route.statistic == pytest.approx(0.1 * np.log(0.6 / 0.5) - 0.1 * np.log(0.4 / 0.5), rel=0.01)
    assert route.limit >= CONFIG.asked_min_psi and not route.is_alarm


def test_weekends_are_compared_with_weekends(fortnight):
    weekend = {start: day(i, mail=0.2 if i % 7 in (1, 2) else 0.6) for i, start in enumerate(starts(14))}
    saturday, monday = starts(1, first=15)[0], starts(1, first=17)[0]
    assert found(day(300, mail=0.2), weekend, saturday) == []
    assert "route" in found(day(300, mail=0.2), weekend, monday)


def test_too_few_days_judge_nothing(fortnight):
    few = dict(list(fortnight.items())[:3])
    assert alarms(day(1, mail=0.0), few, starts(1, first=14)[0]) == []
    assert alarms([], fortnight, starts(1, first=14)[0]) == []


def test_samples_come_back_as_they_were_kept_without_erased_subjects(tmp_path):
    sample = day(1, size=20)
    again = from_rows(as_rows(sample))
    assert [(a.conversation, a.rank, a.cell, a.sketch.tolist()) for a in again] == [
        (a.conversation, a.rank, a.cell, a.sketch.tolist()) for a in sample
    ]
    write_day(tmp_path, START, sample)
    kept = read_days(tmp_path, since=START, erased=frozenset({"1-3"}))
    assert len(kept[START]) == 19
    assert "1-3" not in (tmp_path / "2027-01-01.json").read_text()
    assert read_days(tmp_path, since=START + DAY_S) == {}
    (tmp_path / "2027-01-01.json").write_text("[")
    with pytest.raises(SchemaError, match="not a day of the watch"):
        read_days(tmp_path, since=START)


def test_the_sample_is_of_the_lowest_ranks_and_a_rank_is_uniform():
    ranks = [rank_of(f"{i * 2**39:013x}0", 1.0) for i in range(1, 2**13, 128)]
    assert min(ranks) >= 0 and max(ranks) <= 1 and np.mean(ranks) == pytest.approx(0.5, abs=0.02)
    sample = day(5, size=50)
    assert [one.rank for one in lowest(sample, 10)] == sorted(one.rank for one in sample)[:10]
    assert len(lowest([*sample, *sample], 1000)) == 50
