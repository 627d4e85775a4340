"""Regeneration: exact ids by row id, one bad row rejected alone, parts that a crash cannot take back."""

import json

import pyarrow as pa
import pytest

from pipeline import regenerate, stages
from pipeline.artifacts import PromptSet
from pipeline.config import Config
from pipeline.engines import Reply
from pipeline.errors import StageError
from pipeline.schemas import PROMPTS, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from tests.pipeline.scripted_engines import ScriptedEngines
from tests.tiny import tiny_target

FRAME = 4  # tokens that the template adds around a prompt's bytes: BOS, user, end, assistant
BLOCK = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), layers=1)


def config_for(model, root, *, context=64, **settings):
    return Config.model_validate(
        {
            "root": root,
            "target": {"model": model, "dtype": "float32", "max_model_len": context + BLOCK},
            "drafter": {"block_size": BLOCK},
            "regenerate": {"rows_per_part": 2, "max_reject_share": 0.5, **settings},
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
        "messages": json.dumps([{"role": "user", "content": "a" * (num_tokens - FRAME)}]),
        "tools": None,
        "template_args": "{}",
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 16,
        "source": f"log.jsonl:{number}",
        **changes,
    }


def prompt_set(root, rows):
    def build(folder, derivation):
        writer = PartWriter(folder)
        table = pa.Table.from_pylist(rows, schema=PROMPTS)
        writer.commit(0, {"prompts-00000.parquet": (len(rows), write_table(table))})
        return PromptSet(derivation_id=derivation, parents={}, shards=writer.finish(1)[0])

    return stages.complete(root, PromptSet, stage="collect", version=1, parents={}, meaning={"rows": rows}, build=build)


def answer(request):
    return Reply(request.row_id, (5, 6, 1), "stop")


def run(model, root, rows, engines, **settings):
    return regenerate.run(config_for(model, root, **settings), prompt_set(root, rows), engines=engines)


def rows_of(artifact):
    table = read_tables(artifact.folder, artifact.manifest.shards, RESPONSES)
    return {row["row_id"]: row for row in table.to_pylist()}


def rejects_of(artifact):
    lines = (artifact.folder / "rejects.jsonl").read_text().splitlines()
    return {reject["row_id"]: reject for reject in map(json.loads, lines)}


def test_a_too_long_prompt_is_rejected_alone_and_a_large_budget_is_clamped(model, tmp_path):
    rows = [prompt(n, num_tokens={3: 80, 4: 60}.get(n, 10)) for n in range(1, 6)]
    artifact = run(model, tmp_path, rows, ScriptedEngines(answer))
    assert rejects_of(artifact) == {
        "row-3": {
            "row_id": "row-3",
            "source": "log.jsonl:3",
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
        run(model, tmp_path, rows, ScriptedEngines(answer))


def test_ids_that_decode_and_encode_to_others_are_kept_as_emitted(model, tmp_path):
    # "Ġ" + "w300" is one token of the vocabulary that no text encodes to.
    artifact = run(model, tmp_path, [prompt(1)], ScriptedEngines(lambda r: Reply(r.row_id, (300, 301), "length")))
    assert rows_of(artifact)["row-1"]["response_ids"] == [300, 301]


def test_a_reply_without_ids_is_rejected_and_not_encoded_again(model, tmp_path):
    def no_ids_for_one(request):
        return Reply(request.row_id, (), "stop") if request.row_id == "row-1" else answer(request)

    artifact = run(model, tmp_path, [prompt(1), prompt(2)], ScriptedEngines(no_ids_for_one))
    assert list(rows_of(artifact)) == ["row-2"] and artifact.manifest.rejects == {"no_reply": 1}


def test_a_missing_reply_and_an_error_are_counted_and_replies_are_matched_by_id(model, tmp_path):
    def scripted(request):
        number = int(request.row_id.split("-")[1])
        if number == 1:
            return None
        return Reply(request.row_id, error="boom") if number == 2 else Reply(request.row_id, (number,), "length")

    artifact = run(model, tmp_path, [prompt(n) for n in range(1, 7)], ScriptedEngines(scripted), rows_per_part=6)
    assert {row_id: row["response_ids"] for row_id, row in rows_of(artifact).items()} == {
        f"row-{n}": [n] for n in range(3, 7)
    }
    assert rejects_of(artifact)["row-2"]["detail"] == "boom" and artifact.manifest.rejects == {"no_reply": 2}


def test_finish_reasons_and_tokens_are_counted(model, tmp_path):
    def scripted(request):
        return Reply(request.row_id, (5, 6), "length") if request.row_id == "row-0" else answer(request)

    artifact = run(model, tmp_path, [prompt(n) for n in range(3)], ScriptedEngines(scripted))
    counts = artifact.manifest.counts
    assert (counts["finish_length"], counts["finish_stop"], counts["response_tokens"]) == (1, 2, 8)


def test_a_rows_seed_depends_on_the_row_and_not_on_its_place(model, tmp_path):
    first, second = ScriptedEngines(answer), ScriptedEngines(answer)
    run(model, tmp_path / "a", [prompt(1), prompt(2)], first)
    run(model, tmp_path / "b", [prompt(2), prompt(3), prompt(1)], second)
    seeds = [{request.row_id: request.seed for request in engines.requests} for engines in (first, second)]
    assert seeds[0]["row-1"] == seeds[1]["row-1"] and seeds[0]["row-2"] == seeds[1]["row-2"]
    assert len(set(seeds[1].values())) == 3


def test_the_requests_own_temperature_holds_unless_the_config_names_one(model, tmp_path):
    rows = [prompt(1, temperature=0.5), prompt(2, temperature=None, top_p=None, max_tokens=None)]
    own, overridden = ScriptedEngines(answer), ScriptedEngines(answer)
    run(model, tmp_path, rows, own)
    run(model, tmp_path, rows, overridden, temperature=0.0)
    assert [(r.temperature, r.top_p) for r in own.requests] == [(0.5, 1.0), (None, None)]
    assert [r.temperature for r in overridden.requests] == [0.0, 0.0]


def test_replies_that_are_measured_are_greedy_whatever_their_request_asked_for(model, tmp_path):
    engines = ScriptedEngines(answer)
    run(model, tmp_path, [prompt(1, temperature=0.5), prompt(2, temperature=0.5, split="gate")], engines)
    assert {request.row_id: request.temperature for request in engines.requests} == {"row-1": 0.5, "row-2": 0.0}


def test_a_rerun_computes_what_is_missing_and_then_nothing(model, tmp_path):
    rows = [prompt(n) for n in range(10)]

    def dies_at_the_fifth(request):
        if request.row_id == "row-4":
            raise KeyboardInterrupt
        return answer(request)

    first, second, third = ScriptedEngines(dies_at_the_fifth), ScriptedEngines(answer), ScriptedEngines(answer)
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
