"""Tokens/s and tails by sittings, and whether speculation pays: each on figures whose answer is known."""

import math

import pytest
from measurements import BETTER, FAST, failed, measured_of, reason, rows_of, sittings_of

from pipeline import pace
from pipeline.artifacts import SpeedReport
from pipeline.decide import decide
from pipeline.speed_points import recommend

ROWS = rows_of(BETTER)


def decided(*, speed_report=None, **challenger):
    return decide(FAST, ROWS, measured_of(ROWS, challenger=challenger), speed=speed_report)


def speeds(points, **more):
    """points: (concurrency, speculated tokens) → tokens/s."""
    listed = [{"concurrency": c, "num_speculative_tokens": k, "tokens_per_s": rate} for (c, k), rate in points.items()]
    return SpeedReport(derivation_id="s", parents={}, points=listed, recommended=recommend(listed), **more)


def test_the_interval_is_students_on_the_log_ratios_of_paired_sittings():
    # Log ratios 0.1, 0.2, 0.3: mean 0.2, deviation 0.1; t of 5% with two degrees of freedom is 2.9200.
    before = [{"block": b, "num_tokens": 100, "wall_s": 1.0} for b in range(3)]
    after = [{"block": b, "num_tokens": 100, "wall_s": math.exp(-0.1 * (b + 1))} for b in reversed(range(3))]
    measured = {"champion": {"sittings": before}, "challenger": {"sittings": after}}
    found = pace.tokens_per_s(measured, level=0.05)
    half = 2.9200 * 0.1 / math.sqrt(3)
    assert (found.ratio, found.num_clusters) == (pytest.approx(math.exp(0.2)), 3)
    assert (found.low, found.high) == (
        pytest.approx(math.exp(0.2 - half), 1e-4),
        pytest.approx(math.exp(0.2 + half), 1e-4),
    )


def test_a_noisy_loss_is_held_and_the_missing_sittings_are_named():
    verdict = decided(sittings=sittings_of(95.5, noise=0.15), tokens_per_s=95.5)
    assert (verdict.decision, failed(verdict)) == ("hold", ["speed"])
    assert "more sittings would tell" in reason(verdict, "speed").message


def test_one_sitting_cannot_tell_how_sure():
    one = sittings_of(150.0)[:1]
    verdict = decided(sittings=one, tokens_per_s=150.0)
    assert (verdict.decision, failed(verdict)) == ("hold", ["speed"])
    assert "how sure that is cannot be told" in reason(verdict, "speed").message
    assert decided(sittings=[], tokens_per_s=150.0).decision == "hold"


def test_a_tail_that_grows_is_rejected_where_shown_and_held_where_not():
    champion = {"sittings": sittings_of(100.0, itl_p99_s=0.1)}
    for grown, noise, decision in ((1.1, 0.01, "promote"), (1.5, 0.01, "reject"), (1.2, 0.2, "hold")):
        challenger = {"sittings": sittings_of(100.0, itl_p99_s=0.1 * grown, noise=noise), "tokens_per_s": 100.0}
        for one in challenger["sittings"]:
            one["wall_s"] = 10.0
        verdict = decide(FAST, ROWS, measured_of(ROWS, champion=champion, challenger=challenger))
        assert (verdict.decision, failed(verdict)) == (decision, [] if decision == "promote" else ["tail"])


def test_replies_that_came_whole_have_no_tail_and_none_is_asked_for():
    verdict = decided()
    assert verdict.tail is None
    assert reason(verdict, "tail").passed is None
    only_whole = {"latency": {"itl_p99_s": 0.1}}
    verdict = decide(FAST, ROWS, measured_of(ROWS, champion=only_whole, challenger={"latency": {"itl_p99_s": 0.2}}))
    assert verdict.tail.ratio == pytest.approx(2.0)
    assert (verdict.decision, failed(verdict)) == ("hold", ["tail"])


def test_a_sitting_whose_client_read_everything_at_once_has_no_tail():
    champion, challenger = ({"sittings": sittings_of(100.0, itl_p99_s=0.1)} for _ in range(2))
    challenger["tokens_per_s"] = 100.0
    for one in challenger["sittings"][:2]:
        one["itl_p99_s"] = 0.0
    verdict = decide(FAST, ROWS, measured_of(ROWS, champion=champion, challenger=challenger))
    assert verdict.tail.ratio == pytest.approx(1.0) and verdict.tail.num_clusters == len(champion["sittings"]) - 2
    for one in challenger["sittings"]:
        one["itl_p99_s"] = 0.0
    assert decide(FAST, ROWS, measured_of(ROWS, champion=champion, challenger=challenger)).tail is None


def test_speculation_that_does_not_pay_where_the_fleet_serves_is_not_recommended_above_where_it_does():
    # Concurrency 8 is production's.
    points = {(1, 0): 30, (1, 4): 60, (4, 0): 100, (4, 4): 120, (4, 2): 110, (8, 0): 150, (8, 4): 120, (8, 2): 140}
    verdict = decided(speed_report=speeds(points))
    assert (verdict.decision, failed(verdict)) == ("dont_speculate", ["speculation"])
    assert verdict.speculate_up_to == 4
    assert verdict.recommended == {"1": 4, "4": 4, "8": 0}
    assert "don't speculate above concurrency 4" in reason(verdict, "speculation").message
    pays = decided(speed_report=speeds(points | {(8, 4): 151}))
    assert (pays.decision, pays.speculate_up_to) == ("promote", 8)


@pytest.mark.parametrize("served", [{"speculation": {"num_speculative_tokens": 7}}, {"block_size": 8}])
def test_speculation_is_judged_by_the_number_of_tokens_that_is_served_and_a_better_one_is_named(served):
    measured = measured_of(ROWS)
    for one in measured.values():
        one["settings"] = {**one["settings"], **served}
    swept = {(8, 0): 100, (8, 3): 110, (8, 7): 80}
    verdict = decide(FAST, ROWS, measured, speed=speeds(swept))
    assert (verdict.decision, failed(verdict)) == ("dont_speculate", ["speculation"])
    assert reason(verdict, "speculation").value == pytest.approx(0.8)
    assert "with 7 speculated tokens, as served; 3 give 1.10 ×" in reason(verdict, "speculation").message
    assert decide(FAST, ROWS, measured, speed=speeds(swept | {(8, 7): 101})).decision == "promote"
    verdict = decide(FAST, ROWS, measured, speed=speeds({(8, 0): 100, (8, 3): 110}))
    assert (verdict.decision, failed(verdict)) == ("hold", ["speculation"])
    assert "7 speculated tokens" in reason(verdict, "speculation").message


def test_speculation_that_pays_nowhere_says_so():
    verdict = decided(speed_report=speeds({(1, 0): 30, (1, 4): 20, (8, 0): 150, (8, 4): 120}))
    assert (verdict.decision, verdict.speculate_up_to) == ("dont_speculate", 0)


def test_a_loss_is_stronger_than_not_speculating_and_that_than_a_hold():
    off = speeds({(8, 0): 150, (8, 4): 120})
    assert decided(speed_report=off, sittings=sittings_of(80.0)).decision == "reject"
    assert decided(speed_report=off, sittings=[]).decision == "dont_speculate"


def test_a_speed_report_without_productions_concurrency_is_held():
    verdict = decided(speed_report=speeds({(1, 0): 30, (1, 4): 60}))
    assert (verdict.decision, failed(verdict)) == ("hold", ["speculation"])
    assert "not measured at concurrency 8" in reason(verdict, "speculation").message


@pytest.mark.parametrize(
    ("name", "evaluated", "timed"),
    [
        ("vllm", "0.32.0", "0.33.0"),
        ("kv_cache_dtype", "auto", "fp8"),
        ("tensor_parallel_size", 4, 1),
        ("prompts", "new", "old"),
        ("max_tokens", 512, 8),
        ("block_size", 16, 8),
        ("block_size", [4, 16], 8),
    ],
)
def test_speed_with_other_settings_than_the_acceptance_is_not_used_and_the_difference_is_named(name, evaluated, timed):
    measured = measured_of(ROWS)
    for one in measured.values():
        one["settings"] = {**one["settings"], name: evaluated}
    other = speeds({(8, 0): 100, (8, 4): 50}, settings={"dtype": "bfloat16", name: timed, "flags": {}})
    verdict = decide(FAST, ROWS, measured, speed=other)
    assert (verdict.decision, verdict.recommended, verdict.speculate_up_to) == ("promote", {}, None)
    found = reason(verdict, "speed_report")
    assert found.passed is None
    for said in (f"{name}: {timed!r}, evaluated with {evaluated!r}", "slipstream speed"):
        assert said in found.message


def test_speed_may_differ_in_what_it_sets_itself():
    own = {"prefix_caching": False, "load_generator": "a", "max_num_seqs": 4, "block_size": 5, "sampling": {}}
    measured = measured_of(ROWS)
    for one in measured.values():
        one["settings"] = {**one["settings"], "prefix_caching": True, "max_num_seqs": 64, "block_size": [5, 8]}
    verdict = decide(FAST, ROWS, measured, speed=speeds({(8, 0): 100, (8, 4): 50}, settings=own))
    assert (verdict.decision, failed(verdict)) == ("dont_speculate", ["speculation"])


@pytest.mark.parametrize(
    ("again", "decision"),
    [
        (None, "promote"),
        ({"tokens_per_s": 1.09, "emitted_tokens_per_step": 0.95}, "promote"),
        ({"tokens_per_s": 1.3, "emitted_tokens_per_step": 1.0}, "hold"),
        ({"tokens_per_s": 1.0, "emitted_tokens_per_step": 0.85}, "hold"),
        ({"tokens_per_s": math.nan}, "hold"),
        ({}, "hold"),
    ],
)
def test_a_machine_that_drifted_between_two_visits_of_the_champion_is_held(again, decision):
    verdict = decide(FAST, ROWS, measured_of(ROWS), drift=again)
    assert (verdict.decision, failed(verdict)) == (decision, [] if decision == "promote" else ["drift"])
