"""The engine pool: real engines on Ray Data answer and capture; dead ones are replaced, hopeless parts given up."""

import json
import os
import time
from functools import partial

import pyarrow as pa
import pytest
import torch

from bench.oracles.killed_replica import KillsOne, engine_processes
from jobs import capture, engines, regenerate
from jobs.engines import EnginePool
from jobs.session import ray_session
from pipeline import stages
from pipeline.artifacts import PromptSet, verify
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError
from pipeline.render import Renderer
from pipeline.schemas import CACHE, PROMPTS, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.states import StatesFile
from tests.jobs.frail_work import Frail, Refuses, dies_while_it_loads_once, does_not_start, starts
from tests.tiny import EOS_TOKEN_ID, TARGET_LAYER_IDS, tiny_target

NUM_ROWS = 24


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with ray_session():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return Config.model_validate(
        {
            "root": root,
            "target": {"model": tiny_target(root / "tiny"), "dtype": "float32", "max_model_len": 256},
            "drafter": {"target_layer_ids": TARGET_LAYER_IDS},
            "regenerate": {"rows_per_part": 4, "max_tokens": 100, "kv_cache_gib": 0.125, "max_reject_share": 0.5},
            "capture": {"check_every": 2},
        }
    )


@pytest.fixture(scope="module")
def prompts(config):
    """Greedy rows, hot rows that end their turn now and then, and one prompt that is far too long."""
    rows = [
        {
            "row_id": f"row-{n}",
            "conversation": f"conversation-{n}",
            "split": "train",
            "slice": "mails",
            "weight": 1,
            "inclusion_probability": 1.0,
            "messages": json.dumps([{"role": "user", "content": f"mail {n} " * (80 if n == 5 else 1)}]),
            "tools": None,
            "template_args": "{}",
            "temperature": 0.0 if n < 4 else 2.0,
            "top_p": 1.0,
            "max_tokens": 12 if n < 4 else 100,
            "sampling": "{}",
        }
        for n in range(NUM_ROWS)
    ]

    def build(folder, derivation):
        writer = PartWriter(folder)
        files = {"prompts-00000.parquet": (len(rows), write_table(pa.Table.from_pylist(rows, schema=PROMPTS)))}
        writer.commit(0, files)
        return PromptSet(derivation_id=derivation, parents={}, shards=writer.finish(1)[0])

    return stages.complete(config.root, PromptSet, stage="collect", version=1, parents={}, meaning={}, build=build)


@pytest.fixture(scope="module")
def responses(config, prompts):
    """Answered by two engines, one of which is killed as it begins the last part."""
    two = config.model_copy(update={"regenerate": config.regenerate.model_copy(update={"num_engines": 2})})
    pool = KillsOne(EnginePool(two, target_layer_ids=TARGET_LAYER_IDS))
    found = regenerate.run(two, prompts, engines=pool)
    assert pool.killed
    return found


def greedy(model, ids, num_tokens):
    """Plain greedy decoding without a cache."""
    ids = list(ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-num_tokens:]


def rows_of(artifact, schema):
    return read_tables(artifact.folder, artifact.manifest.shards, schema).to_pylist()


def test_all_rows_are_there_once_though_an_engine_was_killed_and_the_retry_is_counted(responses):
    ids = [row["row_id"] for row in rows_of(responses, RESPONSES)]
    assert sorted(ids) == sorted(f"row-{n}" for n in range(NUM_ROWS) if n != 5)
    assert responses.manifest.rejects == {"prompt_too_long": 1}
    assert responses.manifest.counts["retries"] >= 1
    assert engine_processes() == []


def test_greedy_replies_are_the_targets_own_argmax(config, responses):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(config.target.model, dtype=torch.float32)
    rows = [row for row in rows_of(responses, RESPONSES) if row["temperature"] == 0.0]
    assert len(rows) == 4
    for row in rows:
        expected = greedy(model, row["prompt_ids"], 12)
        assert row["response_ids"] == expected[: len(row["response_ids"])]


def test_the_end_of_turn_token_is_kept_on_stop_and_absent_on_length(responses):
    rows = rows_of(responses, RESPONSES)
    stopped = [row["response_ids"] for row in rows if row["finish_reason"] == "stop"]
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert stopped and cut and len(stopped) + len(cut) == len(rows)
    assert all(ids[-1] == EOS_TOKEN_ID and ids.count(EOS_TOKEN_ID) == 1 for ids in stopped)
    assert all(EOS_TOKEN_ID not in row["response_ids"] for row in cut)
    assert all(len(row["response_ids"]) == row["max_tokens"] for row in cut)


def test_the_engine_reads_the_same_prompt_ids_as_the_renderer_makes(config, responses, prompts):
    renderer = Renderer(config.target.model)
    rendered = {row["row_id"]: renderer.row_ids(row) for row in rows_of(prompts, PROMPTS)}
    assert all(row["prompt_ids"] == rendered[row["row_id"]] for row in rows_of(responses, RESPONSES))


def test_the_states_of_the_pass_are_those_of_a_plain_forward_pass(config, responses):
    from transformers import LlamaForCausalLM

    cache = capture.run(config, responses)  # an engine is begun only where the killed one left replies without states
    rows = rows_of(cache, CACHE)
    verify(cache.folder, cache.manifest)
    assert len(rows) == NUM_ROWS - 1 and cache.manifest.rejects == {}
    assert cache.manifest.fingerprint.target_layer_ids == TARGET_LAYER_IDS
    assert cache.manifest.num_states == sum(len(row["ids"]) - 1 for row in rows)
    assert all(cache.manifest.capture_check[f"layer_{layer}_error"] < 0.01 for layer in TARGET_LAYER_IDS)
    assert cache.manifest.capture_check["sampled_error"] < 0.01
    model = LlamaForCausalLM.from_pretrained(config.target.model, dtype=torch.float32)
    for row in rows:
        words = torch.from_numpy(StatesFile(cache.folder / row["states_file"]).words(row["states_batch"]).copy())
        states = words.view(torch.bfloat16).float()
        with torch.inference_mode():
            outputs = model.model(torch.tensor([row["ids"][:-1]]), output_hidden_states=True).hidden_states
        for index, layer in enumerate(TARGET_LAYER_IDS):
            expected = outputs[layer + 1][0]
            error = (states[:, index] - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.max() < 0.005, "more than rounding to 16 bits"


@pytest.fixture
def pool(config, monkeypatch):
    pool = EnginePool(config)
    monkeypatch.setattr(pool, "_start", starts)
    yield pool
    assert engine_processes() == [], "engines are left"


def test_a_dead_engine_is_replaced_and_every_part_done_once(pool, tmp_path):
    work = Frail(tmp_path, deaths=2)
    done = {one.index: one for one in pool.run(work, range(4))}
    assert {index: (one.rows, one.tokens) for index, one in done.items()} == dict.fromkeys(range(4), (1, 10))
    assert done[1].tries == work.calls(1) == 3


@pytest.mark.parametrize(("part", "last"), [(1, "ended without a word"), (6, "the engine is out of order")])
def test_a_part_that_no_engine_survives_is_given_up_by_its_name(pool, tmp_path, part, last):
    work = Frail(tmp_path, deaths=99)
    with pytest.raises(StageError, match=f"part {part} took down {engines.MAX_TRIES} engines in a row.*{last}"):
        list(pool.run(work, [part, 2, 3]))
    assert work.calls(part) == engines.MAX_TRIES


def test_an_engine_that_cannot_start_says_why_and_is_not_tried_again(pool, tmp_path):
    pool._start = does_not_start
    with pytest.raises(StageError, match=r"could not start: no such model$"):
        list(pool.run(Frail(tmp_path), [0, 1]))
    assert os.listdir(tmp_path) == []


def test_an_engine_that_dies_while_it_loads_is_started_again(pool, tmp_path):
    pool._start = partial(dies_while_it_loads_once, tmp_path / "marker")
    done = {one.index: one.tries for one in pool.run(Frail(tmp_path), [0, 1])}
    assert sorted(done) == [0, 1] and max(done.values()) == 2


def test_a_check_that_fails_at_the_beginning_is_made_once_and_ends_the_run(pool, tmp_path):
    with pytest.raises(StageError, match=r"^capture check failed: layer 1$"):
        list(pool.run(Refuses(tmp_path), [0, 1, 2]))
    assert (tmp_path / "checks").read_text() == "x" and os.listdir(tmp_path) == ["checks"]


def test_what_the_work_raises_on_purpose_reaches_the_driver_as_it_is(pool, tmp_path):
    with pytest.raises(ConfigError, match=r"^part 7 is not to be done$"):
        list(pool.run(Frail(tmp_path), [7, 2]))
    assert Frail(tmp_path).calls(7) == 1


def test_no_parts_start_no_engine(pool, tmp_path):
    pool._start = does_not_start
    assert list(pool.run(Frail(tmp_path), [])) == []


def test_closing_ends_the_engines_in_the_middle_of_a_part(pool, tmp_path):
    run = pool.run(Frail(tmp_path, seconds=2.0), range(8))
    next(run)
    started = time.monotonic()
    run.close()
    assert engine_processes() == [] and time.monotonic() - started < 30
    time.sleep(3)
    assert len(list(tmp_path.iterdir())) <= 4, "a killed engine went on"
