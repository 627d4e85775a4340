"""Regeneration: exact ids by row id, one bad row rejected alone, parts that no crash takes back, states in the pass."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline import answering, cache_parts, capture, regenerate, stages
from pipeline.artifacts import PromptSet
from pipeline.config import Config
from pipeline.engines import CaptureRequest, GenerateRequest, Reply
from pipeline.errors import StageError
from pipeline.fingerprint import fingerprint_id, target_fingerprint
from pipeline.schemas import CACHE, PROMPTS, RESPONSES
from pipeline.shards import PartWriter, part_path, read_part, read_tables, write_table
from pipeline.states import StatesFile
from tests.pipeline.scripted_engines import HIDDEN, ScriptedEngines
from tests.tiny import tiny_target

FRAME = 4  # tokens that the template adds around a prompt's bytes: BOS, user, end, assistant
BLOCK = 8
LAYERS = (0,)
SOUND = {
    "layer_0_error": 0.0,
    "layer_0_nearest": 0.0,
    "layer_0_norm": 1.0,
    "batched_error": 0.0,
    "answered_error": 0.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), layers=1)


def config_for(model, root, *, context=64, capture=None, **settings):
    return Config.model_validate(
        {
            "root": root,
            "target": {"model": model, "dtype": "float32", "max_model_len": context + BLOCK},
            "drafter": {"block_size": BLOCK},
            "collect": {"served_models": ["target"]},
            "regenerate": {"rows_per_part": 2, "max_reject_share": 0.5, **settings},
            "capture": {"max_reject_share": 0.9, **(capture or {})},
        }
    )


def prompt(number, *, num_tokens=10, **changes):
    """A row whose rendered prompt has exactly ``num_tokens`` ids (a byte a token)."""
    return {
        "row_id": f"row-{number}",
        "conversation": f"conversation-{number}",
        "split": "train",
        "slice": "mails",
        "weight": 1,
        "inclusion_probability": 1.0,
        "messages": json.dumps([{"role": "user", "content": chr(97 + number) * (num_tokens - FRAME)}]),
        "tools": None,
        "template_args": "{}",
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 16,
        "sampling": "{}",
        **changes,
    }


def prompt_set(root, rows, *, files=1):
    """The rows in so many Parquet files, of unlike sizes."""

    def build(folder, derivation):
        writer = PartWriter(folder)
        cuts = [0, *(len(rows) * n // files - n % 2 for n in range(1, files)), len(rows)]
        for index, (start, stop) in enumerate(pairwise(cuts)):
            table = pa.Table.from_pylist(rows[start:stop], schema=PROMPTS)
            writer.commit(index, {f"prompts-{index:05d}.parquet": (len(table), write_table(table))})
        return PromptSet(derivation_id=derivation, parents={}, shards=writer.finish(files)[0])

    meaning = {"rows": rows}
    return stages.complete(root, PromptSet, stage="collect", version=1, parents={}, meaning=meaning, build=build)


def answer(request):
    return Reply(request.row_id, (5, 6, 1), "stop")


def words_of(row_id, ids):
    """States of one layer, others for every other input."""
    generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
    values = torch.randn(len(ids) - 1, 1, HIDDEN, generator=generator)
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def scripted(model, reply=answer, states=words_of, **settings):
    return ScriptedEngines(reply, states, check=SOUND, model=model, **settings)


def run(model, root, rows, engines, *, layers=(), files=1, **settings):
    config = config_for(model, root, **settings)
    return regenerate.run(config, prompt_set(root, rows, files=files), engines=engines, target_layer_ids=layers)


def run_capture(model, root, responses, engines, **settings):
    config = config_for(model, root, **settings)
    return capture.run(config, responses, engines=engines, target_layer_ids=LAYERS)


def rows_of(artifact):
    table = read_tables(artifact.folder, artifact.manifest.shards, RESPONSES)
    return {row["row_id"]: row for row in table.to_pylist()}


def rejects_of(artifact):
    lines = (artifact.folder / "rejects.jsonl").read_text().splitlines()
    return {reject["row_id"]: reject for reject in map(json.loads, lines)}


def test_a_too_long_prompt_is_rejected_alone_and_a_large_budget_is_clamped(model, tmp_path):
    rows = [prompt(n, num_tokens={3: 80, 4: 60}.get(n, 10)) for n in range(1, 6)]
    artifact = run(model, tmp_path, rows, scripted(model, answer))
    assert rejects_of(artifact) == {
        "row-3": {
            "row_id": "row-3",
            "reason": "prompt_too_long",
            "prompt_tokens": 80,
            "usable_context": 64,
        }
    }
    kept = rows_of(artifact)
    assert {row_id: (row["max_tokens"], row["clamped"]) for row_id, row in kept.items()} == {
        "row-1": (16, False),
        "row-2": (16, False),
        "row-4": (4, True),
        "row-5": (16, False),
    }
    assert artifact.manifest.rejects == {"prompt_too_long": 1} and artifact.manifest.counts["clamped"] == 1


def test_too_many_rejects_stop_the_stage(model, tmp_path):
    rows = [prompt(n, num_tokens=80 if n < 3 else 10) for n in range(4)]
    with pytest.raises(StageError, match=r"3 of 4 rows rejected.*prompt_too_long.*max_reject_share"):
        run(model, tmp_path, rows, scripted(model, answer))


def test_ids_that_decode_and_encode_to_others_are_kept_as_emitted(model, tmp_path):
    # "Ġ" + "w300" is one token of the vocabulary that no text encodes to.
    artifact = run(model, tmp_path, [prompt(1)], scripted(model, lambda r: Reply(r.row_id, (300, 301), "length")))
    assert rows_of(artifact)["row-1"]["response_ids"] == [300, 301]


def test_a_reply_without_ids_is_rejected_and_not_encoded_again(model, tmp_path):
    def no_ids_for_one(request):
        return Reply(request.row_id, (), "stop") if request.row_id == "row-1" else answer(request)

    artifact = run(model, tmp_path, [prompt(1), prompt(2)], scripted(model, no_ids_for_one))
    assert list(rows_of(artifact)) == ["row-2"] and artifact.manifest.rejects == {"no_reply": 1}


def test_a_missing_reply_and_an_error_are_counted_and_replies_are_matched_by_id(model, tmp_path):
    def mixed(request):
        number = int(request.row_id.split("-")[1])
        if number == 1:
            return None
        return Reply(request.row_id, error="boom") if number == 2 else Reply(request.row_id, (number,), "length")

    artifact = run(model, tmp_path, [prompt(n) for n in range(1, 7)], scripted(model, mixed), rows_per_part=6)
    assert {row_id: row["response_ids"] for row_id, row in rows_of(artifact).items()} == {
        f"row-{n}": [n] for n in range(3, 7)
    }
    assert rejects_of(artifact)["row-2"]["detail"] == "boom" and artifact.manifest.rejects == {"no_reply": 2}


def test_finish_reasons_and_tokens_are_counted(model, tmp_path):
    def mixed(request):
        return Reply(request.row_id, (5, 6), "length") if request.row_id == "row-0" else answer(request)

    artifact = run(model, tmp_path, [prompt(n) for n in range(3)], scripted(model, mixed))
    counts = artifact.manifest.counts
    assert (counts["finish_length"], counts["finish_stop"], counts["response_tokens"]) == (1, 2, 8)


def test_a_rows_seed_depends_on_the_row_and_not_on_its_place(model, tmp_path):
    first, second = scripted(model, answer), scripted(model, answer)
    run(model, tmp_path / "a", [prompt(1), prompt(2)], first)
    run(model, tmp_path / "b", [prompt(2), prompt(3), prompt(1)], second)
    seeds = [{request.row_id: request.seed for request in engines.requests} for engines in (first, second)]
    assert seeds[0]["row-1"] == seeds[1]["row-1"] and seeds[0]["row-2"] == seeds[1]["row-2"]
    assert len(set(seeds[1].values())) == 3


def test_the_requests_own_temperature_holds_unless_the_config_names_one(model, tmp_path):
    rows = [prompt(1, temperature=0.5), prompt(2, temperature=None, top_p=None, max_tokens=None)]
    own, overridden = scripted(model, answer), scripted(model, answer)
    run(model, tmp_path, rows, own)
    run(model, tmp_path, rows, overridden, temperature=0.0)
    assert [(r.temperature, r.top_p) for r in own.requests] == [(0.5, 1.0), (None, None)]
    assert [r.temperature for r in overridden.requests] == [0.0, 0.0]


def test_replies_that_are_measured_are_greedy_whatever_their_request_asked_for(model, tmp_path):
    engines = scripted(model, answer)
    run(model, tmp_path, [prompt(1, temperature=0.5), prompt(2, temperature=0.5, split="gate")], engines)
    assert {request.row_id: request.temperature for request in engines.requests} == {"row-1": 0.5, "row-2": 0.0}


def test_a_rerun_computes_what_is_missing_and_then_nothing(model, tmp_path):
    rows = [prompt(n) for n in range(10)]

    def dies_at_the_fifth(request):
        if request.row_id == "row-4":
            raise KeyboardInterrupt
        return answer(request)

    first, second, third = scripted(model, dies_at_the_fifth), scripted(model, answer), scripted(model, answer)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, rows, first)
    (folder,) = [path for path in (tmp_path / "responses").iterdir() if path.is_dir()]
    committed = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.glob("*.parquet"))}
    assert len(committed) == 2
    artifact = run(model, tmp_path, rows, second)
    assert [request.row_id for request in second.requests] == [f"row-{n}" for n in range(4, 10)]
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in committed} == committed
    assert list(rows_of(artifact)) == [f"row-{n}" for n in range(10)]
    run(model, tmp_path, rows, third)
    assert third.requests == []


def test_only_the_rows_of_a_part_are_read_wherever_they_lie(model, tmp_path):
    rows = [prompt(n) for n in range(11)]
    engines = scripted(model)
    artifact = run(model, tmp_path, rows, engines, files=4, rows_per_part=3)
    assert engines.asked(GenerateRequest) == list(rows_of(artifact)) == [f"row-{n}" for n in range(11)]
    assert len(list(artifact.folder.glob("*.parquet"))) == 4


QUANTIZED, COMPILED = {"engine_args": {"quantization": "fp8"}}, {"engine_args": {"enforce_eager": False}}


def test_how_it_is_run_is_no_other_work_and_what_is_asked_is(model, tmp_path):
    rows = [prompt(1)]
    first = run(model, tmp_path, rows, scripted(model))
    for same in ({"num_engines": 3}, {"speculate": "champion"}, COMPILED, {"capture": {"in_pass": False}}):
        assert run(model, tmp_path, rows, scripted(model), **same).id == first.id
    for other in ({"max_tokens": 3}, {"temperature": 0.5}, {"seed": 1}, {"rows_per_part": 3}, QUANTIZED):
        assert run(model, tmp_path, rows, scripted(model), **other).id != first.id


def test_accepted_drafts_a_step_are_kept_and_counted(model, tmp_path):
    def drafted(request):
        return Reply(
            request.row_id, (5, 6, 7, 1), "stop", accepted_per_step=(2, 0) if request.row_id == "row-1" else None
        )

    artifact = run(model, tmp_path, [prompt(1), prompt(2)], scripted(model, drafted))
    assert {row_id: row["accepted_per_step"] for row_id, row in rows_of(artifact).items()} == {
        "row-1": [2, 0],
        "row-2": None,
    }
    assert (artifact.manifest.counts["draft_steps"], artifact.manifest.counts["accepted_tokens"]) == (2, 2)


def test_rejects_beyond_the_limit_stop_the_run_before_the_other_parts(model, tmp_path):
    engines = scripted(model, lambda request: Reply(request.row_id, error="boom"))
    with pytest.raises(StageError, match=r"6 of 20 rows rejected.*no_reply.*regenerate.max_reject_share"):
        run(model, tmp_path, [prompt(n) for n in range(20)], engines, max_reject_share=0.25)
    assert len(engines.requests) == 6


def test_a_reply_on_record_stands_for_an_answer_and_its_states_are_read_beside_the_others(model, tmp_path):
    served_by = fingerprint_id(target_fingerprint(model, dtype="float32", target_layer_ids=()))
    on_record = {"served_by": served_by, "served_ids": [9, 9, 1], "served_finish_reason": "stop"}
    own_ids = run(model, tmp_path / "ids", [prompt(2)], scripted(model))
    prompt_ids = rows_of(own_ids)["row-2"]["prompt_ids"]
    rows = [prompt(1), prompt(2, served_prompt_ids=prompt_ids, **on_record), prompt(3)]
    engines = scripted(model)
    artifact = run(model, tmp_path, rows, engines, layers=LAYERS, rows_per_part=3, reuse="exact")
    found = rows_of(artifact)
    assert {row_id: row["origin"] for row_id, row in found.items()} == {
        "row-1": "target",
        "row-2": "served",
        "row-3": "target",
    }
    assert found["row-2"]["response_ids"] == [9, 9, 1] and artifact.manifest.counts["served"] == 1
    assert engines.asked(GenerateRequest) == ["row-1", "row-3"]
    cache = run_capture(model, tmp_path, artifact, scripted(model), reuse="exact")
    assert {row["row_id"]: row["ids"] for row in states_of(cache)} == {
        row_id: row["prompt_ids"] + row["response_ids"] for row_id, row in found.items()
    }


def states_of(cache):
    return read_tables(cache.folder, cache.manifest.shards, CACHE).to_pylist()


def test_states_are_kept_in_the_pass_and_capture_finds_them(model, tmp_path):
    rows = [prompt(n) for n in range(5)]
    engines = scripted(model)
    artifact = run(model, tmp_path, rows, engines, layers=LAYERS)
    assert len(engines.checked) == 1 and engines.asked(GenerateRequest) == [f"row-{n}" for n in range(5)]
    later = scripted(model)
    cache = run_capture(model, tmp_path, artifact, later)
    assert later.requests == [] and later.checked == []
    replies = rows_of(artifact)
    for row in states_of(cache):
        assert row["ids"] == replies[row["row_id"]]["prompt_ids"] + replies[row["row_id"]]["response_ids"]
        words = StatesFile(cache.folder / row["states_file"]).words(row["states_batch"])
        assert words.tobytes() == words_of("", row["ids"]).tobytes()
    assert len(states_of(cache)) == 5
    assert cache.manifest.capture_check == SOUND | {"sampled_error": 0.0, "sampled_largest_error": 0.0}


def test_a_row_with_holes_in_the_pass_is_read_once_more_in_its_part(model, tmp_path):
    engines = scripted(model, in_pass=lambda row_id: row_id != "row-2")
    artifact = run(model, tmp_path, [prompt(n) for n in range(4)], engines, layers=LAYERS, capture={"check_every": 9})
    sampled = 1  # of part 0
    assert "row-2" in engines.asked(CaptureRequest) and len(engines.asked(CaptureRequest)) == 1 + sampled
    cache = run_capture(model, tmp_path, artifact, scripted(model))
    assert sorted(row["row_id"] for row in states_of(cache)) == [f"row-{n}" for n in range(4)]


@pytest.mark.parametrize("how", [{"in_pass": False}, {"stream": True, "max_bytes": 1000}])
def test_without_the_pass_or_with_a_stream_no_states_are_kept(model, tmp_path, how):
    engines = scripted(model)
    run(model, tmp_path, [prompt(1)], engines, layers=LAYERS, capture=how)
    assert not (tmp_path / "states").exists() and engines.checked == []


def test_a_kill_between_replies_and_states_costs_one_prefill_of_that_part(model, tmp_path, monkeypatch):
    rows = [prompt(n) for n in range(6)]
    commit_part, states_commits = cache_parts.commit_part, []

    def dies_before_the_second(*arguments, **settings):
        states_commits.append(arguments)
        if len(states_commits) == 2:
            raise KeyboardInterrupt
        return commit_part(*arguments, **settings)

    monkeypatch.setattr(cache_parts, "commit_part", dies_before_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, rows, scripted(model), layers=LAYERS)
    monkeypatch.undo()
    engines, later = scripted(model), scripted(model)
    artifact = run(model, tmp_path, rows, engines, layers=LAYERS)
    assert engines.asked(GenerateRequest) == ["row-4", "row-5"]
    cache = run_capture(model, tmp_path, artifact, later)
    assert set(later.asked(CaptureRequest)) == {"row-2", "row-3"} and later.asked(GenerateRequest) == []
    assert sorted(row["row_id"] for row in states_of(cache)) == [f"row-{n}" for n in range(6)]


def test_states_of_replies_that_were_removed_are_made_anew_with_them(model, tmp_path):
    rows = [prompt(n) for n in range(4)]
    artifact = run(model, tmp_path, rows, scripted(model), layers=LAYERS)
    cache = run_capture(model, tmp_path, artifact, scripted(model))
    for path in artifact.folder.iterdir():
        path.unlink()

    def other(request):
        return Reply(request.row_id, (8, 8, 8, 1), "stop")

    again = run(model, tmp_path, rows, scripted(model, other), layers=LAYERS)
    assert again.id == artifact.id
    later = scripted(model)
    assert {tuple(row["ids"][-4:]) for row in states_of(run_capture(model, tmp_path, again, later))} == {(8, 8, 8, 1)}
    assert later.requests == [] and cache.folder.exists()


def test_a_complete_cache_is_made_again_with_replies_that_were_made_anew_outside_of_the_pass(model, tmp_path):
    rows = [prompt(n) for n in range(4)]
    artifact = run(model, tmp_path, rows, scripted(model), layers=LAYERS)
    cache = run_capture(model, tmp_path, artifact, scripted(model))
    shutil.rmtree(artifact.folder)

    def other(request):
        return answer(request) if request.row_id == "row-0" else Reply(request.row_id, (8, 8, 8, 1), "stop")

    again = run(model, tmp_path, rows, scripted(model, other))
    found = run_capture(model, tmp_path, again, later := scripted(model))
    assert (again.id, found.id) == (artifact.id, cache.id)
    assert {row["row_id"]: tuple(row["ids"][10:]) for row in states_of(found)} == {
        row_id: tuple(row["response_ids"]) for row_id, row in rows_of(again).items()
    }
    assert set(later.asked(CaptureRequest)) == {f"row-{n}" for n in range(4)}
    run_capture(model, tmp_path, again, finds := scripted(model))
    assert finds.requests == []


def test_a_pass_whose_states_are_all_bad_stops_while_it_runs(model, tmp_path):
    engines = scripted(model, states=lambda *row: words_of(*row) * 0)
    with pytest.raises(StageError, match=r"6 of 20 rows rejected.*zero_states.*capture.max_reject_share"):
        run(
            model,
            tmp_path,
            [prompt(n) for n in range(20)],
            engines,
            layers=LAYERS,
            capture={"max_reject_share": 0.25},
        )
    assert len(engines.asked(GenerateRequest)) == 6


def test_one_row_without_sound_states_is_answered_all_the_same(model, tmp_path):
    engines = scripted(model, states=lambda row_id, ids: words_of(row_id, ids) * (row_id != "row-1"))
    artifact = run(model, tmp_path, [prompt(n) for n in range(4)], engines, layers=LAYERS)
    assert len(rows_of(artifact)) == 4
    cache = run_capture(model, tmp_path, artifact, scripted(model))
    assert cache.manifest.rejects == {"zero_states": 1} and len(states_of(cache)) == 3


def test_a_part_that_another_engine_has_committed_is_left_as_it_is(model, tmp_path):
    artifact = run(model, tmp_path, [prompt(n) for n in range(4)], scripted(model))
    record = part_path(artifact.folder, 1)
    before = (record.stat().st_mtime_ns, read_part(record))
    prompts = prompt_set(tmp_path, [prompt(n) for n in range(4)])
    config = config_for(model, tmp_path)
    work = answering.AnswerWork(config, prompts.folder, prompts.manifest.shards, artifact.folder, "", None)
    engines = scripted(model)
    (done,) = engines.run(work, [1])
    assert engines.requests == [] and (record.stat().st_mtime_ns, read_part(record)) == before
    assert (done.rows, done.tokens, done.tries) == (2, 6, 1)


def test_the_most_tokens_there_can_be_are_close_to_what_there_are_when_every_reply_is_as_long_as_it_may(
    model, tmp_path
):
    rows = [prompt(n, num_tokens=10 + n, max_tokens=3) for n in range(12)]
    artifact = run(model, tmp_path, rows, scripted(model))
    real = sum(len(row["prompt_ids"] + row["response_ids"]) for row in rows_of(artifact).values())
    prompts = prompt_set(tmp_path, rows)
    work = answering.AnswerWork(
        config_for(model, tmp_path), prompts.folder, prompts.manifest.shards, artifact.folder, "", None
    )
    assert real == sum(10 + n + 3 for n in range(12))
    assert work.max_tokens() == pytest.approx(real, rel=0.25)


def test_no_room_for_the_states_of_the_pass_stops_before_the_first_row(model, tmp_path):
    engines = scripted(model)
    with pytest.raises(StageError, match=r"at most .* of states as bf16.*capture.max_bytes = 1000"):
        run(model, tmp_path, [prompt(n) for n in range(8)], engines, layers=LAYERS, capture={"max_bytes": 1000})
    assert engines.requests == [] and engines.checked == []
