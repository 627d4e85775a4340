"""Sittings, counts and refusals of an evaluation, with a scripted server; the real one is met end to end."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import evaluate, gate_prompts
from pipeline.artifacts import DrafterCheckpoint, ResponseSet, TargetFingerprint, commit, describe_file, verify
from pipeline.config import Config
from pipeline.errors import FingerprintError, StageError
from pipeline.fingerprint import require_same_settings
from pipeline.schemas import ACCEPTANCE, RESPONSES
from pipeline.shards import read_tables
from pipeline.stages import Artifact

K = 3
TARGET = TargetFingerprint(
    config="c", tokenizer="t", chat_template="think-off", weights="w", dtype="bfloat16", target_layer_ids=()
)


@dataclass
class ScriptedReply:
    token_ids: list[int]
    spec: dict | None
    finish_reason: str | None = "stop"
    latency_s: float = 0.01
    ttft_s: float | None = 0.004
    itl_s: list[float] = field(default_factory=lambda: [0.001, 0.003])
    error: str | None = None


@dataclass
class ScriptedServer:
    """Answers prompt [n, …] with n tokens, each role accepting a fixed number of drafts a step."""

    accepted: dict[str, int]
    events: list = field(default_factory=list)
    role: str | None = None
    changes: dict = field(default_factory=dict)
    fail: set[int] = field(default_factory=set)
    can_swap: bool = True
    plan: dict = field(default_factory=dict)

    def swaps(self, candidates):
        return self.can_swap

    def planned(self):
        return self.plan

    def use(self, role, drafter):
        self.role = role
        self.events.append(("use", role, drafter and drafter.folder))

    def settings(self):
        return {"engine": "scripted", **self.changes.get(self.role, {})}

    def answer(self, requests, *, concurrency):
        self.events.append(("answer", self.role, [r["prompt"] for r in requests], concurrency))
        return [self._reply(request) for request in requests]

    def _reply(self, request):
        first = request["prompt"][0]
        if first in self.fail:
            return ScriptedReply([], None, None, error="HTTP 500")
        # 1 token from the prefill, then whole steps until the budget.
        per_step = self.accepted[self.role]
        steps = (request["max_tokens"] - 1) // (per_step + 1)
        histogram = [0] * (K + 1)
        histogram[per_step] = steps
        spec = {
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": per_step * steps,
            "acceptance_histogram": histogram,
            "per_step_accepted": [per_step] * steps,
        }
        return ScriptedReply([first * 100 + i for i in range(1 + steps * (per_step + 1))], spec)


def response(i, *, split="gate", prompt=None, reply=None, max_tokens=64):
    return {
        "row_id": f"row{i:03d}",
        "conversation": f"conversation{i // 2}",
        "split": split,
        "slice": "mail" if i % 2 else "code",
        "slices": json.dumps({"route": "mail" if i % 2 else "code"}),
        "weight": 1 + i % 3,
        "inclusion_probability": 1.0,
        "prompt_ids": prompt or [i + 1, 7, 8],
        "response_ids": reply or list(range(20)),
        "finish_reason": "stop",
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": max_tokens,
        "clamped": False,
    }


def responses_of(root, rows, *, fingerprint=TARGET):
    folder = root / "responses" / "s1"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=RESPONSES), folder / "responses.parquet")
    shards = (describe_file(folder / "responses.parquet", rows=len(rows)),)
    manifest = ResponseSet(derivation_id="s1", parents={}, shards=shards, fingerprint=fingerprint)
    commit(folder, manifest)
    return Artifact(folder, manifest)


def candidates_of(*roles, **changed):
    return {
        role: Artifact(
            Path("/drafters") / role,
            DrafterCheckpoint(
                **{
                    "derivation_id": f"id-{role}",
                    "parents": {},
                    "fingerprint": TARGET.model_copy(update={"target_layer_ids": (1, 3)}),
                    "role": role,
                    "block_size": K + 1,
                    "mask_token_id": 2,
                    **changed.get(role, {}),
                }
            ),
        )
        for role in roles
    }


THREE = ("champion", "challenger", "control")
ONE_WALK = {
    "num_replies": 1,
    "num_tokens": 25,
    "num_drafts": 10,
    "num_accepted_tokens": 5,
    "num_accepted_tokens_per_pos": [4, 1, 0],
}
# Two of the rows were walked, and one that was never served.
WALKS = {
    "row000": ONE_WALK,
    "row002": ONE_WALK | {"num_accepted_tokens": 10, "num_accepted_tokens_per_pos": [6, 3, 1]},
    "other": ONE_WALK,
}


@pytest.fixture
def config(tmp_path):
    return Config(
        root=tmp_path,
        target={"model": tmp_path / "model", "max_model_len": 256},
        evaluate={"concurrency": 4, "max_tokens": 25, "blocks": 2, "early_stop": False, "general_prompts": 0},
    )


def evaluated(config, candidates, responses, **settings):
    """The report on the gate rows of these responses."""
    prompts = gate_prompts.from_responses(config, responses, block_size=K + 1)
    return evaluate.run(config, candidates, prompts, **settings)


def server_of(**changes):
    return ScriptedServer({"champion": 1, "challenger": 3, "control": 2}, **changes)


def rows_for_ten():
    return [response(i) for i in range(10)] + [response(i, split="train") for i in range(10, 13)]


def test_the_sittings_alternate_and_every_role_answers_every_prompt_once(config, tmp_path):
    server = server_of()
    evaluated(config, candidates_of(*THREE), responses_of(tmp_path, rows_for_ten()), server=server)
    used = [event[1] for event in server.events if event[0] == "use"]
    assert used == [*THREE, *reversed(THREE), "champion"]
    answers = [event for event in server.events if event[0] == "answer"]
    gate_answers = [event for event in answers if event[2][0][0] <= 10]
    for role in THREE:
        prompts = list(itertools.chain.from_iterable(e[2] for e in gate_answers if e[1] == role))
        assert sorted(prompts) == [[i + 1, 7, 8] for i in range(10)]
    # Before each sitting the engine is warmed, with prompts that are not of the gate set.
    assert [e[2][0][0] > 10 for e in answers] == [True, False] * 6
    assert {e[3] for e in answers} == {4}


def test_prompts_go_in_as_the_exact_ids_greedy(config, tmp_path):
    seen = []
    server = server_of()
    inner = server.answer
    server.answer = lambda requests, *, concurrency: seen.extend(requests) or inner(requests, concurrency=concurrency)
    evaluated(config, candidates_of(*THREE), responses_of(tmp_path, rows_for_ten()), server=server)
    gate = [request for request in seen if request["prompt"][0] <= 10]
    assert all(r["temperature"] == 0 and r["return_token_ids"] and r["max_tokens"] == 25 for r in gate)


def test_what_was_measured_is_the_count_of_what_was_answered(config, tmp_path):
    responses = responses_of(tmp_path, rows_for_ten())
    report = evaluated(
        config, candidates_of(*THREE), responses, server=server_of(), walk=lambda: {"control": WALKS}, recorded=2.1
    ).manifest
    # Budget 25: champion 12 steps of 2 tokens, challenger 6 of 4, control 8 of 3; all emit 25.
    expected = {"champion": (12, 1), "challenger": (6, 3), "control": (8, 2)}
    for role, (steps, accepted) in expected.items():
        one = report.measured[role]
        assert one["num_drafts"] == 10 * steps
        assert one["num_accepted_tokens"] == 10 * steps * accepted
        assert one["num_accepted_tokens_per_pos"] == [10 * steps] * accepted + [0] * (K - accepted)
        assert one["served_acceptance_length"] == 1 + accepted
        assert one["emitted_tokens_per_step"] == 24 / steps
        assert one["flagged"] == {}
        assert one["tokens_per_s"] > 0
        assert one["slices"]["route=mail"]["num_requests"] == one["slices"]["route=code"]["num_requests"] == 5
        assert one["slices"]["length=≤128"]["num_requests"] == one["slices"]["temperature=≤0"]["num_requests"] == 10
        assert one["traffic"]["num_requests"] == sum(1 + i % 3 for i in range(10))
        assert one["latency"] == {"ttft_p50_s": 0.004, "ttft_p99_s": 0.004, "itl_p50_s": 0.002, "itl_p99_s": 0.003}
        assert [part["block"] for part in one["sittings"]] == [0, 1]
        assert sum(part["num_tokens"] for part in one["sittings"]) == 250
        assert one["num_replies_different"] == 0
    walk = report.measured["control"]["walk"]
    assert (walk["num_drafts"], walk["num_accepted_tokens"]) == (20, 15)
    assert walk["num_accepted_tokens_per_pos"] == [10, 4, 1]
    assert (walk["acceptance_length"], walk["emitted_tokens_per_step"]) == (1.75, 48 / 20)
    assert walk["served"]["num_drafts"] == 2 * 8
    assert walk["slices"]["route=code"]["num_drafts"] == 20
    assert report.measured["champion"]["walk"] is None
    assert report.measured["champion"]["recorded_acceptance_length"] == 2.1


def test_the_table_has_one_row_a_role_and_request_and_no_text(config, tmp_path):
    report = evaluated(config, candidates_of(*THREE), responses_of(tmp_path, rows_for_ten()), server=server_of())
    verify(report.folder, report.manifest)
    table = read_tables(report.folder, report.manifest.shards, ACCEPTANCE).to_pylist()
    assert len({(row["role"], row["row_id"]) for row in table}) == len(table) == 30
    assert {row["block"] for row in table if row["row_id"] == "row000"} == {0}
    assert {row["block"] for row in table if row["row_id"] == "row001"} == {1}
    names = {p.name for p in report.folder.iterdir()}
    assert not any("prompt" in name or "reply" in name for name in names)


def test_an_evaluation_that_is_complete_touches_no_server(config, tmp_path):
    responses = responses_of(tmp_path, rows_for_ten())
    first = evaluated(config, candidates_of(*THREE), responses, server=server_of())
    untouched = server_of()
    again = evaluated(config, candidates_of(*THREE), responses, server=untouched)
    assert again == first
    assert untouched.events == []


def test_an_interrupted_evaluation_leaves_the_champion_serving_and_no_artifact(config, tmp_path):
    responses = responses_of(tmp_path, rows_for_ten())
    server = server_of()
    inner = server.answer

    def break_off(requests, *, concurrency):
        if server.role == "challenger":
            raise KeyboardInterrupt
        return inner(requests, concurrency=concurrency)

    server.answer = break_off
    with pytest.raises(KeyboardInterrupt):
        evaluated(config, candidates_of(*THREE), responses, server=server)
    assert server.role == "champion"
    assert not list((tmp_path / "reports").glob("*/manifest.json"))
    assert evaluated(config, candidates_of(*THREE), responses, server=server_of()).manifest.counts["prompts"] == 10


def test_an_interrupted_evaluation_goes_on_with_the_block_that_was_not_over(config, tmp_path):
    responses = responses_of(tmp_path, rows_for_ten())
    whole = evaluated(
        config.model_copy(update={"root": tmp_path / "whole"}), candidates_of(*THREE), responses, server=server_of()
    )
    server = server_of()
    inner = server.answer

    def break_off(requests, *, concurrency):
        if len([event for event in server.events if event[0] == "use"]) == 5:  # the second block's second drafter
            raise KeyboardInterrupt
        return inner(requests, concurrency=concurrency)

    server.answer = break_off
    with pytest.raises(KeyboardInterrupt):
        evaluated(config, candidates_of(*THREE), responses, server=server)
    again = server_of()
    report = evaluated(config, candidates_of(*THREE), responses, server=again)
    assert [event[1] for event in again.events if event[0] == "use"] == [*reversed(THREE), "champion"]
    assert not (report.folder / "sittings").exists()
    tables = [read_tables(r.folder, r.manifest.shards, ACCEPTANCE).to_pylist() for r in (whole, report)]
    assert tables[0] == tables[1]


def test_case_9_settings_that_move_between_sittings_are_refused_with_both_values(config, tmp_path):
    server = server_of(changes={"challenger": {"chat_template": "think-on"}})
    with pytest.raises(FingerprintError, match=r"chat_template: None != 'think-on'"):
        evaluated(config, candidates_of(*THREE), responses_of(tmp_path, rows_for_ten()), server=server)


def test_case_9_the_fingerprint_names_everything_that_moves_acceptance(config, tmp_path):
    settings = evaluated(
        config, candidates_of(*THREE), responses_of(tmp_path, rows_for_ten()), server=server_of()
    ).manifest.settings
    assert settings["target"]["chat_template"] == "think-off"
    assert settings["target"]["weights"] == "w"
    assert (settings["block_size"], settings["max_tokens"], settings["sampling"]) == (4, 25, {"temperature": 0.0})
    assert settings["engine"] == "scripted"
    with pytest.raises(FingerprintError, match="max_tokens: 25 != 26"):
        require_same_settings(settings, settings | {"max_tokens": 26}, where="two reports")


def test_case_9_other_rendered_prompts_are_another_fingerprint(config, tmp_path):
    thinking = [response(i, prompt=[i + 1, 7, 8, 9]) for i in range(10)]
    one = evaluated(
        config, candidates_of(*THREE), responses_of(tmp_path / "a", rows_for_ten()), server=server_of()
    ).manifest.settings
    other_root = config.model_copy(update={"root": tmp_path / "b"})
    other = evaluated(
        other_root, candidates_of(*THREE), responses_of(tmp_path / "b", thinking), server=server_of()
    ).manifest.settings
    with pytest.raises(FingerprintError, match="prompts: "):
        require_same_settings(one, other, where="two reports")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 8}, "block_size: 4 != 8"),
        ({"mask_token_id": 5}, "mask_token_id: 2 != 5"),
        ({"fingerprint": TARGET.model_copy(update={"target_layer_ids": (1, 4)})}, r"\[1, 3\] != \[1, 4\]"),
    ],
)
def test_drafters_that_cannot_share_an_engine_are_refused_for_a_promotion(changed, message):
    with pytest.raises(FingerprintError, match=message):
        evaluate.require_one_engine(candidates_of("champion", "challenger", challenger=changed))


def test_a_drafter_of_another_target_is_refused_before_anything_is_served(config, tmp_path):
    server = server_of()
    other = {"fingerprint": TARGET.model_copy(update={"weights": "x"})}
    with pytest.raises(FingerprintError, match="weights: x != w"):
        evaluated(
            config, candidates_of(*THREE, challenger=other), responses_of(tmp_path, rows_for_ten()), server=server
        )
    assert server.events == []


def with_evaluate(config, **changes):
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=changes)})


def reports_of(root):
    return sorted(path.parent.name for path in (root / "reports").glob("*/manifest.json"))


def test_another_engine_other_weights_or_other_slices_are_another_measurement(config, tmp_path):
    rows = rows_for_ten()
    pair = candidates_of("champion", "challenger")
    evaluated(config, pair, responses_of(tmp_path, rows), server=server_of())
    evaluated(config, pair, responses_of(tmp_path / "2", rows), server=server_of(plan={"kv_cache_dtype": "fp8"}))
    heavier = [row | {"weight": 9} for row in rows]
    evaluated(config, pair, responses_of(tmp_path / "3", heavier), server=server_of())
    moved = [row | {"slices": json.dumps({"route": "other"})} for row in rows]
    evaluated(config, pair, responses_of(tmp_path / "4", moved), server=server_of())
    tuned = TARGET.model_copy(update={"weights": "tuned"})
    free = candidates_of("champion", "challenger", champion={"fingerprint": None}, challenger={"fingerprint": None})
    evaluated(config, free, responses_of(tmp_path / "5", rows), server=server_of())
    evaluated(config, free, responses_of(tmp_path / "6", rows, fingerprint=tuned), server=server_of())
    # Without fingerprints of their own these drafters have the same ids: the target alone tells the last two apart.
    assert len(reports_of(tmp_path)) == 5


def test_one_role_that_fails_often_stops_the_stage_whatever_the_others_answer(config, tmp_path):
    server = server_of()
    inner = server._reply

    def reply(request):
        failing = server.role == "challenger" and request["prompt"][0] in (1, 2, 3)
        return ScriptedReply([], None, None, error="HTTP 500") if failing else inner(request)

    server._reply = reply
    responses = responses_of(tmp_path, [response(i) for i in range(30)])
    with pytest.raises(StageError, match=r"3 of the challenger's 30 requests failed .*HTTP 500.*evaluate again"):
        evaluated(config, candidates_of(*THREE), responses, server=server)
    # A server that is well again is asked again: nothing of the bad try is built on.
    assert evaluated(config, candidates_of(*THREE), responses, server=server_of()).manifest.counts["failed"] == 0


def test_what_was_served_nine_times_counts_nine_times_in_the_traffic_alone(config, tmp_path):
    rows = [response(0, max_tokens=25) | {"weight": 9}, response(1, max_tokens=5) | {"weight": 1}]
    measured = evaluated(
        config, candidates_of("champion", "challenger"), responses_of(tmp_path, rows), server=server_of()
    ).manifest.measured["challenger"]
    # Budget 25: 6 steps of 4 tokens; budget 5: one step.
    assert (measured["num_tokens"], measured["num_drafts"]) == (30, 7)
    assert measured["traffic"]["num_requests"] == 10
    assert measured["traffic"]["emitted_tokens_per_step"] == (9 * 24 + 4) / (9 * 6 + 1)


def test_a_clear_win_ends_the_sittings_early_and_the_looks_are_on_record(config, tmp_path):
    rows = [response(i, max_tokens=20 + i % 7) for i in range(200)]
    early = with_evaluate(config, early_stop=True, blocks=10)
    lenient = early.gate.model_copy(
        update={"min_clusters": 10, "resamples": 1000, "require_walk": False, "min_speed_ratio": 0.01}
    )
    early = early.model_copy(update={"gate": lenient})
    report = evaluated(
        early, candidates_of("champion", "challenger"), responses_of(tmp_path, rows), server=server_of()
    ).manifest
    assert report.counts["planned"] == 200
    assert report.counts["prompts"] < 200
    *before, last = report.looks
    assert all(look["settled"] is None for look in before)
    assert last["settled"] == "promote"
    assert last["fraction"] == report.counts["prompts"] / 200


def test_where_only_restarts_are_possible_the_champion_comes_twice_and_the_drift_is_reported(config, tmp_path):
    server = server_of(can_swap=False, changes={"challenger": {"speculation": {"num_speculative_tokens": 7}}})
    candidates = candidates_of("champion", "challenger", challenger={"block_size": 8})
    report = evaluated(config, candidates, responses_of(tmp_path, rows_for_ten()), server=server).manifest
    assert [event[1] for event in server.events if event[0] == "use"] == ["champion", "challenger", "champion"]
    assert report.counts["requests"] == 20  # the second visit is for the drift alone
    assert report.drift["emitted_tokens_per_step"] == 1.0
    assert report.drift["tokens_per_s"] > 0
    assert report.looks == []


def test_the_target_alone_emits_one_token_a_step(config, tmp_path):
    server = server_of(can_swap=False)
    inner = server._reply

    def reply(request):
        found = inner(request)
        found.spec = found.spec if server.role == "challenger" else None
        return found

    server._reply = reply
    candidates = candidates_of("challenger") | {"champion": None}
    report = evaluated(config, candidates, responses_of(tmp_path, rows_for_ten()), server=server).manifest
    assert report.parents["champion"] == "none"
    champion, challenger = report.measured["champion"], report.measured["challenger"]
    assert (champion["emitted_tokens_per_step"], champion["served_acceptance_length"]) == (1.0, 1.0)
    assert (champion["flagged"], challenger["emitted_tokens_per_step"]) == ({}, 4.0)


def test_case_74_there_is_no_evaluation_without_the_champion(config, tmp_path):
    with pytest.raises(StageError, match="no champion"):
        evaluated(config, candidates_of("challenger"), responses_of(tmp_path, rows_for_ten()), server=server_of())


def test_case_72_prompts_that_end_in_loops_are_not_served(config, tmp_path):
    rows = [response(i, reply=[9] * 40 if i < 3 else None) for i in range(10)]
    responses = responses_of(tmp_path, rows)
    served = gate_prompts.from_responses(config, responses, block_size=K + 1).gate
    assert [row["row_id"] for row in served] == [f"row{i:03d}" for i in range(3, 10)]


def test_budgets_keep_clear_of_the_contexts_end(config, tmp_path):
    rows = [
        response(0, prompt=[1] * 240),  # 256 - 240 - 4 = 12 tokens are left
        response(1, prompt=[1] * 252),  # none
        response(2, max_tokens=10),  # the request's own limit
        response(3),
        response(4, split="validation"),
    ]
    served = gate_prompts.from_responses(config, responses_of(tmp_path, rows), block_size=4).gate
    assert {row["row_id"]: row["num_tokens"] for row in served} == {"row000": 12, "row002": 10, "row003": 25}


def test_at_most_the_configured_prompts_are_served_and_always_the_same(config, tmp_path):
    responses = responses_of(tmp_path, list(reversed(rows_for_ten())))
    few = with_evaluate(config, max_prompts=4)
    assert [r["row_id"] for r in gate_prompts.from_responses(few, responses, block_size=4).gate] == [
        f"row{i:03d}" for i in range(4)
    ]


def test_no_gate_rows_stop_the_stage(config, tmp_path):
    responses = responses_of(tmp_path, [response(0, split="train")])
    with pytest.raises(StageError, match="no usable gate rows"):
        evaluated(config, candidates_of(*THREE), responses, server=server_of())


def test_a_failed_request_is_flagged_for_all_roles_and_many_stop_the_stage(config, tmp_path):
    rows = [response(i) for i in range(30)]
    responses = responses_of(tmp_path, rows)
    report = evaluated(config, candidates_of(*THREE), responses, server=server_of(fail={1})).manifest
    assert report.measured["champion"]["flagged"] == {"failed": 1}
    assert report.measured["champion"]["num_requests"] == 29
    other = config.model_copy(update={"root": tmp_path / "other"})
    with pytest.raises(StageError, match="HTTP 500"):
        evaluated(other, candidates_of(*THREE), responses, server=server_of(fail={1, 2, 3}))
    assert not list((tmp_path / "other" / "reports").glob("*/manifest.json"))


def test_replies_unlike_the_champions_are_counted(config, tmp_path):
    server = server_of()
    inner = server._reply

    def reply(request):
        found = inner(request)
        if server.role == "control" and request["prompt"][0] in (2, 5):
            found.token_ids[-1] += 1
        return found

    server._reply = reply
    measured = evaluated(
        config, candidates_of(*THREE), responses_of(tmp_path, rows_for_ten()), server=server
    ).manifest.measured
    assert {role: one["num_replies_different"] for role, one in measured.items()} == {
        "champion": 0,
        "challenger": 0,
        "control": 2,
    }


def test_a_report_is_plain_json(config, tmp_path):
    report = evaluated(
        config, candidates_of("champion", "challenger"), responses_of(tmp_path, rows_for_ten()), server=server_of()
    )
    json.loads((report.folder / "manifest.json").read_text(), parse_constant=lambda name: pytest.fail(name))
