"""A real streamed run: vLLM on Ray Data fills the queue, Ray Train empties it, and an engine is killed on the way."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from tiny import MASK_TOKEN_ID, TARGET_LAYER_IDS, VOCAB_SIZE, tiny_target

from drafter.stream_plan import plan_stream
from jobs import learned_rows, stream
from jobs.attachments import data_behind
from jobs.engines import EnginePool
from jobs.session import ray_session
from pipeline import stages
from pipeline.artifacts import ResponseSet, verify
from pipeline.config import Config
from pipeline.fingerprint import target_fingerprint
from pipeline.schemas import RESPONSES
from pipeline.shards import PartWriter, write_table
from tests.pipeline.test_state_queue import watched

NUM_ROWS, NUM_HELD_OUT, ROWS_PER_PART = 60, 6, 3


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return Config.model_validate(
        {
            "root": root,
            "target": {"model": tiny_target(root / "tiny"), "dtype": "float32", "max_model_len": 256},
            "drafter": {"target_layer_ids": TARGET_LAYER_IDS, "block_size": 4, "mask_token_id": MASK_TOKEN_ID},
            "regenerate": {"rows_per_part": ROWS_PER_PART, "kv_cache_gib": 0.125},
            "capture": {"stream": True, "max_bytes": 850_000},
            "train": {"blocks_per_step": 16, "anchors_per_row": 8, "checkpoint_every": 8, "walk_rows": 2},
        }
    )


def row(number):
    """A reply of random ids: what the target would have said doesn't matter to the way that states take."""
    rng = random.Random(number)
    ids = [rng.randrange(8, VOCAB_SIZE) for _ in range(rng.randrange(40, 60))]
    first_held_out = NUM_ROWS - NUM_HELD_OUT
    return {
        "row_id": f"row-{number}",
        "conversation": f"conversation-{number}",
        "split": "train" if number < first_held_out else ("validation", "gate")[number % 2],
        "slice": "mails",
        "weight": 1,
        "inclusion_probability": 1.0,
        "prompt_ids": ids[:10],
        "response_ids": ids[10:],
        "finish_reason": "length",
        "clamped": False,
        "sampling": "{}",
        "origin": "target",
    }


@pytest.fixture(scope="module")
def responses(config):
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=())
    rows = [row(number) for number in range(NUM_ROWS)]

    def build(folder, derivation):
        writer = PartWriter(folder)
        for index in range(NUM_ROWS // ROWS_PER_PART):
            part = rows[index * ROWS_PER_PART : (index + 1) * ROWS_PER_PART]
            table = pa.Table.from_pylist(part, schema=RESPONSES)
            writer.commit(index, {f"responses-{index:05d}.parquet": (len(part), write_table(table))})
        shards = writer.finish(NUM_ROWS // ROWS_PER_PART)[0]
        return ResponseSet(derivation_id=derivation, parents={}, shards=shards, fingerprint=fingerprint)

    return stages.complete(config.root, ResponseSet, stage="regenerate", version=1, parents={}, meaning={}, build=build)


class KillsOne:
    """Engines one of which is killed when some parts are in, in the middle of its next."""

    def __init__(self, config):
        self._pool, self.killed = EnginePool(config, target_layer_ids=TARGET_LAYER_IDS), []

    def run(self, work, parts):
        for done in self._pool.run(work, parts):
            yield done
            if not self.killed and len(parts) > 10:
                self.killed = kill("EngineActor")


def kill(name):
    """Kill the oldest of this test's own processes that Ray calls so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_meant = path.read_bytes().startswith(b"ray::") and name.encode() in path.read_bytes()
        except OSError:  # it has ended
            continue
        if is_meant and os.getpid() in ancestors(int(path.parent.name)):
            found.append(int(path.parent.name))
    for pid in (found := sorted(found)[:1]):
        os.kill(pid, signal.SIGKILL)
    return found


def ancestors(pid):
    """The processes that a process was started by, the nearest first."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found.append(pid)
    return found


def test_a_corpus_larger_than_the_disk_streams_from_a_real_engine_to_ray_train(config, responses):
    ended, engines = threading.Event(), KillsOne(config)
    with ray_session(), ThreadPoolExecutor(2) as threads:
        most = threads.submit(watched_queue, config.root / "queue", ended)
        killed = threads.submit(kill_trainer, config.root / "drafters", ended)
        try:
            states, trained = stream.run(
                config, responses, start=None, target_layer_ids=TARGET_LAYER_IDS, engines=engines
            )
        finally:
            ended.set()
    plan = plan_stream(config, responses, states, block_size=4)
    assert sum(plan.expected.values()) > 4 * plan.queue_bytes and plan.num_steps == trained.manifest.counts["steps"]
    assert 0 < most.result() <= plan.queue_bytes + 4000, "heartbeat, locks and counts beside the states"
    assert engines.killed and killed.result(), "an engine and the trainer died on the way"
    assert trained.manifest.counts["train_rows"] == NUM_ROWS - NUM_HELD_OUT and trained.manifest.rejects == {}
    assert [point["step"] for point in trained.manifest.curve] == [*range(0, plan.num_steps, 8), plan.num_steps]
    verify(trained.folder, trained.manifest)
    assert states.manifest.splits == stream.HELD_OUT
    assert not (config.root / "queue" / trained.id).exists()
    learned = learned_rows.of(config.root, data_behind(config.root, trained.manifest.parents))
    assert (learned.derivation, len(learned.ids)) == (responses.id, NUM_ROWS - NUM_HELD_OUT)


def kill_trainer(drafters, ended):
    """Kill the trainer once it has a checkpoint."""
    while not list(drafters.glob("*/resume.pt")):
        if ended.wait(0.01):
            return []
    return kill("RayTrainWorker")


def watched_queue(queues, ended):
    while not (folders := list(queues.glob("*/"))):
        if ended.wait(0.01):
            return 0
    return watched(folders[0], ended)
