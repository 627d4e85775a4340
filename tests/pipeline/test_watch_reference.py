import json

import numpy as np
import pytest

from pipeline.watch.learning import learn, relevel
from pipeline.watch.reference import Reference, compare, features, lay, step
from pipeline.watch_config import WatchConfig
from tests.pipeline.watched import MIX, START, hour, hours

CONFIG = WatchConfig(dimensions=("route", "language"))
WEEK = 7 * 24


@pytest.fixture(scope="module")
def reference():
    return learn(CONFIG, hours(WEEK))


def against(reference, some):
    return compare(reference, lay(reference.cells, reference.slices, some))


def at(reference, name):
    return reference.slices.index(name)


def test_slices_are_the_whole_and_every_value_and_a_dimension_of_one_value_says_nothing(reference):
    assert set(reference.slices) == {"all", "route=mail", "route=code", "language=en", "language=de"}
    one_language = {cell: n for cell, n in MIX.items() if cell[1] == "en"}
    assert set(learn(CONFIG, hours(WEEK, mix=one_language)).slices) == {"all", "route=mail", "route=code"}


def test_what_is_expected_follows_the_mix(reference):
    # Four times the code at the same rates: the plain average rises by a seventh, and nothing has changed.
    other = {cell: n * (4 if cell[0] == "code" else 1) for cell, n in MIX.items()}
    usual, moved = hour(WEEK), hour(WEEK, mix=other)
    (_, drafts, accepted), (_, drafts_2, accepted_2) = usual.slices["all"], moved.slices["all"]
    assert accepted_2 / drafts_2 > 1.13 * accepted / drafts
    assert np.abs(against(reference, [moved]).change).max() < 0.01


def test_a_fall_in_one_route_shows_there_in_its_size_and_elsewhere_as_its_share(reference):
    change = against(reference, [hour(WEEK, factor=lambda cell: 0.8 if cell[0] == "code" else 1.0)]).change[0]
    assert change[at(reference, "route=code")] == pytest.approx(-0.2, abs=0.005)
    assert change[at(reference, "route=mail")] == pytest.approx(0.0, abs=0.005)
    # Accepted drafts of an hour: mail 30 x 2.0 + 20 x 1.6 = 92, code 20 x 3.0 + 10 x 2.4 = 84, times the drafts.
    assert change[at(reference, "all")] == pytest.approx(-0.2 * 84 / 176, abs=0.005)


def test_a_rhythm_of_day_and_weekend_is_learned_and_is_no_change():
    def of(number):
        day = 0.06 * np.sin(2 * np.pi * (number % 24) / 24)
        weekend = -0.05 if (number // 24 + 4) % 7 >= 5 else 0.0  # the first day is a Friday
        return 1 + day + weekend

    made = [hour(number, factor=dict.fromkeys(MIX, of(number)).get) for number in range(3 * WEEK)]
    learned = learn(CONFIG, made[: 2 * WEEK])
    rest = against(learned, made[2 * WEEK :]).change
    assert np.abs(rest).max() < 0.015
    flat = against(learn(CONFIG, hours(2 * WEEK)), made[2 * WEEK :]).change
    assert np.abs(flat).max() > 0.08


def test_a_subject_with_thousands_of_requests_counts_as_one(reference):
    rows = hour(WEEK)
    burst = hour(WEEK, mix={**MIX, ("mail", "en"): 31})
    # The 31st conversation of mail in English is 500 requests that accept 40% less.
    from pipeline.watch.hours import hour_of

    made = {(f"{i}-{cell}", cell): [1, 20, 20 * {"mail": 2.0, "code": 3.0}[cell[0]]] for cell in MIX for i in range(20)}
    made["burst", ("mail", "en")] = [500, 10_000, 10_000 * 1.2]
    one = against(reference, [hour_of(rows.start, "1", ("route", "language"), made)])
    usual = against(reference, [burst])
    i = at(reference, "route=mail")
    assert one.error[0, i] > 4 * usual.error[0, i]
    assert abs(one.change[0, i]) < 3 * one.error[0, i]


def test_what_an_hour_says_is_bounded_whatever_it_holds(reference):
    nothing = against(reference, [hour(WEEK, factor=lambda cell: 0.0)])
    everything = against(reference, [hour(WEEK, factor=lambda cell: 5.0)])
    for direction, one in ((-1, nothing), (1, everything)):
        added = step(CONFIG, reference, one, direction=direction)[0]
        assert 0 < added.max() <= 4.0  # J = 2 and three standard deviations: 2 x (3 - 1)
        assert reference.threshold.min() > 2 * added.max()


def test_cells_that_nobody_knows_are_left_out_on_both_sides(reference):
    from tests.pipeline import watched

    cell = ("new", "fr")
    watched.RATES[cell] = 0.2
    try:
        made = hour(WEEK, mix={**MIX, cell: 40})
    finally:
        del watched.RATES[cell]
    compared = against(reference, [made])
    assert np.abs(compared.change[0]).max() < 0.005
    only_new = {("new", "fr"): 40}
    watched.RATES[cell] = 0.2
    try:
        assert np.isnan(against(reference, [hour(WEEK, mix=only_new)]).change).all()
    finally:
        del watched.RATES[cell]


def test_levels_of_later_hours_are_found_slice_by_slice(reference):
    again, moved, error = relevel(
        CONFIG, reference, hours(24, first=WEEK, factor=lambda cell: 0.9 if cell[0] == "mail" else 1.0)
    )
    assert moved[at(reference, "route=mail")] == pytest.approx(-0.1, abs=0.01)
    assert abs(moved[at(reference, "route=code")]) < 0.01
    assert error.max() < 0.05
    after = hours(3, first=WEEK + 24, factor=lambda cell: 0.9 if cell[0] == "mail" else 1.0)
    assert np.abs(against(again, after).change).max() < 0.02


def test_a_reference_comes_back_from_json_as_it_was(reference):
    again = Reference.from_dict(json.loads(json.dumps(reference.as_dict())))
    some = [hour(WEEK), hour(WEEK + 1, factor=lambda cell: 0.9)]
    for name in ("change", "error", "lasting", "expected"):
        assert (getattr(against(again, some), name) == getattr(against(reference, some), name)).all()
    assert (again.threshold == reference.threshold).all() and again.slices == reference.slices


def test_more_traffic_finds_a_shift_sooner_and_a_tiny_slice_is_not_watched():
    few = learn(CONFIG, hours(WEEK, mix={cell: max(n // 10, 1) for cell, n in MIX.items()}))
    many = learn(CONFIG, hours(WEEK, mix={cell: 4 * n for cell, n in MIX.items()}))
    assert few.days_to_find()[0] > many.days_to_find()[0]
    assert many.watched.all()
    tiny = learn(CONFIG, hours(WEEK, mix={**{cell: 50 * n for cell, n in MIX.items()}, ("code", "de"): 1}, spread=0.9))
    assert tiny.watched[at(tiny, "all")]


def test_the_weekend_is_saturday_and_sunday_in_utc():
    days = features(np.array([START + day * 86400 for day in range(7)]))[:, 5]
    assert days.tolist() == [0, 1, 1, 0, 0, 0, 0]  # from a Friday on
