"""The verdict on measurements made up so that the right one is known beforehand."""

import json

import pytest
from measurements import BETTER, FAST, SETTINGS, failed, measured_of, reason, rows_of, sittings_of

from pipeline.decide import decide, settled
from pipeline.errors import FingerprintError
from pipeline.verdict import as_json


def test_a_better_challenger_is_promoted_and_the_lift_is_the_ratio():
    rows = rows_of(BETTER, conversations=42)
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "promote"
    assert failed(verdict) == []
    assert verdict.lift.ratio == pytest.approx(1.3)
    assert 1.28 < verdict.lift.low < 1.3 < verdict.lift.high < 1.32
    assert verdict.comparisons["control/champion"].ratio == pytest.approx(1.1)
    assert verdict.comparisons["challenger/control"].ratio == pytest.approx(2.6 / 2.2)


def test_no_control_is_needed():
    rows = rows_of({"champion": 2.0, "challenger": 2.6})
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "promote"
    assert list(verdict.comparisons) == ["challenger/champion"]


def test_a_worse_challenger_is_rejected():
    rows = rows_of({"champion": 2.0, "challenger": 1.9})
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "reject"
    assert "lift" in failed(verdict)


def scattered(conversations, *, up=2.9, down=1.2):
    """Half of the conversations gain, half lose."""
    rows = rows_of({"champion": 2.0, "challenger": up}, conversations=conversations // 2)
    lost = rows_of({"champion": 2.0, "challenger": down}, conversations=conversations // 2)
    for row in lost:
        row["row_id"] = row["conversation"] = row["row_id"] + "-b"
    return rows + lost


def test_a_lift_that_chance_can_explain_is_no_verdict_and_more_data_is_named():
    rows = scattered(40)
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.lift.low < 1 < verdict.lift.ratio < verdict.lift.high
    assert verdict.decision == "cannot_say"
    needed = verdict.evidence.needed_clusters
    assert needed > 40
    message = reason(verdict, "lift").message
    assert f"Not enough evidence: 40 of about {needed} conversations; about {needed - 40} more prompts" in message


def test_a_lift_that_enough_data_does_not_show_is_held():
    rows = scattered(200, up=2.11, down=1.9)
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.lift.low < 1 < verdict.lift.high
    assert verdict.evidence.is_enough
    assert (verdict.decision, failed(verdict)) == ("hold", ["lift"])
    assert "Measured well enough" in reason(verdict, "lift").message


def test_a_configured_lift_has_to_be_reached():
    rows = rows_of(BETTER)
    verdict = decide(FAST.model_copy(update={"min_lift": 1.5}), rows, measured_of(rows))
    assert verdict.decision == "reject"
    assert reason(verdict, "lift").limit == 1.5


def test_too_few_conversations_cannot_say_and_tells_how_many_more():
    rows = rows_of(BETTER, conversations=12)
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert "about 18 more" in reason(verdict, "clusters").message


def test_case_69_a_slice_that_loses_blocks_a_lift_of_the_whole():
    # 60% of the traffic in language A gains 0.5 tokens a step, 40% in language B loses 0.4.
    rows = rows_of({"champion": 2.0, "challenger": 2.5}, conversations=60, route="A")
    rows += rows_of({"champion": 2.0, "challenger": 1.6}, conversations=40, route="B")
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.lift.low > 1
    assert verdict.decision == "reject"
    assert failed(verdict) == ["slice:route=B"]
    blocked = reason(verdict, "slice:route=B")
    assert blocked.value == pytest.approx(0.8, abs=0.01)
    for said in ("route=B", "0.799 ×", "40 conversations", "40% of the traffic", "under 0.9"):
        assert said in blocked.message
    assert reason(verdict, "slice:route=A").passed


def test_a_slice_that_chance_can_explain_blocks_nothing():
    rows = rows_of(BETTER, conversations=60, route="A")
    rows += rows_of({"champion": 2.0, "challenger": 1.6, "control": 2.0}, conversations=6, route="B")
    for row in rows:
        if row["role"] == "challenger" and row["conversation"] in ("B-0", "B-3"):
            row["num_tokens"] += 15
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.slices["route=B"].low < 0.9
    assert reason(verdict, "slice:route=B").passed
    assert verdict.decision == "promote"


def test_a_slice_of_a_few_conversations_is_shown_and_blocks_nothing():
    rows = rows_of(BETTER) + rows_of({"champion": 2.0, "challenger": 1.2, "control": 2.0}, conversations=2, route="B")
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "promote"
    assert reason(verdict, "slice:route=B").passed is None


def test_case_71_acceptance_that_costs_tokens_per_second_is_refused():
    # 10% longer and 8% slower at the production concurrency, with the policy as it ships.
    rows = rows_of({"champion": 2.0, "challenger": 2.2})
    slower = {"tokens_per_s": 92.0, "sittings": sittings_of(92.0)}
    verdict = decide(FAST, rows, measured_of(rows, challenger=slower))
    assert verdict.lift.low > 1
    assert (verdict.decision, failed(verdict)) == ("reject", ["speed"])
    assert verdict.speed.ratio == pytest.approx(0.92)
    for said in ("92.0 tokens/s against 100.0", "concurrency 8", "6 sittings", "shown slower"):
        assert said in reason(verdict, "speed").message


@pytest.mark.parametrize(
    ("walk", "decision"), [(0.96, "promote"), (1.04, "promote"), (0.9, "cannot_say"), (1.1, "cannot_say")]
)
def test_walk_and_serving_have_to_agree(walk, decision):
    rows = rows_of(BETTER)
    verdict = decide(FAST, rows, measured_of(rows, walk=walk))
    assert verdict.decision == decision
    if decision == "cannot_say":
        message = reason(verdict, "walk:challenger").message
        assert message.startswith("training and serving disagree")
        assert "position 1" in message


def test_the_walk_is_compared_in_accepted_drafts_and_not_in_lengths():
    # 0.10 against 0.11 accepted: 10% apart, though the lengths 1.10 and 1.11 are within 1%.
    rows = rows_of({"champion": 1.05, "challenger": 1.1}, steps=100)
    verdict = decide(FAST, rows, measured_of(rows, walk=1.1))
    assert "walk:challenger" in failed(verdict)


def test_a_challenger_without_a_walk_is_held_and_a_champion_without_one_is_not():
    rows = rows_of(BETTER)
    assert decide(FAST, rows, measured_of(rows, champion={"walk": None})).decision == "promote"
    measured = measured_of(rows, challenger={"walk": None})
    assert decide(FAST, rows, measured).decision == "hold"
    assert decide(FAST.model_copy(update={"require_walk": False}), rows, measured).decision == "promote"


def test_case_9_measurements_with_other_settings_are_refused_with_both_values():
    rows = rows_of(BETTER)
    measured = measured_of(rows, challenger={"settings": {**SETTINGS, "template_args": {"enable_thinking": False}}})
    measured["champion"]["settings"] = {**SETTINGS, "template_args": {"enable_thinking": True}}
    with pytest.raises(FingerprintError, match=r"template_args.*True.*!=.*False"):
        decide(FAST, rows, measured)


def test_case_74_an_incumbent_far_below_its_record_makes_the_environment_suspect():
    rows = rows_of({"champion": 1.2, "challenger": 1.6})
    verdict = decide(FAST, rows, measured_of(rows, champion={"recorded_acceptance_length": 3.0}))
    assert verdict.decision == "cannot_say"
    assert "environment suspect" in reason(verdict, "environment").message
    near = decide(FAST, rows, measured_of(rows, champion={"recorded_acceptance_length": 1.25}))
    assert near.decision == "promote"


def test_case_74_a_server_on_which_nothing_is_accepted_gives_no_verdict():
    rows = [row | {"num_tokens": 21} for row in rows_of({"champion": 1.0, "challenger": 1.0})]
    rows = [row | {"num_accepted_tokens": 0} for row in rows]
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert reason(verdict, "accepted_anything").passed is False


def test_replies_without_a_step_give_no_number_and_no_verdict():
    rows = [row | {"num_drafts": 0, "num_accepted_tokens": 0} for row in rows_of(BETTER)]
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    json.dumps(as_json(verdict), allow_nan=False)
    assert as_json(verdict)["lift"] is None


def test_many_flagged_replies_cannot_say():
    rows = rows_of(BETTER, conversations=50)
    for row in rows[: 15 * 3]:
        row["flag"] = "loop"
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert reason(verdict, "flagged").value == pytest.approx(0.3)


def test_different_replies_fail_only_where_they_can_be_equal():
    rows = rows_of(BETTER)
    measured = measured_of(rows, challenger={"num_replies_different": 3})
    assert decide(FAST, rows, measured).decision == "promote"
    for one in measured.values():
        one["settings"] = {"dtype": "float32", "concurrency": 1}
    verdict = decide(FAST, rows, measured)
    assert (verdict.decision, failed(verdict)) == ("reject", ["replies"])


def test_no_verdict_is_stronger_than_a_rejection_and_that_than_a_hold():
    rows = rows_of({"champion": 2.0, "challenger": 1.5}, conversations=10)
    assert decide(FAST, rows, measured_of(rows, walk=2.0)).decision == "cannot_say"
    rows = rows_of({"champion": 2.0, "challenger": 1.5})
    measured = measured_of(rows, challenger={"walk": None})
    assert decide(FAST, rows, measured).decision == "reject"


def test_a_prompt_that_was_served_nine_times_counts_nine_times():
    rows = rows_of({"champion": 2.0, "challenger": 2.5}, conversations=30, route="rare")
    rows += rows_of({"champion": 2.0, "challenger": 1.5}, conversations=30, route="often", weight=9)
    verdict = decide(FAST, rows, measured_of(rows))
    # Per 20 steps of every reply: (50 + 9 * 30) against (40 + 9 * 40).
    assert verdict.lift.ratio == pytest.approx(320 / 400, abs=0.001)
    assert "90% of the traffic" in reason(verdict, "slice:route=often").message


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("name", ["num_tokens", "num_drafts", "num_accepted_tokens", "weight"])
def test_a_count_that_is_no_number_gives_no_verdict_and_is_named(name, wrong):
    rows = rows_of(BETTER)
    measured = measured_of(rows)
    rows[4][name] = wrong
    verdict = decide(FAST, rows, measured)
    assert verdict.decision == "cannot_say"
    assert name in reason(verdict, "numbers").message
    json.dumps(as_json(verdict), allow_nan=False)


def test_a_figure_that_is_no_number_gives_no_verdict_and_is_named():
    rows = rows_of(BETTER)
    for name in ("tokens_per_s", "served_acceptance_length", "recorded_acceptance_length"):
        verdict = decide(FAST, rows, measured_of(rows, champion={name: float("nan")}))
        assert verdict.decision == "cannot_say"
        assert f"champion.{name}" in reason(verdict, "numbers").message
    broken = sittings_of(100.0)
    broken[2]["itl_p99_s"] = float("inf")
    verdict = decide(FAST, rows, measured_of(rows, challenger={"sittings": broken}))
    assert "challenger.sittings[2].itl_p99_s" in reason(verdict, "numbers").message


def test_a_request_that_one_drafter_did_not_answer_gives_no_verdict():
    rows = rows_of(BETTER)
    assert rows.pop()["role"] == "control"
    verdict = decide(FAST, rows, measured_of(rows))
    assert (verdict.decision, failed(verdict)) == ("cannot_say", ["paired"])


def test_case_72_a_gate_set_of_loops_gives_no_verdict():
    rows = rows_of(BETTER, conversations=50)
    for row in rows[: 30 * 3]:
        row["flag"] = "loop"
    verdict = decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert "60% of requests left out (loop 30)" in reason(verdict, "flagged").message


def test_general_prompts_may_not_lose_what_the_traffic_gains():
    rows = rows_of(BETTER)
    narrow = rows_of({"champion": 2.0, "challenger": 1.6, "control": 2.0}, prompt_set="general", route="general")
    verdict = decide(FAST, rows + narrow, measured_of(rows + narrow))
    assert (verdict.decision, failed(verdict)) == ("reject", ["general"])
    assert verdict.general.ratio == pytest.approx(0.8, abs=0.01)
    assert verdict.lift.ratio == pytest.approx(1.3, abs=0.01)  # general prompts are no part of it
    broad = rows_of({"champion": 2.0, "challenger": 1.95, "control": 2.0}, prompt_set="general", route="general")
    assert decide(FAST, rows + broad, measured_of(rows + broad)).decision == "promote"
    assert "not measured" in reason(decide(FAST, rows, measured_of(rows)), "general").message


def test_the_requests_that_moved_most_are_named_by_id_alone():
    rows = rows_of({"champion": 2.0, "challenger": 2.6})
    for row in rows:
        if (row["row_id"], row["role"]) in (("mail-7", "challenger"), ("mail-9", "champion")):
            row["num_tokens"] += 30
    verdict = decide(FAST, rows, measured_of(rows))
    first = verdict.gained[0]
    assert (first["row_id"], first["slices"]) == ("mail-7", ["route=mail"])
    assert (first["champion"], first["challenger"]) == (2.0, pytest.approx(82 / 20))
    assert [one["row_id"] for one in verdict.lost] == ["mail-9"]


def test_every_figure_of_the_verdict_is_plain_json():
    rows = rows_of(BETTER)
    body = json.loads(json.dumps(as_json(decide(FAST, rows, measured_of(rows))), allow_nan=False))
    assert body["level"] == FAST.error_rate and body["looks"] == [1.0]
    assert body["evidence"]["num_clusters"] == 40
    lift = next(one for one in body["reasons"] if one["code"] == "lift")
    assert lift["low"] < lift["value"] < lift["high"] and lift["n"] == 40 and lift["limit"] == 1.0


def test_a_look_settles_a_clear_win_and_a_clear_loss_and_leaves_the_rest_open():
    for length, settles in ((2.6, "promote"), (1.5, "reject"), (2.0, None)):
        rows = rows_of({"champion": 2.0, "challenger": length})
        assert settled(FAST, rows, measured_of(rows), fractions=(0.25, 0.5)) == settles


def test_a_look_is_harder_to_pass_than_the_end():
    rows = rows_of({"champion": 2.0, "challenger": 2.04}, conversations=120)
    for i, row in enumerate(rows):
        row["num_tokens"] += (i % 7 - 3) * (row["role"] == "challenger")
    at_the_end, early = (decide(FAST, rows, measured_of(rows), fractions=f) for f in ((1.0,), (0.2,)))
    assert early.level < at_the_end.level == FAST.error_rate
    assert early.lift.low < at_the_end.lift.low
    assert early.lift.ratio == at_the_end.lift.ratio


def test_a_look_at_too_few_conversations_settles_nothing():
    rows = rows_of({"champion": 2.0, "challenger": 2.6}, conversations=20)
    assert settled(FAST, rows, measured_of(rows), fractions=(0.5,)) is None
    rows = rows_of({"champion": 2.0, "challenger": 1.2}, conversations=20)
    assert settled(FAST, rows, measured_of(rows), fractions=(0.5,)) is None


def test_a_look_waits_where_a_slice_is_under_its_floor_though_unproved():
    rows = rows_of({"champion": 2.0, "challenger": 2.6}, conversations=60, route="A")
    few = rows_of({"champion": 2.0, "challenger": 1.6}, conversations=6, route="B")
    for row in few:
        if row["role"] == "challenger" and row["conversation"] in ("B-0", "B-3"):
            row["num_tokens"] += 10
    rows += few
    verdict = decide(FAST, rows, measured_of(rows), fractions=(0.5,))
    assert verdict.decision == "promote" and verdict.slices["route=B"].ratio < 0.9
    assert settled(FAST, rows, measured_of(rows), fractions=(0.5,)) is None
