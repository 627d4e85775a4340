"""The verdict on measurements made up so that the right one is known beforehand."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import gate
from pipeline.artifacts import AcceptanceReport, GateDecision, commit, describe_file, load, verify
from pipeline.config import Config, GateConfig
from pipeline.errors import FingerprintError
from pipeline.schemas import ACCEPTANCE
from pipeline.stages import Artifact

FAST = GateConfig(resamples=1000)
SETTINGS = {"dtype": "bfloat16", "concurrency": 8, "chat_template": "a"}
BLOCKS = 6


def rows_of(lengths, *, conversations=40, route="mail", steps=20, prompt_set="gate", weight=1):
    """Each conversation: one reply a role, of exactly ``lengths[role] * steps`` tokens after the prefill's.

    A little, balanced difference between conversations keeps the intervals from being points.
    """
    rows = []
    for i in range(conversations):
        for role, length in lengths.items():
            tokens = round(length * steps) + (i % 3 - 1) * (role == "challenger")
            accepted = tokens - steps
            rows.append(
                {
                    "role": role,
                    "prompt_set": prompt_set,
                    "row_id": f"{route}-{i}",
                    "conversation": f"{route}-{i}",
                    "slices": json.dumps({"route": route}),
                    "weight": weight,
                    "block": i % BLOCKS,
                    "num_tokens": tokens + 1,
                    "num_drafts": steps,
                    "num_accepted_tokens": accepted,
                    "accepted_per_pos": per_position(accepted, steps),
                    "latency_s": 1.0,
                    "ttft_s": None,
                    "itl_s": [],
                    "finish_reason": "stop",
                    "flag": None,
                }
            )
    return rows


def per_position(accepted, steps):
    """Counts that add up to ``accepted``, each position accepting the same share of what gets there."""
    rate = min((n / 1000 for n in range(1000)), key=lambda r: abs(r + r**2 + r**3 + r**4 - accepted / steps))
    later = [round(steps * rate**k) for k in (2, 3, 4)]
    return [accepted - sum(later), *later]


def sittings_of(speed, *, noise=0.01, itl_p99_s=None):
    """``speed`` tokens/s in every sitting, but for a little that balances out."""
    return [
        {
            "block": block,
            "num_tokens": 1000,
            "wall_s": 1000 / speed * (1 + noise * (block % 3 - 1)),
            "itl_p99_s": itl_p99_s and itl_p99_s * (1 + noise * (block % 2)),
            "ttft_p99_s": None,
        }
        for block in range(BLOCKS)
    ]


def measured_of(rows, *, walk=1.0, **of_role):
    """What an evaluation would have written beside the rows; ``of_role`` changes single roles."""
    measured = {}
    for role in dict.fromkeys(row["role"] for row in rows):
        own = [row for row in rows if row["role"] == role and row["prompt_set"] == "gate"]
        drafts, accepted = (sum(row[name] for row in own) for name in ("num_drafts", "num_accepted_tokens"))
        per_pos = [sum(counts) for counts in zip(*(row["accepted_per_pos"] for row in own), strict=True)]
        measured[role] = {
            "num_requests": len(own),
            "num_tokens": sum(row["num_tokens"] for row in own),
            "num_drafts": drafts,
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": per_pos,
            "num_accepted_and_emitted": accepted,
            "served_acceptance_length": 1 + accepted / drafts if drafts else None,
            "emitted_tokens_per_step": None,
            "tokens_per_s": 100.0,
            "sittings": sittings_of(100.0),
            "latency": {"ttft_p50_s": None, "ttft_p99_s": None, "itl_p50_s": None, "itl_p99_s": None},
            "walk": {
                "num_drafts": drafts * 1000,
                "num_accepted_tokens": round(accepted * 1000 * walk),
                "num_accepted_tokens_per_pos": [round(n * 1000 * walk) for n in per_pos],
            },
            "flagged": {},
            "slices": {},
            "general": None,
            "settings": SETTINGS,
            "num_replies_different": 0,
            **of_role.get(role, {}),
        }
    return measured


def reason(verdict, code):
    (found,) = [r for r in verdict.reasons if r.code == code]
    return found


def failed(verdict):
    return [r.code for r in verdict.reasons if r.passed is False]


BETTER = {"champion": 2.0, "challenger": 2.6, "control": 2.2}


def test_a_better_challenger_is_promoted_and_the_lift_is_the_ratio():
    rows = rows_of(BETTER, conversations=42)
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "promote"
    assert failed(verdict) == []
    assert verdict.lift.ratio == pytest.approx(1.3)
    assert 1.28 < verdict.lift.low < 1.3 < verdict.lift.high < 1.32
    assert verdict.comparisons["control/champion"].ratio == pytest.approx(1.1)
    assert verdict.comparisons["challenger/control"].ratio == pytest.approx(2.6 / 2.2)


def test_no_control_is_needed():
    rows = rows_of({"champion": 2.0, "challenger": 2.6})
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "promote"
    assert list(verdict.comparisons) == ["challenger/champion"]


def test_a_worse_challenger_is_rejected():
    rows = rows_of({"champion": 2.0, "challenger": 1.9})
    verdict = gate.decide(FAST, rows, measured_of(rows))
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
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.lift.low < 1 < verdict.lift.ratio < verdict.lift.high
    assert verdict.decision == "cannot_say"
    needed = verdict.evidence.needed_clusters
    assert needed > 40
    message = reason(verdict, "lift").message
    assert f"Not enough evidence: 40 of about {needed} conversations; about {needed - 40} more prompts" in message


def test_a_lift_that_enough_data_does_not_show_is_held():
    rows = scattered(200, up=2.11, down=1.9)
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.lift.low < 1 < verdict.lift.high
    assert verdict.evidence.is_enough
    assert (verdict.decision, failed(verdict)) == ("hold", ["lift"])
    assert "Measured well enough" in reason(verdict, "lift").message


def test_a_configured_lift_has_to_be_reached():
    rows = rows_of(BETTER)
    verdict = gate.decide(FAST.model_copy(update={"min_lift": 1.5}), rows, measured_of(rows))
    assert verdict.decision == "reject"
    assert reason(verdict, "lift").limit == 1.5


def test_too_few_conversations_cannot_say_and_tells_how_many_more():
    rows = rows_of(BETTER, conversations=12)
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert "about 18 more" in reason(verdict, "clusters").message


def test_case_69_a_slice_that_loses_blocks_a_lift_of_the_whole():
    # 60% of the traffic in language A gains 0.5 tokens a step, 40% in language B loses 0.4.
    rows = rows_of({"champion": 2.0, "challenger": 2.5}, conversations=60, route="A")
    rows += rows_of({"champion": 2.0, "challenger": 1.6}, conversations=40, route="B")
    verdict = gate.decide(FAST, rows, measured_of(rows))
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
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.slices["route=B"].low < 0.9
    assert reason(verdict, "slice:route=B").passed
    assert verdict.decision == "promote"


def test_a_slice_of_a_few_conversations_is_shown_and_blocks_nothing():
    rows = rows_of(BETTER) + rows_of({"champion": 2.0, "challenger": 1.2, "control": 2.0}, conversations=2, route="B")
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "promote"
    assert reason(verdict, "slice:route=B").passed is None


def test_case_71_acceptance_that_costs_tokens_per_second_is_refused():
    # 10% longer and 8% slower at the production concurrency, with the policy as it ships.
    rows = rows_of({"champion": 2.0, "challenger": 2.2})
    slower = {"tokens_per_s": 92.0, "sittings": sittings_of(92.0)}
    verdict = gate.decide(FAST, rows, measured_of(rows, challenger=slower))
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
    verdict = gate.decide(FAST, rows, measured_of(rows, walk=walk))
    assert verdict.decision == decision
    if decision == "cannot_say":
        message = reason(verdict, "walk:challenger").message
        assert message.startswith("training and serving disagree")
        assert "position 1" in message


def test_the_walk_is_compared_in_accepted_drafts_and_not_in_lengths():
    # 0.10 against 0.11 accepted: 10% apart, though the lengths 1.10 and 1.11 are within 1%.
    rows = rows_of({"champion": 1.05, "challenger": 1.1}, steps=100)
    verdict = gate.decide(FAST, rows, measured_of(rows, walk=1.1))
    assert "walk:challenger" in failed(verdict)


def test_a_challenger_without_a_walk_is_held_and_a_champion_without_one_is_not():
    rows = rows_of(BETTER)
    assert gate.decide(FAST, rows, measured_of(rows, champion={"walk": None})).decision == "promote"
    measured = measured_of(rows, challenger={"walk": None})
    assert gate.decide(FAST, rows, measured).decision == "hold"
    assert gate.decide(FAST.model_copy(update={"require_walk": False}), rows, measured).decision == "promote"


def test_case_9_measurements_with_other_settings_are_refused_with_both_values():
    rows = rows_of(BETTER)
    measured = measured_of(rows, challenger={"settings": {**SETTINGS, "template_args": {"enable_thinking": False}}})
    measured["champion"]["settings"] = {**SETTINGS, "template_args": {"enable_thinking": True}}
    with pytest.raises(FingerprintError, match=r"template_args.*True.*!=.*False"):
        gate.decide(FAST, rows, measured)


def test_case_74_an_incumbent_far_below_its_record_makes_the_environment_suspect():
    rows = rows_of({"champion": 1.2, "challenger": 1.6})
    verdict = gate.decide(FAST, rows, measured_of(rows, champion={"recorded_acceptance_length": 3.0}))
    assert verdict.decision == "cannot_say"
    assert "environment suspect" in reason(verdict, "environment").message
    near = gate.decide(FAST, rows, measured_of(rows, champion={"recorded_acceptance_length": 1.25}))
    assert near.decision == "promote"


def test_case_74_a_server_on_which_nothing_is_accepted_gives_no_verdict():
    rows = [row | {"num_tokens": 21} for row in rows_of({"champion": 1.0, "challenger": 1.0})]
    rows = [row | {"num_accepted_tokens": 0} for row in rows]
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert reason(verdict, "accepted_anything").passed is False


def test_replies_without_a_step_give_no_number_and_no_verdict():
    rows = [row | {"num_drafts": 0, "num_accepted_tokens": 0} for row in rows_of(BETTER)]
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    json.dumps(gate.as_json(verdict), allow_nan=False)
    assert gate.as_json(verdict)["lift"] is None


def test_many_flagged_replies_cannot_say():
    rows = rows_of(BETTER, conversations=50)
    for row in rows[: 15 * 3]:
        row["flag"] = "loop"
    verdict = gate.decide(FAST, rows, measured_of(rows))
    assert verdict.decision == "cannot_say"
    assert reason(verdict, "flagged").value == pytest.approx(0.3)


def test_different_replies_fail_only_where_they_can_be_equal():
    rows = rows_of(BETTER)
    measured = measured_of(rows, challenger={"num_replies_different": 3})
    assert gate.decide(FAST, rows, measured).decision == "promote"
    for one in measured.values():
        one["settings"] = {"dtype": "float32", "concurrency": 1}
    verdict = gate.decide(FAST, rows, measured)
    assert (verdict.decision, failed(verdict)) == ("reject", ["replies"])


def test_no_verdict_is_stronger_than_a_rejection_and_that_than_a_hold():
    rows = rows_of({"champion": 2.0, "challenger": 1.5}, conversations=10)
    assert gate.decide(FAST, rows, measured_of(rows, walk=2.0)).decision == "cannot_say"
    rows = rows_of({"champion": 2.0, "challenger": 1.5})
    measured = measured_of(rows, challenger={"walk": None})
    assert gate.decide(FAST, rows, measured).decision == "reject"


def test_a_decision_is_written_with_its_page_and_found_again(tmp_path):
    rows = rows_of(BETTER)
    folder = tmp_path / "reports" / "r1"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ACCEPTANCE), folder / "acceptance.parquet")
    manifest = AcceptanceReport(
        derivation_id="r1",
        parents={"champion": "a", "challenger": "b", "responses": "c"},
        shards=(describe_file(folder / "acceptance.parquet", rows=len(rows)),),
        measured=measured_of(rows),
        settings=SETTINGS,
    )
    commit(folder, manifest)
    config = Config(root=tmp_path, target={"model": tmp_path / "model"}, gate=FAST)
    decision = gate.run(config, Artifact(folder, manifest))
    assert decision.manifest.decision == "promote"
    verify(decision.folder, decision.manifest)
    assert load(decision.folder, GateDecision) == decision.manifest
    body = json.loads((decision.folder / "decision.json").read_text())
    assert body["decision"] == "promote"
    assert set(body["reasons"][0]) >= {"code", "message", "value", "limit", "passed"}
    assert body["lift"] == pytest.approx(decision.manifest.lift)
    before = (decision.folder / "decision.json").stat().st_mtime_ns
    assert gate.run(config, Artifact(folder, manifest)).id == decision.id
    assert (decision.folder / "decision.json").stat().st_mtime_ns == before
