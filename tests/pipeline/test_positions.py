"""A block that is broken behind its first position is seen, and one that is not isn't."""

import random

import pytest
from measurements import FAST, failed, measured_of, reason

from pipeline.decide import decide

K = 4


def rows_of(rates, *, conversations=80, steps=30, seed=0):
    """``rates[role]``: conditional acceptance at each position; conversations differ by a little."""
    rng = random.Random(seed)
    rows = []
    for i in range(conversations):
        ease = rng.uniform(0.8, 1.2)
        for role, own in rates.items():
            per_pos = [0] * K
            for _ in range(steps):
                for k in range(K):
                    if rng.random() > min(1.0, own[k] * ease):
                        break
                    per_pos[k] += 1
            accepted = sum(per_pos)
            rows.append(
                {"role": role, "prompt_set": "gate", "row_id": f"r{i}", "conversation": f"c{i}", "slices": "{}"}
                | {"weight": 1, "block": i % 6, "num_tokens": steps + accepted + 1, "num_drafts": steps}
                | {"num_accepted_tokens": accepted, "accepted_per_pos": per_pos, "flag": None}
            )
    return rows


def decided(**rates):
    rows = rows_of(rates)
    return decide(FAST, rows, measured_of(rows))


def test_a_healthy_block_passes_and_its_rates_are_conditional():
    verdict = decided(champion=[0.5, 0.5, 0.5, 0.5], challenger=[0.7, 0.65, 0.6, 0.55])
    assert verdict.decision == "promote"
    assert [one.position for one in verdict.positions] == [1, 2, 3, 4]
    assert [one.rate for one in verdict.positions] == [pytest.approx(r, abs=0.06) for r in (0.7, 0.65, 0.6, 0.55)]
    assert verdict.positions[1].num_trials == pytest.approx(0.7 * 80 * 30, rel=0.05)


def test_a_challenger_good_at_the_first_position_only_is_rejected_though_its_lift_is_clear():
    verdict = decided(champion=[0.4, 0.4, 0.4, 0.4], challenger=[0.95, 0.02, 0.0, 0.0])
    assert verdict.lift.low > 1
    assert (verdict.decision, failed(verdict)) == ("reject", ["positions"])
    for said in ("good at the first position", "position 2 (", "block's mask"):
        assert said in reason(verdict, "positions").message


def test_a_last_position_that_never_works_is_seen_too():
    verdict = decided(champion=[0.6, 0.6, 0.6, 0.6], challenger=[0.8, 0.8, 0.8, 0.0])
    assert verdict.lift.low > 1
    assert (verdict.decision, failed(verdict)) == ("reject", ["positions"])
    assert "position 4 (0.0%" in reason(verdict, "positions").message


def test_where_the_champions_block_is_broken_alike_a_person_has_to_look():
    verdict = decided(champion=[0.5, 0.02, 0.02, 0.02], challenger=[0.7, 0.02, 0.02, 0.02])
    assert (verdict.decision, failed(verdict)) == ("hold", ["positions"])


def test_a_young_drafter_whose_later_positions_are_hardly_reached_is_not_judged():
    verdict = decided(champion=[0.005] * K, challenger=[0.02, 0.01, 0.01, 0.01])
    assert reason(verdict, "positions").passed is None


def test_against_the_target_alone_the_challengers_own_first_position_is_the_measure():
    rows = rows_of({"champion": [0.0] * K, "challenger": [0.7, 0.7, 0.7, 0.7]})
    for row in rows:
        if row["role"] == "champion":
            row["accepted_per_pos"] = []
    assert decide(FAST, rows, measured_of(rows)).decision == "promote"
