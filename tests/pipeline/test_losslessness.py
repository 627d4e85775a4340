"""Answers that speculation changes: never in float32, no more than chance in half precision."""

import pytest
from measurements import BETTER, FAST, failed, measured_of, reason, rows_of

from pipeline.artifacts import SpeedReport
from pipeline.decide import decide, settled

ROWS = rows_of(BETTER)


def decided(lossless, dtype):
    points = [{"concurrency": 8, "num_speculative_tokens": k, "tokens_per_s": 100.0 + k} for k in (0, 4)]
    report = SpeedReport(derivation_id="s", parents={}, points=points, lossless=lossless | {"dtype": dtype})
    return decide(FAST, ROWS, measured_of(ROWS), speed=report)


def test_case_72_one_different_reply_in_float32_is_a_hard_fail():
    verdict = decided({"num_prompts": 16, "num_different": 1}, "float32")
    assert (verdict.decision, failed(verdict)) == ("reject", ["lossless"])
    assert "1 of 16 replies differ" in reason(verdict, "lossless").message
    assert decided({"num_prompts": 16, "num_different": 0}, "float32").decision == "promote"


@pytest.mark.parametrize(
    ("different", "plain", "decision"), [(5, 4, "promote"), (16, 16, "promote"), (12, 2, "reject"), (4, 0, "promote")]
)
def test_in_half_precision_differences_may_be_as_frequent_as_between_two_plain_runs(different, plain, decision):
    # 4 of 16 against 0 of 16: one-sided p = 0.0506 by hand (12! · 16! …), just not shown.
    found = {"num_prompts": 16, "num_different": different, "num_different_plain": plain}
    assert decided(found, "bfloat16").decision == decision


def test_what_was_not_compared_is_shown_and_not_required():
    assert reason(decided({}, "bfloat16"), "lossless").passed is None
    assert reason(decided({"num_prompts": 16, "num_different": 3}, "bfloat16"), "lossless").passed is None


def test_the_worst_of_several_numbers_of_speculated_tokens_is_expected_to_be_bad():
    found = {"num_prompts": 16, "num_different": 6, "num_different_plain": 1}
    assert decided(found, "bfloat16").decision == "reject"  # p = 0.04 for one number
    found["num_different_by_speculated"] = {"2": 1, "4": 6, "7": 3}
    assert decided(found, "bfloat16").decision == "promote"


def test_where_the_policy_asks_for_losslessness_nothing_is_promoted_uncompared():
    strict = FAST.model_copy(update={"require_losslessness": True})
    for speed in (None, SpeedReport(derivation_id="s", parents={})):
        verdict = decide(strict, ROWS, measured_of(ROWS), speed=speed)
        assert "lossless" in failed(verdict) and verdict.decision == "hold"
        assert "slipstream speed" in reason(verdict, "lossless").message
    assert reason(decide(FAST, ROWS, measured_of(ROWS)), "lossless").passed is None
    assert settled(strict, ROWS, measured_of(ROWS), fractions=(0.5,)) == "promote"  # the end asks for it


def test_replies_that_are_equal_where_they_can_be_exact_are_a_comparison():
    strict, exact = FAST.model_copy(update={"require_losslessness": True}), measured_of(ROWS)
    for one in exact.values():
        one["settings"] = {"dtype": "float32", "concurrency": 1}
    assert decide(strict, ROWS, exact).decision == "promote"
    exact["challenger"]["num_replies_different"] = 1
    assert failed(decide(strict, ROWS, exact)) == ["replies", "lossless"]
