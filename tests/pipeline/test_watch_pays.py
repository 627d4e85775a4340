import pytest

from pipeline.watch.alarms import Alarm
from pipeline.watch.pays import Load, at, judged, paid, points_of
from pipeline.watch_config import WatchConfig

CONFIG = WatchConfig()
# 1 request at a time: twice as fast at length 3, so 1.5 breaks even. 16: half as fast, so 6 would.
SPEED = [
    {"num_speculative_tokens": 0, "concurrency": 1, "tokens_per_s": 25.0},
    {"num_speculative_tokens": 0, "concurrency": 16, "tokens_per_s": 250.0},
    {"num_speculative_tokens": 7, "concurrency": 1, "tokens_per_s": 50.0, "acceptance_length": 3.0},
    {"num_speculative_tokens": 7, "concurrency": 16, "tokens_per_s": 125.0, "acceptance_length": 3.0},
    {"num_speculative_tokens": 3, "concurrency": 1, "tokens_per_s": 40.0, "acceptance_length": 2.0},
]
POINTS = points_of(SPEED, 7)


def load(running, length, *, tokens=30_000, hour=0, step_s=None):
    drafts = tokens / length
    return Load("r", hour * 3600, running, drafts, (length - 1) * drafts, tokens, step_s)


def test_the_break_even_length_is_where_both_are_equally_fast():
    assert [(one.concurrency, one.break_even) for one in POINTS] == [(1, 1.5), (16, 6.0)]
    assert [one.step_s for one in POINTS] == [3 / 50, 16 * 3 / 125]
    assert at(POINTS, 4.0).break_even == pytest.approx(3.0)  # halfway between 1 and 16, and 1.5 and 6, by ratio
    assert at(POINTS, 0.2) == POINTS[0] and at(POINTS, 99) == POINTS[1]


def test_points_that_were_not_measured_both_ways_are_none():
    assert points_of(SPEED, 3)[0].break_even == pytest.approx(2.0 * 25 / 40)
    assert points_of(SPEED, 5) == [] and points_of([], 7) == []


def test_at_one_request_it_pays_and_at_many_it_does_not():
    assert paid(POINTS, [load(1, 3.0)]).speedup == pytest.approx(2.0)
    found = paid(POINTS, [load(16, 3.0)])
    assert found.speedup == pytest.approx(0.5) and not found.beyond
    alarm = judged(CONFIG, found, firing=False, at=7200)
    assert isinstance(alarm, Alarm) and alarm.kind == "pays" and not alarm.retrains
    assert "16 requests at a time" in alarm.message and "6.00 would break even" in alarm.message


def test_a_drafter_that_accepts_less_stops_paying_at_the_same_load():
    assert judged(CONFIG, paid(POINTS, [load(4, 3.2)]), firing=False, at=0) is False
    assert isinstance(judged(CONFIG, paid(POINTS, [load(4, 2.8)]), firing=False, at=0), Alarm)


def test_hours_and_replicas_add_up_by_their_time():
    # Twice as fast for one half of the tokens, half as fast for the other: 2 / (1/2 + 2).
    assert paid(POINTS, [load(1, 3.0), load(16, 3.0)]).speedup == pytest.approx(2 / 2.5)


def test_what_wavers_around_nothing_raises_one_alarm():
    barely = paid(POINTS, [load(4, 3.03)])
    assert judged(CONFIG, barely, firing=False, at=0) is False
    assert judged(CONFIG, barely, firing=True, at=0) is True
    assert judged(CONFIG, paid(POINTS, [load(4, 3.2)]), firing=True, at=0) is False


def test_little_traffic_says_nothing_either_way():
    few = paid(POINTS, [load(16, 3.0, tokens=300)])
    assert judged(CONFIG, few, firing=False, at=0) is False and judged(CONFIG, few, firing=True, at=0) is True
    assert paid(POINTS, []) is None and paid(POINTS, [Load("r", 0, 0.0, 0, 0, 0)]) is None
    assert judged(CONFIG, None, firing=True, at=0) is True


def test_a_load_beyond_the_last_point_and_slow_steps_are_told():
    found = paid(POINTS, [load(40, 3.0, step_s=2 * 16 * 3 / 125)])
    assert found.beyond and found.slow == pytest.approx(2.0)
    message = judged(CONFIG, found, firing=False, at=0).message
    assert "measured no load as high" in message and "2.0 times what the gate measured" in message
