"""The soak's verdict, against hand counts and simulated traffic."""

import math
import random

import pytest

from serving.fleet.soak import Interval, SoakPolicy, is_due, judge

POLICY = SoakPolicy(min_steps=1000, min_s=60, max_s=480, min_ratio=0.95)


def even(n, canary, other, drafts=100):
    """n intervals that scatter a little around these accepted tokens a step."""
    wobble = (-2, 1, 0, 2, -1)
    return [
        Interval(drafts, canary * drafts + wobble[i % 5], drafts, other * drafts + wobble[(i + 2) % 5])
        for i in range(n)
    ]


def test_looks_come_after_the_minimum_and_each_time_that_has_doubled_and_at_the_limit():
    due = [(looks, s) for looks in range(5) for s in (59, 60, 119, 120, 240, 479, 480) if is_due(looks, s, POLICY)]
    first = {looks: min(s for k, s in due if k == looks) for looks in range(5)}
    assert first == {0: 60, 1: 120, 2: 240, 3: 480, 4: 480}


@pytest.mark.parametrize(("canary", "other", "outcome"), [(2, 2, "pass"), (3, 2, "pass"), (1, 2, "fail")])
def test_a_drafter_is_compared_with_the_other_replicas_over_the_same_time(canary, other, outcome):
    verdict = judge(even(20, canary, other), POLICY, looks=0, elapsed_s=60)
    assert verdict.outcome == outcome
    ratio = (1 + canary) / (1 + other)
    assert f"{ratio:.3f} of the other replicas'" in verdict.why


def test_too_few_steps_extend_the_soak_until_its_end_and_then_the_policy_decides():
    few = even(20, 2, 2, drafts=10)
    assert judge(few, POLICY, looks=0, elapsed_s=60).outcome == "extend"
    ended = judge(few, POLICY, looks=3, elapsed_s=480)
    assert (ended.outcome, "200 steps of 1000; undecided after 480 s" in ended.why) == ("fail", True)
    lenient = SoakPolicy(1000, 60, 480, 0.95, undecided="go_on")
    assert judge(few, lenient, looks=3, elapsed_s=480).outcome == "pass"


def test_where_the_others_count_nothing_the_gates_promise_is_what_is_compared_with():
    alone = [Interval(100, 200 + w, 0, 0) for w in (-2, 1, 0, 2, -1) * 4]
    assert judge(alone, POLICY, looks=0, elapsed_s=60).outcome == "extend"  # nothing to compare with
    kept = judge(alone, POLICY, looks=0, elapsed_s=60, promise=3.0)
    assert (kept.outcome, "1.000 of the 3.000 that the gate measured" in kept.why) == ("pass", True)
    assert judge(alone, POLICY, looks=0, elapsed_s=60, promise=3.5).outcome == "fail"


def test_scattered_traffic_is_not_judged_from_few_intervals():
    rng = random.Random(1)
    wild = [Interval(150, rng.choice((60, 600)), 150, rng.choice((60, 600))) for _ in range(9)]
    assert judge(wild, POLICY, looks=0, elapsed_s=60).outcome == "extend"


def test_a_drafter_that_is_just_too_bad_passes_no_more_often_than_the_error_rate_over_all_looks():
    rng = random.Random(7)
    passed = 0
    for _ in range(400):
        # The truth: acceptance lengths 2.85 and 3.00, a ratio of just min_ratio; replies scatter by half.
        intervals = [Interval(100, round(rng.gauss(185, 60)), 100, round(rng.gauss(200, 60))) for _ in range(48)]
        for looks, s in enumerate((60, 120, 240, 480)):
            if judge(intervals[: s // 10], POLICY, looks=looks, elapsed_s=s).outcome == "pass":
                passed += 1
                break
    assert passed / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
