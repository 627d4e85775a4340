"""Killed at random moments, a run on a real engine goes on where it was: each row once, finished files untouched."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import tiny

from pipeline import stages
from pipeline.artifacts import HiddenStateCache, PromptSet, ResponseSet, verify
from pipeline.schemas import CACHE, PROMPTS, RESPONSES
from pipeline.shards import PartWriter, read_part, read_tables, write_table

CHECKOUT = Path(__file__).resolve().parents[2]
NUM_ROWS, ROWS_PER_PART, KILLS = 40, 4, 3
LAYERS = (1, 3, 4)


@pytest.fixture
def root(tmp_path):
    """A run root with prompts, a target, and the configuration that jobs are given."""
    model = tiny.tiny_target(tmp_path / "target")
    rows = [
        {
            "row_id": f"row-{n}",
            "conversation": f"conversation-{n}",
            "split": "train",
            "slice": "mails",
            "weight": 1,
            "inclusion_probability": 1.0,
            "messages": json.dumps([{"role": "user", "content": f"mail number {n}"}]),
            "template_args": "{}",
            "temperature": 0.0,
            "max_tokens": 200,
            "sampling": "{}",
        }
        for n in range(NUM_ROWS)
    ]

    def build(folder, derivation):
        writer = PartWriter(folder)
        table = pa.Table.from_pylist(rows, schema=PROMPTS)
        writer.commit(0, {"prompts-00000.parquet": (len(rows), write_table(table))})
        return PromptSet(derivation_id=derivation, parents={}, shards=writer.finish(1)[0])

    root = tmp_path / "runs"
    prompts = stages.complete(root, PromptSet, stage="collect", version=1, parents={}, meaning={}, build=build)
    stages.set_current(root, "prompts", prompts)
    (tmp_path / "slipstream.toml").write_text(
        f'root = "{root}"\n[target]\nmodel = "{model}"\ndtype = "float32"\nmax_model_len = 512\n'
        f"[drafter]\ntarget_layer_ids = {list(LAYERS)}\n"
        f"[regenerate]\nrows_per_part = {ROWS_PER_PART}\nmax_tokens = 200\nkv_cache_gib = 0.125\n"
    )
    return root


def start(job, root):
    command = [sys.executable, f"jobs/{job}.py", "--config", str(root.parent / "slipstream.toml")]
    log = open(root.parent / f"{job}.log", "a")  # noqa: SIM115 - the process writes to it
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)


def finish(job, root):
    assert start(job, root).wait(timeout=400) == 0, (root.parent / f"{job}.log").read_text()[-2000:]


def committed(root):
    """Every file of every committed part, of replies and of states: its time and its bytes."""
    found = {}
    for record in root.glob("*/*/part-*.json"):
        for path in (record, *(record.parent / shard.path for shard in read_part(record).shards)):
            found[path] = (path.stat().st_mtime_ns, path.read_bytes())
    return found


def test_killed_at_random_moments_every_row_is_there_once_and_finished_files_stand(root):
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    kept = {}
    for _ in range(KILLS):
        process, before = start("regenerate", root), len(list(root.glob("responses/*/part-*.json")))
        more = moments.randint(1, 2)
        while len(list(root.glob("responses/*/part-*.json"))) < before + more and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(2)  # its engines notice
        assert {path: kept[path] for path in kept} == {path: committed(root)[path] for path in kept}, seed
        kept |= committed(root)
    (folder,) = [path for path in (root / "responses").iterdir() if path.is_dir()]
    finish("regenerate", root)
    finish("capture", root)

    responses = stages.current(root, "responses", ResponseSet)
    states = stages.current(root, "states", HiddenStateCache)
    assert responses.folder == folder and len([p for p in (root / "states").iterdir() if p.is_dir()]) == 1
    for artifact, schema in ((responses, RESPONSES), (states, CACHE)):
        verify(artifact.folder, artifact.manifest)
        ids = read_tables(artifact.folder, artifact.manifest.shards, schema).column("row_id").to_pylist()
        assert sorted(ids) == sorted(f"row-{n}" for n in range(NUM_ROWS)), seed
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept} == kept, seed
    listed = {shard.path for shard in states.manifest.shards} | {"manifest.json"}
    left = {path.name for path in states.folder.iterdir() if not path.name.startswith("part-")} - listed
    assert left == set(), seed
