"""The engine pool: real engines on Ray answer and capture; dead ones are replaced, hopeless batches given up."""

import json
import os

import pyarrow as pa
import pytest
import ray
import torch

from jobs import capture, engines, regenerate
from jobs.engines import EnginePool
from jobs.session import ray_session
from pipeline import stages
from pipeline.artifacts import PromptSet
from pipeline.config import Config
from pipeline.engines import EngineInfo, GenerateRequest
from pipeline.errors import StageError
from pipeline.render import Renderer
from pipeline.schemas import CACHE, PROMPTS, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.states import StatesFile
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
            "regenerate": {"rows_per_part": 8, "max_tokens": 100, "kv_cache_gib": 0.125, "max_reject_share": 0.5},
            "capture": {"rows_per_part": 8},
        }
    )


@pytest.fixture(scope="module")
def pool(config):
    with EnginePool(config, target_layer_ids=TARGET_LAYER_IDS) as pool:
        yield pool


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
            "messages": json.dumps([{"role": "user", "content": f"mail {n} " * (80 if n == 5 else 1)}]),
            "tools": None,
            "template_args": "{}",
            "temperature": 0.0 if n < 4 else 2.0,
            "top_p": 1.0,
            "max_tokens": 12 if n < 4 else 100,
            "source": f"log.jsonl:{n}",
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
def responses(config, prompts, pool):
    return regenerate.run(config, prompts, engines=pool)


def greedy(model, ids, num_tokens):
    """Plain greedy decoding without a cache."""
    ids = list(ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-num_tokens:]


def rows_of(artifact, schema):
    return read_tables(artifact.folder, artifact.manifest.shards, schema).to_pylist()


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


def test_one_too_long_prompt_is_rejected_alone(config, responses):
    assert responses.manifest.rejects == {"prompt_too_long": 1}
    assert len(rows_of(responses, RESPONSES)) == NUM_ROWS - 1


def test_one_broken_request_fails_alone_and_sampling_repeats_with_its_seed(pool):
    sound = GenerateRequest("sound", (0, 3, 40, 41), 6, 1.0, 1.0, 7)
    requests = [
        GenerateRequest("foreign", (0, 9999), 6, 0.0, 1.0, 0),
        sound,
        GenerateRequest("empty", (), 6, 0.0, 1.0, 0),
    ]
    replies = {reply.row_id: reply for _, batch in pool.generate([(0, requests)]) for reply in batch}
    assert "out of vocabulary" in replies["foreign"].error and "empty" in replies["empty"].error
    assert replies["sound"].error is None and len(replies["sound"].ids) == 6
    ((_, (again,)),) = pool.generate([(1, [sound])])
    assert again.ids == replies["sound"].ids


def test_the_engine_reads_the_same_prompt_ids_as_the_renderer_makes(config, responses, prompts):
    renderer = Renderer(config.target.model)
    rendered = {row["row_id"]: renderer.row_ids(row) for row in rows_of(prompts, PROMPTS)}
    assert all(row["prompt_ids"] == rendered[row["row_id"]] for row in rows_of(responses, RESPONSES))


def test_capture_follows_on_the_same_engine(config, responses, pool):
    loaded = pool.info().load_seconds
    cache = capture.run(config, responses, engines=pool)
    rows = rows_of(cache, CACHE)
    assert pool.info().load_seconds == loaded and pool.restarts == 0
    assert len(rows) == NUM_ROWS - 1 and cache.manifest.rejects == {}
    assert cache.manifest.fingerprint.target_layer_ids == TARGET_LAYER_IDS
    assert cache.manifest.num_states == sum(len(row["ids"]) - 1 for row in rows)
    assert all(cache.manifest.capture_check[f"layer_{layer}_error"] < 0.01 for layer in TARGET_LAYER_IDS)
    for row in rows:
        words = StatesFile(cache.folder / row["states_file"]).words(row["states_batch"])
        assert words.shape == (row["num_states"], len(TARGET_LAYER_IDS), 128)


@ray.remote(num_cpus=0)
class Frail:
    """An actor in an engine's place; its process ends in the first ``deaths`` calls, counted in a file."""

    def __init__(self, counter, deaths, starts=True):
        if not starts:
            raise ValueError("no such model")
        self._counter, self._deaths = counter, deaths

    def info(self):
        return EngineInfo(1, 1, 1, "float32", 1, 0.0, "0")

    def generate(self, batch):
        with open(self._counter, "a") as file:
            file.write("x")
        if os.path.getsize(self._counter) <= self._deaths:
            os._exit(1)
        return [item * 10 for item in batch]


def pool_of(config, monkeypatch, *arguments):
    pool = EnginePool(config)
    monkeypatch.setattr(pool, "_actor", lambda: Frail.remote(*arguments))
    return pool


def test_a_dead_engine_is_replaced_and_its_batch_done_once(config, monkeypatch, tmp_path):
    with pool_of(config, monkeypatch, str(tmp_path / "calls"), 2) as pool:
        assert sorted(pool.generate([(0, [1]), (1, [2]), (2, [3])])) == [(0, [10]), (1, [20]), (2, [30])]
        assert pool.restarts == 2


def test_a_batch_that_no_engine_survives_is_given_up(config, monkeypatch, tmp_path):
    with (
        pool_of(config, monkeypatch, str(tmp_path / "calls"), 99) as pool,
        pytest.raises(StageError, match=f"batch 4 failed on {engines.MAX_TRIES} engines"),
    ):
        list(pool.generate([(4, [1])]))
    assert os.path.getsize(tmp_path / "calls") == engines.MAX_TRIES


def test_an_engine_that_cannot_start_says_why_and_is_not_tried_again(config, monkeypatch, tmp_path):
    with (
        pool_of(config, monkeypatch, str(tmp_path / "calls"), 0, False) as pool,
        pytest.raises(StageError, match=r"could not start.*no such model"),
    ):
        list(pool.generate([(0, [1])]))
    assert pool.restarts == 0
