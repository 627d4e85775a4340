import json
from dataclasses import replace

import pytest

from pipeline.watch.accepted import Watching, advance
from pipeline.watch.hours import HOUR_S
from pipeline.watch_config import WatchConfig
from tests.pipeline.watched import MIX, START, hour, hours

CONFIG = WatchConfig(dimensions=("route", "language"))
WEEK = 7 * 24


def after(made, state=None):
    state = state or Watching()
    for number in range(1, len(made) + 1):
        state = advance(CONFIG, state, made[:number])
    return state


def shifted(routes, factor=0.9):
    return lambda cell: factor if cell[0] in routes else 1.0


def number_of(alarm):
    """The hour at whose end an alarm was raised, from the first one on."""
    return (alarm.at - START) // HOUR_S


@pytest.fixture(scope="module")
def learned():
    made = hours(WEEK + 30)
    return made, after(made)


def test_nothing_is_watched_before_the_learning_days_are_over():
    assert after(hours(WEEK - 1, factor=lambda cell: 0.3)).phase == "learning"
    assert after(hours(WEEK)).phase == "watching"


def test_a_fall_everywhere_is_one_alarm_within_hours_that_names_the_whole(learned):
    made, _ = learned
    state = after(made + hours(40, first=len(made), factor=shifted(("mail", "code"))))
    (alarm,) = state.alarms
    assert alarm.kind == "accepted" and alarm.falls and alarm.retrains
    assert len(made) < number_of(alarm) <= len(made) + 24
    assert abs((alarm.since - START) / HOUR_S - len(made)) <= 3
    assert alarm.changes["all"] == pytest.approx(-0.1, abs=0.01)
    assert "fell by 10% everywhere since about 2027-01-09" in alarm.message
    assert state.phase == "watching"


def test_a_fall_in_one_route_is_told_as_that_routes(learned):
    made, _ = learned
    state = after(made + hours(50, first=len(made), factor=shifted(("code",), 0.85)))
    (alarm,) = state.alarms
    assert max(alarm.changes, key=lambda name: -alarm.changes[name]) == "route=code"
    assert alarm.changes["route=code"] == pytest.approx(-0.15, abs=0.015)
    assert "route=mail" not in alarm.changes
    # The whole fell too, by about half as much: that is no fall everywhere.
    assert "fell by 15% in route=code since" in alarm.message


def test_what_is_asked_may_change_without_an_alarm(learned):
    made, _ = learned
    other = {cell: n * (4 if cell[0] == "code" else 1) for cell, n in MIX.items()}
    assert after(made + hours(10 * 24, first=len(made), mix=other)).alarms == ()


def test_a_second_fall_is_found_against_the_level_after_the_first(learned):
    made, _ = learned
    first = hours(4 * 24, first=len(made), factor=shifted(("mail", "code")))
    second = hours(3 * 24, first=len(made) + len(first), factor=shifted(("mail", "code"), 0.81))
    one, two = after(made + first + second).alarms
    assert number_of(two) - len(made) - len(first) <= 24
    assert two.changes["all"] == pytest.approx(-0.1, abs=0.01)
    assert one.over is None and two.over is None


def test_a_rise_is_told_asks_for_nothing_and_ends_the_alarm_of_the_fall(learned):
    made, _ = learned
    down = hours(3 * 24, first=len(made), factor=shifted(("mail", "code")))
    up = hours(3 * 24, first=len(made) + len(down))
    fall, rise = after(made + down + up).alarms
    assert fall.over == "acceptance rose again" and not fall.fires
    assert not rise.falls and not rise.retrains and "rose" in rise.message


def test_another_drafter_ends_alarms_and_its_own_level_is_no_shift(learned):
    made, _ = learned
    down = hours(3 * 24, first=len(made), factor=shifted(("mail", "code")))
    new = hours(4 * 24, first=len(made) + len(down), factor=shifted(("mail", "code"), 1.4), version="2")
    state = after(made + down + new)
    (alarm,) = state.alarms
    assert alarm.over == "drafter version 2 serves" and state.version == "2" and state.phase == "watching"
    later = hours(30, first=len(made) + len(down) + len(new), factor=shifted(("mail", "code"), 1.26), version="2")
    assert len(after(made + down + new + later).alarms) == 2


def test_hours_that_are_missing_are_no_shift(learned):
    made, _ = learned
    assert after(made + hours(10 * 24, first=len(made) + 30)).alarms == ()
    nights = [one for one in hours(10 * 24, first=len(made)) if one.start // HOUR_S % 24 > 6]
    assert after(made + nights).alarms == ()


def test_a_state_that_was_kept_goes_on_as_if_nothing_had_been(learned):
    made, _ = learned
    whole = made + hours(60, first=len(made), factor=shifted(("code",), 0.85))
    straight = after(whole)
    state = Watching()
    for number in range(1, len(whole) + 1):
        state = advance(CONFIG, state, whole[:number])
        if number % 11 == 0:
            state = Watching.from_dict(json.loads(json.dumps(state.as_dict())))
            state = advance(CONFIG, state, whole[:number])  # the same hour again changes nothing
    assert state.as_dict() == straight.as_dict()


def test_a_slow_fall_is_left_to_the_gates_promise_and_a_small_one_is_tolerated(learned):
    made, _ = learned
    small = hours(10 * 24, first=len(made), factor=shifted(("mail", "code"), 0.99))
    assert after(made + small).alarms == ()


def test_settings_that_leave_nothing_to_find_are_refused():
    with pytest.raises(ValueError, match="more than half of shift"):
        WatchConfig(shift=0.03, tolerance=0.02)
    with pytest.raises(ValueError, match="learn_days <= reference_days"):
        WatchConfig(reference_days=3)


def test_an_alarm_that_was_taken_on_fires_no_more(learned):
    made, _ = learned
    (alarm,) = after(made + hours(40, first=len(made), factor=shifted(("mail", "code")))).alarms
    assert alarm.fires and not replace(alarm, taken="2027-01-10 00:00").fires
    assert alarm.id == "accepted-" + alarm.id[9:] and len(alarm.id) == len("accepted-20270109T12")


def test_one_hour_alone_never_alarms(learned):
    made, _ = learned
    odd = [hour(len(made), factor=lambda cell: 0.05)]
    assert after(made + odd + hours(24, first=len(made) + 1)).alarms == ()
