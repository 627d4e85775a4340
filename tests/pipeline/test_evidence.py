"""Whether a measurement can carry a verdict: failed requests, flags and what could not be read."""

import pytest
from measurements import FAST, failed, measured_of, reason, rows_of

from pipeline.decide import decide

PAIR = {"champion": 2.0, "challenger": 2.9}


def decided(rows):
    return decide(FAST, rows, measured_of(rows_of(PAIR, conversations=100)))


def failing(role, numbers, *, prompt_set="gate"):
    """100 requests of the gate set and 100 general ones, of which these fail for this role."""
    rows = rows_of(PAIR, conversations=100) + rows_of(PAIR, conversations=100, prompt_set="general")
    for row in rows:
        if (row["role"], row["prompt_set"]) == (role, prompt_set) and int(row["row_id"].split("-")[1]) in numbers:
            row |= {"flag": "failed", "num_tokens": 0, "num_drafts": 0, "num_accepted_tokens": 0}
            row["accepted_per_pos"] = []
    return rows


@pytest.mark.parametrize("prompt_set", ["gate", "general"])
def test_a_challenger_that_fails_more_requests_than_the_champion_is_rejected_however_few(prompt_set):
    verdict = decided(failing("challenger", range(8), prompt_set=prompt_set))
    assert (verdict.decision, failed(verdict)) == ("reject", ["failed:challenger"])
    found = reason(verdict, "failed:challenger")
    assert found.value == pytest.approx(8 / 200)
    assert "8 of 200 requests failed" in found.message and "(p = 0.0039)" in found.message  # 1 / 2 ** 8


def test_failures_that_chance_or_one_bad_sitting_explains_reject_nobody():
    assert decided(failing("challenger", range(4))).decision == "promote"  # p = 1 / 16
    assert decided(failing("challenger", range(0, 48, 6))).decision == "promote"  # all in the first of six sittings


def test_a_role_that_fails_many_of_its_own_requests_leaves_no_verdict():
    # 5.5% of the champion's, 2.75% of all.
    verdict = decided(failing("champion", range(11)))
    assert (verdict.decision, failed(verdict)) == ("cannot_say", ["failed:champion"])


def test_what_is_left_out_is_counted_by_traffic_where_that_is_more():
    rows = rows_of(PAIR, conversations=90) + rows_of(PAIR, conversations=10, route="often", weight=100)
    for row in rows:
        if row["row_id"].startswith("often"):
            row["flag"] = "loop"
    verdict = decided(rows)
    assert (verdict.decision, failed(verdict)) == ("cannot_say", ["flagged"])
    assert reason(verdict, "flagged").value == pytest.approx(1000 / 1090)
    assert "92% of the traffic, 10% of requests left out" in reason(verdict, "flagged").message


def general_flagged(num_flagged, num_general=20):
    rows = rows_of(PAIR, conversations=100) + rows_of(PAIR, conversations=num_general, prompt_set="general")
    for row in rows:
        is_flagged = row["prompt_set"] == "general" and int(row["row_id"].split("-")[1]) < num_flagged
        row["flag"] = "loop" if is_flagged and row["role"] == "challenger" else None
    return rows


@pytest.mark.parametrize(("num_flagged", "decision"), [(0, "promote"), (10, "promote"), (11, "cannot_say")])
def test_general_prompts_of_which_most_cannot_be_used_give_no_verdict(num_flagged, decision):
    verdict = decided(general_flagged(num_flagged))
    assert (verdict.decision, failed(verdict)) == (decision, ["general"] if decision != "promote" else [])
    assert decided(general_flagged(20)).decision == "cannot_say"


def test_general_rows_are_checked_as_the_gate_sets_are():
    rows = general_flagged(0)
    rows[-1]["num_drafts"] = float("nan")
    assert failed(decided(rows)) == ["numbers"]
    assert failed(decided(rows[:-1])) == ["paired"]


def test_requests_that_weigh_nothing_give_no_verdict():
    verdict = decided([row | {"weight": 0} for row in rows_of(PAIR, conversations=100)])
    assert verdict.decision == "cannot_say"
