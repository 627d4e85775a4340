import pytest

from bench.oracles.monitor_months import Month, Outcome, _outcome, run, three_shifts
from bench.oracles.simulated_month import START, Noise, Shift, month, real_replies
from pipeline.watch.alarms import Alarm
from pipeline.watch.hours import HOUR_S

CALM = Noise(common=0, route=0, day=0, rhythm=0, bursts=0, outage_h=0)


def length_of(hours, name="all"):
    sums = [hour.slices[name] for hour in hours]
    return sum(accepted for _, _, accepted in sums) / sum(drafts for _, drafts, _ in sums)


def test_a_shift_is_of_its_size_where_it_applies_and_leaves_what_came_before_as_it_was():
    plain = list(month(1, days=4, noise=CALM, conversations_a_day=20_000))
    shifted = list(month(1, days=4, noise=CALM, conversations_a_day=20_000, shifts=[Shift(48, 0.9, ("route", "code"))]))
    assert plain[:48] == shifted[:48]
    assert length_of(shifted[48:], "route=code") / length_of(plain[48:], "route=code") == pytest.approx(0.9, abs=0.005)
    assert length_of(shifted[48:], "route=search") == pytest.approx(length_of(plain[48:], "route=search"), rel=0.005)


def test_the_average_has_a_rhythm_though_nothing_changes_and_an_outage_has_no_hours():
    hours = list(month(2, days=7, conversations_a_day=20_000))
    assert len(hours) == 7 * 24 - Noise().outage_h
    by_hour = [length_of([h for h in hours if h.start // HOUR_S % 24 in range(a, a + 3)]) for a in (2, 14)]
    assert abs(by_hour[0] / by_hour[1] - 1) > 0.05


def test_replies_are_real_ones():
    drafts, ratio = real_replies()
    assert len(drafts) > 100 and (drafts * ratio).sum() == pytest.approx(drafts.sum())


def test_an_alarm_counts_for_the_shift_before_it_and_any_other_is_false():
    shifts = (Shift(100, 0.9), Shift(300, 0.9))
    alarms = [Alarm("accepted", START + hour * HOUR_S, 0, "") for hour in (90, 110, 340, 600)]
    rise = Alarm("accepted", START + 105 * HOUR_S, 0, "", falls=False)
    found = _outcome(Month(0, shifts), [*alarms, rise, Alarm("asked", START + 400 * HOUR_S, 0, "")])
    assert found.delays_h == (10, 40) and found.found == 1
    assert [(a.at - START) // HOUR_S for a in found.false] == [90, 600, 105]
    assert found.num_false == 4 and Outcome((None,), ()).found == 0


def test_the_named_month_is_judged_right():
    found = run(Month(0, three_shifts(0)))
    assert found.found == 3 and found.num_false <= 1
