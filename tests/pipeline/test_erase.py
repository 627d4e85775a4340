"""Erasure: no byte of a subject is left under the root, in whatever file, and nobody else's row changes."""

import gzip
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from pipeline import capture, collect, erase, stages
from pipeline.artifacts import HiddenStateCache, PromptSet, ResponseSet, find, verify
from pipeline.config import Config
from pipeline.fingerprint import target_fingerprint
from pipeline.schemas import CACHE, PROMPTS, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.split import load_key
from pipeline.tombstones import add_tombstones, read_tombstones, subject_hashes
from tests.pipeline.scripted_engines import HIDDEN, ScriptedEngines

LAYERS = (1, 3)
SOUND = {f"layer_{layer}_{name}": value for layer in LAYERS for name, value in (("error", 0.01), ("norm", 1.0))} | {
    "layer_1_nearest": 1.0, "layer_3_nearest": 3.0, "batched_error": 0.0, "answered_error": 0.0,
}  # fmt: skip
NOW = datetime(2026, 3, 1, tzinfo=UTC)
SECRET = "xylophone-quartz-vesper"
ROOT = Path(__file__).resolve().parents[2]


def words(row_id, ids):
    made = np.random.default_rng(sum(ids) * 31 + len(ids)).normal(size=(len(ids) - 1, len(LAYERS), HIDDEN))
    return (made.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def configured(root, records, **settings):
    """A configuration of a log with these records."""
    model = root / "model"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
        save_file({"w": np.zeros(2, np.float32)}, model / "model.safetensors")
    (root.parent / "traffic.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    collect_table = {"sources": [root.parent / "traffic.jsonl"], "redaction": "none", **settings}
    return Config.model_validate({"root": root, "target": {"model": model}, "collect": collect_table})


def asked(text, subject, **more):
    return {"consent": "recorded", "subject": subject, "messages": [{"role": "user", "content": text}], **more}


RECORDS = [
    asked(f"{SECRET} alone", "anna", id="r1", ts=100.0),
    asked("said by two", "anna", ts=100.0),
    asked("said by two", "berta", ts=200.0),
    asked("said by two", "cleo", ts=300.0),
    *(
        asked(f"question {n} of {name} about the weather", name, ts=400.0 + n)
        for n in range(4)
        for name in ("berta", "cleo")
    ),
]


def whole_run(root, records=RECORDS):
    """Prompts, responses and states of these records; the configuration."""
    config = configured(root, records, near_similarity="off")
    prompts = collect.run(config)
    responses = answered(config, prompts)
    capture.run(config, responses, engines=ScriptedEngines(states=words, check=SOUND), target_layer_ids=LAYERS)
    return config, prompts, responses


def answered(config, prompts):
    rows = read_tables(prompts.folder, prompts.manifest.shards, PROMPTS).to_pylist()

    def reply(number, row):
        kept = {name: row[name] for name in RESPONSES.names if name in row}
        return {**kept, "prompt_ids": [number, 7, 8], "response_ids": [11, 12, 13 + number], "finish_reason": "length",
                "temperature": 0.0, "top_p": None, "max_tokens": 16, "clamped": False, "sampling": "{}",
                "origin": "target", "accepted_per_step": None}  # fmt: skip

    def build(folder, derivation):
        writer = PartWriter(folder)
        table = pa.Table.from_pylist([reply(n, row) for n, row in enumerate(rows)], RESPONSES)
        writer.commit(0, {"responses-00000.parquet": (len(table), write_table(table))})
        shards, rejects, _ = writer.finish(1)
        fingerprint = target_fingerprint(config.target.model, dtype="bfloat16", target_layer_ids=())
        return ResponseSet(derivation_id=derivation, parents={"prompts": prompts.id}, shards=shards,
                           rejects=rejects, fingerprint=fingerprint)  # fmt: skip

    return stages.complete(config.root, ResponseSet, stage="regenerate", version=0, parents={"prompts": prompts.id},
                           meaning={}, build=build)  # fmt: skip


def rows_of(root, kind, schema, derivation):
    folder = Path(root) / kind.kind / derivation
    manifest = find(folder, kind)
    verify(folder, manifest)
    return {row["row_id"]: row for row in read_tables(folder, manifest.shards, schema).to_pylist()}


def hashes(config, subject):
    return subject_hashes(load_key(config), subject)


def holds(root, text):
    """The files under a root that have this text in them, Parquet and gzip ones unpacked."""
    found = []
    for path in Path(root).rglob("*"):
        if path.is_file():
            body = path.read_bytes()
            if path.suffix == ".parquet":
                body += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
            if path.suffix == ".gz":
                body += gzip.decompress(body)
            if text.encode() in body:
                found.append(path)
    return found


def test_no_byte_of_a_subject_is_left_and_other_rows_are_unchanged(tmp_path):
    config, prompts, responses = whole_run(tmp_path / "root")
    before = rows_of(config.root, PromptSet, PROMPTS, prompts.id)
    answers = rows_of(config.root, ResponseSet, RESPONSES, responses.id)
    anna = hashes(config, "anna")
    assert holds(config.root, SECRET)
    assert holds(config.root, anna[0])
    removed = erase.erase(config.root, anna)
    assert holds(config.root, SECRET) == []
    assert not any(holds(config.root, one) for one in anna)
    after = rows_of(config.root, PromptSet, PROMPTS, prompts.id)
    assert removed.rows == before.keys() - after.keys()
    shared = [row_id for row_id in after if "said by two" in after[row_id]["messages"]]
    unshared = after.keys() - set(shared)
    assert len(unshared) == 8
    assert all(after[row_id] == before[row_id] for row_id in unshared)
    now = rows_of(config.root, ResponseSet, RESPONSES, responses.id)
    assert now == {row_id: answers[row_id] for row_id in after}
    assert [path for path in (config.root / HiddenStateCache.kind).glob("*") if path.is_dir()] == []


def test_a_prompt_of_several_counts_less_unless_the_erased_ones_record_stood_for_all(tmp_path):
    config, prompts, _ = whole_run(tmp_path / "root")
    (row,) = (r for r in rows_of(config.root, PromptSet, PROMPTS, prompts.id).values() if "by two" in r["messages"])
    whose = {name: hashes(config, name)[0] for name in ("anna", "berta", "cleo")}
    assert (row["weight"], row["subjects"]) == (3, sorted(whose.values()))
    first = min(whose, key=lambda name: whose[name])
    other = next(name for name in whose if name != first)
    erase.erase(config.root, hashes(config, other))
    after = rows_of(config.root, PromptSet, PROMPTS, prompts.id)[row["row_id"]]
    assert (after["weight"], after["subjects"]) == (2, sorted(set(whose.values()) - {whose[other]}))
    erase.erase(config.root, hashes(config, first))
    assert row["row_id"] not in rows_of(config.root, PromptSet, PROMPTS, prompts.id)


def test_states_are_made_again_from_what_is_left(tmp_path):
    config, prompts, responses = whole_run(tmp_path / "root")
    erase.erase(config.root, hashes(config, "anna"))
    again = stages.open_artifact(config.root, ResponseSet, responses.id)
    engines = ScriptedEngines(states=words, check=SOUND)
    made = capture.run(config, again, engines=engines, target_layer_ids=LAYERS)
    cached = read_tables(made.folder, made.manifest.shards, CACHE).column("row_id").to_pylist()
    assert sorted(cached) == sorted(rows_of(config.root, PromptSet, PROMPTS, prompts.id))


def test_erasing_twice_and_erasing_nobody_change_nothing(tmp_path):
    config, *_ = whole_run(tmp_path / "root")
    erase.erase(config.root, hashes(config, "nobody"))
    erase.erase(config.root, hashes(config, "anna"))
    files = {path: path.read_bytes() for path in config.root.rglob("*") if path.is_file()}
    removed = erase.erase(config.root, hashes(config, "anna"))
    assert (removed.rows, removed.artifacts) == (set(), [])
    assert {path: path.read_bytes() for path in config.root.rglob("*") if path.is_file()} == files


def test_who_is_erased_is_collected_no_more(tmp_path):
    config, prompts, _ = whole_run(tmp_path / "root")
    add_tombstones(config.root, hashes(config, "anna"), now=NOW)
    erase.erase(config.root, hashes(config, "anna"))
    assert collect.run(config).id == prompts.id  # the same work, and nothing is answered again
    late = asked(f"{SECRET} once more", "anna", ts=900.0)
    more = configured(config.root, [*RECORDS, late, asked("a new question of berta's", "berta")], near_similarity="off")
    again = collect.run(more)
    assert again.manifest.rejects == {"erased_subject": 3}
    rows = rows_of(config.root, PromptSet, PROMPTS, again.id).values()
    assert any("a new question" in row["messages"] for row in rows)
    assert not any(SECRET in row["messages"] or hashes(config, "anna")[0] in row["subjects"] for row in rows)


def test_half_done_work_is_removed_since_nobody_knows_whose_it_is(tmp_path):
    config, *_ = whole_run(tmp_path / "root")
    for kind in (PromptSet, ResponseSet, HiddenStateCache):
        (config.root / kind.kind / "0123").mkdir()
        (config.root / kind.kind / "0123" / "part.tmp").write_text(SECRET)
    removed = erase.erase(config.root, hashes(config, "anna"))
    assert holds(config.root, SECRET) == []
    assert len(removed.unfinished) == 2  # states go as such


def test_what_a_run_left_that_was_killed_when_its_rows_were_there_is_removed(tmp_path):
    config, prompts, _ = whole_run(tmp_path / "root")
    (prompts.folder / "work" / "read").mkdir(parents=True)
    (prompts.folder / "work" / "read" / "collected-00000.arrow").write_text(SECRET)
    erase.erase(config.root, hashes(config, "anna"))
    assert holds(config.root, SECRET) == []


def test_what_expires_goes_and_what_has_no_time_stays(tmp_path):
    records = [*RECORDS, asked("timeless", "dora")]
    config, prompts, _ = whole_run(tmp_path / "root", records)
    erase.expire(config.root, 401.5)
    left = rows_of(config.root, PromptSet, PROMPTS, prompts.id).values()
    texts = sorted(json.loads(row["messages"])[0]["content"] for row in left)
    assert texts == sorted(
        ["timeless", *(f"question {n} of {name} about the weather" for n in (2, 3) for name in ("berta", "cleo"))]
    )


def test_affected_names_everything_behind_before_it_is_gone(tmp_path):
    config, prompts, responses = whole_run(tmp_path / "root")
    (states,) = (path.name for path in (config.root / HiddenStateCache.kind).glob("*") if path.is_dir())
    anna = erase.without_subjects(hashes(config, "anna"))
    assert erase.affected(config.root, anna) == {prompts.id, responses.id, states}
    assert erase.affected(config.root, erase.without_subjects(hashes(config, "nobody"))) == set()


@pytest.mark.parametrize("moment", range(1, 14, 3))
def test_an_erasure_that_is_killed_anywhere_is_finished_by_the_next(tmp_path, moment):
    config, prompts, _ = whole_run(tmp_path / "root")
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom pipeline import erase, supersede, disk\n"
        "left = int(sys.argv[1])\n"
        "def hook(event, arguments):\n"
        "    global left\n"
        "    if event in ('os.rename', 'os.remove', 'shutil.rmtree') :\n"
        "        left -= 1\n"
        "        if not left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(hook)\n"
        "erase.erase(Path(sys.argv[2]), sys.argv[3:])\n"
    )
    anna = hashes(config, "anna")
    killed = subprocess.run([sys.executable, "-c", script, str(moment), str(config.root), *anna], cwd=ROOT)
    assert killed.returncode in (0, -signal.SIGKILL)
    erase.erase(config.root, anna)
    assert holds(config.root, SECRET) == []
    assert len(rows_of(config.root, PromptSet, PROMPTS, prompts.id)) in (8, 9)


def test_tombstones_keep_their_time_and_survive(tmp_path):
    config = configured(tmp_path / "root", RECORDS)
    add_tombstones(config.root, ["b", "a"], now=NOW)
    add_tombstones(config.root, ["b", "c"], now=NOW.replace(year=2027))
    found = [(one.subject, one.at.year) for one in read_tombstones(config.root)]
    assert found == [("a", 2026), ("b", 2026), ("c", 2027)]
