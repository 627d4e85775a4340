"""Counts of replies and the lengths derived from them, against counts made by hand."""

import json
import math

import pytest

from pipeline import acceptance
from pipeline.acceptance import count_reply, total


def metrics(per_step, *, num_draft_tokens):
    """What vLLM sends for these accepted counts, step by step."""
    return {
        "num_spec_steps": len(per_step),
        "num_accepted_draft_tokens": sum(per_step),
        "acceptance_histogram": [per_step.count(j) for j in range(num_draft_tokens + 1)],
        "per_step_accepted": list(per_step),
        "per_step_drafted": [num_draft_tokens] * len(per_step),
    }


def row(counted, *, role="champion", row_id="r", slice="mail", weight=1):
    slices = json.dumps({"route": slice, "language": "en"})
    found = {"role": role, "row_id": row_id, "conversation": row_id, "slices": slices, "weight": weight}
    return {**found, **counted.__dict__}


def test_a_reply_is_counted_as_it_was_drafted():
    # Prefill 1 token; steps accept 2, 0, 3 → 3 + 1 + 4 tokens: 9 in all, nothing trimmed.
    counted = count_reply(metrics([2, 0, 3], num_draft_tokens=3), range(9))
    assert counted.num_tokens == 9
    assert counted.num_drafts == 3
    assert counted.num_accepted_tokens == 5
    assert counted.accepted_per_pos == (2, 2, 1)
    assert counted.flag is None


def test_case_11_drafts_after_the_end_of_turn_are_not_emitted():
    # Ten replies: one prefill token, then a step with 4 accepted drafts of which the 2nd ends the turn.
    rows = [row(count_reply(metrics([4], num_draft_tokens=4), [5, 6, 2]), row_id=str(i)) for i in range(10)]
    assert all(r["flag"] is None for r in rows)
    assert total(rows).acceptance_length == 5.0
    assert total(rows).emitted_tokens_per_step == 2.0


@pytest.mark.parametrize(
    ("per_step", "num_tokens", "flag"),
    [
        ([3, 3], 9, None),  # 8 from the steps, 1 from the prefill
        ([3, 3], 6, None),  # three trimmed: the block's last three drafts
        ([3, 3], 5, "overcount"),  # four trimmed, a step drafts three
        ([3, 3], 10, "undercount"),  # a token came from no counted step
        ([], 1, "no_step"),
    ],
)
def test_a_length_that_the_steps_cannot_give_is_flagged(per_step, num_tokens, flag):
    assert count_reply(metrics(per_step, num_draft_tokens=3), range(num_tokens)).flag == flag


@pytest.mark.parametrize(("num_tokens", "emitted"), [(9, 6), (8, 6), (7, 5), (6, 4)])
def test_accepted_drafts_past_the_end_did_not_reach_the_client(num_tokens, emitted):
    # Two steps of 3 accepted drafts and one more token each: the last token to go is the target's own.
    counted = count_reply(metrics([3, 3], num_draft_tokens=3), range(num_tokens))
    assert total([row(counted)]).num_accepted_tokens == 6
    assert total([row(counted)]).num_accepted_and_emitted == emitted


def test_counts_that_contradict_each_other_are_flagged():
    wrong = metrics([1, 2], num_draft_tokens=3) | {"num_accepted_draft_tokens": 4}
    assert count_reply(wrong, range(6)).flag == "counts_disagree"
    short = metrics([1, 2], num_draft_tokens=3) | {"per_step_accepted": [3]}
    assert count_reply(short, range(6)).flag == "counts_disagree"


def test_a_reply_without_metrics_is_flagged_and_keeps_its_length():
    assert count_reply(None, range(7)).flag == "no_metrics"
    assert count_reply(None, range(7)).num_tokens == 7


def test_case_72_loops_are_flagged_and_do_not_lift_the_acceptance():
    good = count_reply(metrics([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1], num_draft_tokens=3), range(19))
    loop = count_reply(metrics([3] * 10, num_draft_tokens=3), [9] * 41)
    rows = [row(good, row_id=str(i)) for i in range(2)] + [row(loop, row_id=str(i)) for i in range(2, 5)]
    assert acceptance.flagged(rows) == {"loop": 3}
    assert total(acceptance.unflagged_everywhere(rows)).acceptance_length == 1.5


@pytest.mark.parametrize(
    ("token_ids", "loop"),
    [
        ([7] * 40, True),
        ([1, 2, 3] * 12, True),
        (list(range(60)) + [5, 6, 7, 8] * 30, True),  # a good start that ends in a loop
        (list(range(40)), False),
        (list(range(30)) + list(range(30)), False),  # a passage said twice
        ([7] * 10, False),  # too short to tell
    ],
)
def test_a_loop_repeats_most_of_its_own_ngrams(token_ids, loop):
    assert acceptance.is_loop(token_ids) is loop


def test_every_reply_counts_where_any_share_of_repeats_is_allowed():
    assert not acceptance.is_loop([7] * 100, max_repeat_share=1.0)


def test_lengths_are_ratios_of_sums_and_not_averages_of_averages():
    long = count_reply(metrics([0] * 90, num_draft_tokens=2), range(91))
    short = count_reply(metrics([2] * 10, num_draft_tokens=2), range(31))
    both = total([row(long), row(short)])
    assert both.acceptance_length == 1 + 20 / 100  # the average of 1.0 and 3.0 would be 2.0
    assert both.emitted_tokens_per_step == 120 / 100
    assert both.num_accepted_tokens_per_pos == (10, 10)


def test_a_request_flagged_for_one_role_is_left_out_for_all():
    rows = [
        {"row_id": "a", "role": "champion", "flag": None},
        {"row_id": "a", "role": "challenger", "flag": "loop"},
        {"row_id": "b", "role": "champion", "flag": None},
        {"row_id": "b", "role": "challenger", "flag": None},
    ]
    assert [r["row_id"] for r in acceptance.unflagged_everywhere(rows)] == ["b", "b"]


def test_slices_are_summed_apart():
    fast = count_reply(metrics([2, 2], num_draft_tokens=2), range(7))
    slow = count_reply(metrics([0, 1], num_draft_tokens=2), range(4))
    slices = acceptance.by_slice([row(fast, slice="mail"), row(slow, slice="code"), row(slow, slice="code")])
    assert slices["route=mail"].acceptance_length == 3.0
    assert slices["route=code"].acceptance_length == 1.5
    assert slices["route=code"].num_requests == 2
    assert slices["language=en"].num_requests == 3


def test_the_target_alone_emits_a_token_a_step_and_its_loops_are_flagged():
    counted = acceptance.count_plain(list(range(9)))
    assert (counted.num_tokens, counted.num_drafts, counted.num_accepted_tokens, counted.flag) == (9, 8, 0, None)
    assert acceptance.count_plain([5] * 40).flag == acceptance.LOOP
    assert acceptance.count_plain([5]).flag == acceptance.NO_STEP


def test_the_traffics_lengths_are_ratios_of_weighted_sums():
    fast = acceptance.RequestAcceptance(11, 5, 5, (5,))
    slow = acceptance.RequestAcceptance(11, 10, 0, (0,))
    found = acceptance.traffic([row(fast, weight=9), row(slow, weight=1)])
    assert found["num_requests"] == 10
    assert found["emitted_tokens_per_step"] == 100 / (9 * 5 + 10)
    assert found["served_acceptance_length"] == 1 + 45 / 55


def test_no_draft_gives_no_length():
    assert math.isnan(acceptance.acceptance_length(0, 0))
    assert math.isnan(acceptance.emitted_tokens_per_step(5, 0, 5))
    assert total([]).as_dict()["emitted_tokens_per_step"] is None


def test_case_92_a_token_equal_to_the_mask_is_a_token_like_any_other():
    mask = 120
    counted = count_reply(metrics([1, 1], num_draft_tokens=3), [7, mask, 8, mask, 9])
    assert (counted.num_tokens, counted.num_drafts, counted.flag) == (5, 2, None)
