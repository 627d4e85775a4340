"""Ratios of accepted drafts a step, counted by hand."""

import pytest

from bench.oracles.orders import prompts
from bench.oracles.served_pairs import accepted_per_step, accepted_ratio


def row(role, name, accepted, drafts, *, flag=None, prompt_set="gate"):
    return {
        "role": role,
        "row_id": name,
        "conversation": name,
        "prompt_set": prompt_set,
        "num_accepted_tokens": accepted,
        "num_drafts": drafts,
        "flag": flag,
    }


ROWS = [
    row("champion", "a", 10, 10),
    row("challenger", "a", 18, 9),
    row("champion", "b", 6, 6),
    row("challenger", "b", 8, 5),
    row("champion", "c", 50, 10),
    row("challenger", "c", 1, 10, flag="loop"),  # leaves both out
    row("champion", "d", 30, 10, prompt_set="general"),
    row("challenger", "d", 29, 10, prompt_set="general"),
]


def test_the_ratio_is_of_sums_over_the_requests_that_neither_was_flagged_for():
    found = accepted_ratio(ROWS, "challenger", "champion")
    assert found.ratio == pytest.approx((26 / 14) / (16 / 16))
    assert found.low <= found.ratio <= found.high and found.num_clusters == 2


def test_general_prompts_are_compared_apart():
    assert accepted_ratio(ROWS, "challenger", "champion", prompt_set="general").ratio == pytest.approx(29 / 30)
    assert accepted_per_step(ROWS, "champion") == pytest.approx(66 / 26)
    assert accepted_per_step(ROWS, "challenger", prompt_set="general") == 2.9


def test_orders_are_the_same_for_a_seed_and_never_twice_in_it():
    notes = [one["messages"][-1]["content"] for one in prompts(60, 3)]
    assert len(set(notes)) == 60
    assert notes == [one["messages"][-1]["content"] for one in prompts(60, 3)]
    assert notes != [one["messages"][-1]["content"] for one in prompts(60, 4)]
