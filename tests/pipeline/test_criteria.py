"""What slices, general prompts and walks have to show, and when a look may go by them."""

import json
import math

import pytest
from measurements import FAST, failed, measured_of, reason, rows_of

from pipeline.decide import decide, settled

PAIR = {"champion": 2.0, "challenger": 2.9}
LOSING = {"champion": 2.0, "challenger": 1.2}


def look(rows, fraction=0.125):
    return settled(FAST, rows, measured_of(rows), fractions=(fraction,))


@pytest.mark.parametrize(
    ("lengths", "conversations", "fraction", "settles"),
    [
        (LOSING, 4, 0.125, None),  # the planned prompts have about 32 of them
        (LOSING, 1, 0.125, None),
        (PAIR, 1, 0.125, None),  # one alone says nothing
        (PAIR, 2, 0.125, "promote"),
        (LOSING, 2, 0.5, "promote"),  # about 4: never judged
        (LOSING, 3, 0.5, None),  # about 6
    ],
)
def test_a_look_waits_for_a_slice_that_the_planned_prompts_will_judge(lengths, conversations, fraction, settles):
    rows = rows_of(PAIR, conversations=46) + rows_of(lengths, conversations=conversations, route="legal")
    assert look(rows, fraction) == settles


@pytest.mark.parametrize(("lengths", "num_general", "settles"), [(PAIR, 3, None), (PAIR, 5, "promote")])
def test_a_look_waits_for_general_prompts_enough_to_judge(lengths, num_general, settles):
    rows = rows_of(PAIR, conversations=50)
    assert look(rows + rows_of(lengths, conversations=num_general, prompt_set="general")) == settles


def test_a_look_waits_where_general_prompts_are_under_their_floor_though_unproved():
    rows = rows_of(PAIR, conversations=50)
    for i, length in enumerate((1.2, 1.2, 1.2, 1.2, 3.2)):
        rows += rows_of({"champion": 2.0, "challenger": length}, conversations=1, prompt_set="general", route=f"g{i}")
    verdict = decide(FAST, rows, measured_of(rows), fractions=(0.125,))
    assert verdict.decision == "promote" and verdict.general.ratio < 0.9
    assert look(rows) is None


@pytest.mark.parametrize(("prompt_set", "code"), [("gate", "slice:route=bad"), ("general", "general")])
def test_no_token_at_all_is_under_every_floor(prompt_set, code):
    silent = rows_of({"champion": 2.0, "challenger": 2.0}, conversations=8, route="bad", prompt_set=prompt_set)
    for row in silent:
        if row["role"] == "challenger":
            row |= {"num_tokens": 1, "num_drafts": 1, "num_accepted_tokens": 0, "accepted_per_pos": [0, 0, 0, 0]}
    rows = rows_of(PAIR) + silent
    verdict = decide(FAST, rows, measured_of(rows))
    assert (verdict.decision, failed(verdict)) == ("reject", [code])
    assert reason(verdict, code).value == 0


def test_slices_too_small_to_be_judged_show_their_ratio_alone():
    rows = rows_of(PAIR, conversations=40)
    for row in rows:
        row["slices"] = json.dumps({"session": int(row["row_id"].split("-")[1]) // 4})
    verdict = decide(FAST, rows, measured_of(rows))
    assert len(verdict.slices) == 10 and verdict.decision == "promote"
    for name, one in verdict.slices.items():
        assert one.ratio == pytest.approx(1.45, abs=0.05) and one.num_clusters == 4
        assert math.isnan(one.low) and reason(verdict, f"slice:{name}").passed is None


def walked(num_walked, *, sampling=None, key="served"):
    """The verdict with a challenger whose walk agrees, over so many of its 100 requests."""
    rows = rows_of(PAIR, conversations=100)
    measured = measured_of(rows)
    own = measured["challenger"]
    covered = {"num_requests": num_walked} | {k: own[k] for k in ("num_drafts", "num_accepted_and_emitted")}
    own["walk"] |= {"served": covered} if key == "served" else {key: num_walked}
    for one in measured.values():
        one["settings"] = {**one["settings"], "sampling": sampling or {"temperature": 0.0}}
    return decide(FAST, rows, measured)


@pytest.mark.parametrize("key", ["served", "num_replies"])
@pytest.mark.parametrize(
    ("sampling", "num_walked", "decision"),
    [(None, 49, "hold"), (None, 50, "promote"), ({"traffic": True}, 19, "hold"), ({"traffic": True}, 20, "promote")],
)
def test_a_walk_over_a_few_requests_is_none(sampling, num_walked, decision, key):
    verdict = walked(num_walked, sampling=sampling, key=key)
    assert verdict.decision == decision
    if decision == "hold":
        assert failed(verdict) == ["walk:challenger"]
        assert f"covers {num_walked} of 100 requests" in reason(verdict, "walk:challenger").message
        assert "capture the gate rows' states again" in reason(verdict, "walk:challenger").message


def test_where_there_is_no_walk_the_next_step_is_named():
    rows = rows_of(PAIR)
    verdict = decide(FAST, rows, measured_of(rows, challenger={"walk": None}))
    assert "capture the gate rows' states again" in reason(verdict, "walk:challenger").message
