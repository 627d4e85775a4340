import pytest

from pipeline.watch.promise import alarm_of, kept, promise_of
from pipeline.watch_config import WatchConfig
from tests.pipeline.measurements import rows_of
from tests.pipeline.watched import MIX, hours

CONFIG = WatchConfig(dimensions=("route", "language"))
SETTINGS = {"sampling": {"temperature": 0.0}, "max_tokens": 128, "concurrency": 8}


def promise(lengths):
    """Of a report whose challenger had these acceptance lengths by route."""
    rows = [row for route, length in lengths.items() for row in rows_of({"challenger": length}, route=route)]
    return promise_of("1", "abc", rows, "challenger", settings=SETTINGS)


def test_the_promise_is_the_gates_own_acceptance_length_by_slice():
    made = promise({"mail": 3.0, "code": 4.0})
    assert made.slices["route=mail"].acceptance_length == pytest.approx(3.0, abs=0.01)
    assert made.slices["route=code"].acceptance_length == pytest.approx(4.0, abs=0.01)
    assert made.slices["all"].acceptance_length == pytest.approx(3.5, abs=0.01)
    assert made.how == "greedy, at most 128 tokens, 8 requests at a time"


def test_flagged_requests_and_general_prompts_promise_nothing():
    rows = rows_of({"challenger": 3.0}, conversations=10)
    bad = [{**row, "flag": "loop", "num_accepted_tokens": 999, "row_id": f"bad-{i}"} for i, row in enumerate(rows[:3])]
    general = [{**row, "prompt_set": "general", "num_accepted_tokens": 999} for row in rows]
    made = promise_of("1", "abc", [*rows, *bad, *general], "challenger", settings={})
    assert made.slices["all"].num_requests == 10
    assert made.slices["all"].acceptance_length == pytest.approx(3.0, abs=0.02)


def test_live_traffic_that_comes_up_to_it_raises_nothing():
    # mail is served at 1 + (30 x 2.0 + 20 x 1.6) / 50 = 2.84 and code at 1 + (20 x 3.0 + 10 x 2.4) / 30 = 3.8.
    found = kept(CONFIG, promise({"mail": 2.84, "code": 3.8}), hours(24))
    assert found["route=mail"].live == pytest.approx(1.84, abs=0.01)
    assert alarm_of(promise({"mail": 2.84}), found, since=0, at=86400) is None


def test_a_slice_far_under_it_is_named_with_both_figures():
    made = promise({"mail": 2.84, "code": 5.5})
    alarm = alarm_of(made, kept(CONFIG, made, hours(24)), since=0, at=86400)
    assert alarm.kind == "promise" and alarm.retrains and "route=code" in alarm.slices
    assert "route=mail" not in alarm.slices
    assert "route=code 3.80 instead of 5.50" in alarm.message and "greedy" in alarm.message


def test_little_evidence_breaks_no_promise():
    made = promise({"mail": 2.84, "code": 4.1})  # under it by a tenth: not by more than that, shown
    assert alarm_of(made, kept(CONFIG, made, hours(24)), since=0, at=86400) is None
    few = promise_of("1", "abc", rows_of({"challenger": 9.0}, conversations=5), "challenger", settings={})
    assert kept(CONFIG, few, hours(24)) == {}


def test_other_things_that_are_asked_break_no_promise():
    made = promise({"mail": 2.84, "code": 3.8})  # all: 3.32 in equal parts
    more_mail = {cell: n * (20 if cell[0] == "mail" else 1) for cell, n in MIX.items()}
    found = kept(CONFIG, made, hours(24, mix=more_mail))
    # 1,000 mails at 1.84 and 30 of code at 2.8.
    assert found["all"].live == pytest.approx((1000 * 1.84 + 30 * 2.8) / 1030, abs=0.01)
    assert found["all"].live < 0.9 * made.slices["all"].accepted_per_step
    assert found["all"].promised == pytest.approx(found["all"].live, abs=0.01)
    assert alarm_of(made, found, since=0, at=86400) is None
    worse = kept(CONFIG, made, hours(24, mix=more_mail, factor=lambda cell: 0.8))
    assert set(alarm_of(made, worse, since=0, at=86400).slices) == {"all", "route=mail", "route=code"}


def test_of_traffic_that_the_gate_never_measured_nothing_was_promised():
    made = promise({"code": 9.0})
    found = kept(CONFIG, made, hours(24))
    assert alarm_of(made, found, since=0, at=86400).slices == ("route=code",)
