"""Capture: raw words bit for bit, every faulty row kept out with its reason, parts that survive a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.numpy import save_file

from pipeline import cache_parts, capture, stages, storage
from pipeline.artifacts import ResponseSet, verify
from pipeline.config import Config
from pipeline.engines import CaptureRequest
from pipeline.errors import ConfigError, FingerprintError, StageError
from pipeline.fingerprint import target_fingerprint
from pipeline.schemas import CACHE, RESPONSES, SPLITS
from pipeline.shards import PartWriter, drop_part, read_tables, write_table
from pipeline.states import StatesFile
from tests.pipeline.scripted_engines import HIDDEN, ScriptedEngines

LAYERS = (1, 3)
SOUND = {f"layer_{layer}_{name}": value for layer in LAYERS for name, value in (("error", 0.01), ("norm", 1.0))} | {
    "layer_1_nearest": 1.0,
    "layer_3_nearest": 3.0,
    "batched_error": 0.0,
    "answered_error": 0.0,
}


def bf16_words(values):
    """The words that torch stores for these numbers."""
    return torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def random_words(row_id, ids):
    """Sound states of one row, another for every other input."""
    generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
    return bf16_words(torch.randn(len(ids) - 1, len(LAYERS), HIDDEN, generator=generator).tolist())


TWIN = random_words("", (1, 2, 3, 4, 5, 6))


def target_of(root):
    """A folder with the fingerprint of a target."""
    model = root / "model"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
        save_file({"w": np.zeros(2, np.float32)}, model / "model.safetensors")
    return model


def config_for(root, **settings):
    settings = {"max_reject_share": 0.9, **settings}
    return Config.model_validate({"root": root, "target": {"model": target_of(root)}, "capture": settings})


def response(number, *, num_tokens=6, split="train"):
    return {
        "row_id": f"row-{number}",
        "conversation": f"conversation-{number}",
        "split": split,
        "slice": "mails",
        "weight": 1,
        "inclusion_probability": 1.0,
        "prompt_ids": [number, 7, 8],
        "response_ids": list(range(10, 10 + num_tokens - 3)),
        "finish_reason": "length",
        "temperature": 0.0,
        "max_tokens": 16,
        "clamped": False,
        "sampling": "{}",
        "origin": "target",
    }


def response_set(config, rows, *, rows_per_part=2):
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=())

    def build(folder, derivation):
        writer = PartWriter(folder)
        parts = [rows[start : start + rows_per_part] for start in range(0, len(rows), rows_per_part)]
        for index, part in enumerate(parts):
            table = pa.Table.from_pylist(part, schema=RESPONSES)
            writer.commit(index, {f"responses-{index:05d}.parquet": (len(part), write_table(table))})
        shards = writer.finish(len(parts))[0]
        return ResponseSet(derivation_id=derivation, parents={}, shards=shards, fingerprint=fingerprint)

    return stages.complete(
        config.root, ResponseSet, stage="regenerate", version=1, parents={}, meaning={"rows": rows}, build=build
    )


def run(root, rows, states=random_words, *, check=SOUND, splits=SPLITS, rows_per_part=2, **settings):
    config = config_for(root, **settings)
    engines = ScriptedEngines(states=states, check=check)
    responses = response_set(config, rows, rows_per_part=rows_per_part)
    return capture.run(config, responses, engines=engines, target_layer_ids=LAYERS, splits=splits), engines


def cached_rows(artifact):
    return read_tables(artifact.folder, artifact.manifest.shards, CACHE).to_pylist()


def rejects_of(artifact):
    lines = (artifact.folder / "rejects.jsonl").read_text().splitlines()
    return {reject.pop("row_id"): reject for reject in map(json.loads, lines)}


def files_of(folder, *patterns):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for p in patterns for path in folder.glob(p)}


def test_every_row_has_a_state_for_each_token_but_its_last(tmp_path):
    rows = [response(n, num_tokens=5 + n) for n in range(5)]
    artifact, _ = run(tmp_path, rows)
    found = cached_rows(artifact)
    assert [row["num_states"] for row in found] == [4, 5, 6, 7, 8]
    assert artifact.manifest.num_states == 30 and artifact.manifest.hidden_size == HIDDEN
    verify(artifact.folder, artifact.manifest)
    for row, asked in zip(found, rows, strict=True):
        assert row["ids"] == asked["prompt_ids"] + asked["response_ids"] and row["num_prompt_tokens"] == 3
        words = StatesFile(artifact.folder / row["states_file"]).words(row["states_batch"])
        assert words.tobytes() == random_words("", row["ids"]).tobytes()


def test_its_folder_is_known_before_there_is_a_response(tmp_path):
    config = config_for(tmp_path)
    responses = response_set(config, [response(n) for n in range(4)])
    place = capture.place(config, responses.id, LAYERS)
    artifact, _ = run(tmp_path, [response(n) for n in range(4)])
    assert (artifact.folder, artifact.id) == (place.folder, place.derivation)


def test_one_number_that_is_none_keeps_one_row_out_with_its_place(tmp_path):
    def states(row_id, ids):
        words = random_words(row_id, ids)
        if row_id == "row-3":
            words[2, 1, 3] = bf16_words([float("nan")])[0]
        return words

    artifact, _ = run(tmp_path, [response(n) for n in range(6)], states)
    assert rejects_of(artifact) == {
        "row-3": {"reason": "not_finite", "position": 2, "layer_index": 1, "element": 3},
    }
    assert [row["row_id"] for row in cached_rows(artifact)] == ["row-0", "row-1", "row-2", "row-4", "row-5"]


def test_zeros_gaps_other_scales_and_anothers_states_are_kept_out(tmp_path):
    def states(row_id, ids):
        words = random_words(row_id, ids)
        match int(row_id.split("-")[1]):
            case 0:
                words[:] = 0
            case 1:
                words[1:] = 0x8000  # negative zeros: 4 of 5 positions
            case 2 | 3:
                words = TWIN
            case 4:
                words = words[:2]
            case 5:
                words = bf16_words((torch.from_numpy(words.view(np.int16)).view(torch.bfloat16) * 1e6).tolist())
        return words

    artifact, _ = run(tmp_path, [response(n) for n in range(8)], states)
    found = {row_id: reject["reason"] for row_id, reject in rejects_of(artifact).items()}
    assert found == {
        "row-0": "zero_states",
        "row-1": "zero_states",
        "row-2": "duplicate_states",
        "row-3": "duplicate_states",
        "row-4": "wrong_length",
        "row-5": "norm_out_of_range",
    }
    assert rejects_of(artifact)["row-1"]["share"] == 0.8
    assert [row["row_id"] for row in cached_rows(artifact)] == ["row-6", "row-7"]
    assert artifact.manifest.counts["rows"] == 2 and artifact.manifest.num_states == 10
    verify(artifact.folder, artifact.manifest)


def test_anothers_states_are_found_across_parts_and_runs_and_no_other_part_is_touched(tmp_path):
    rows = [response(n) for n in range(8)]

    def dies_in_the_second_part(row_id, ids):
        if row_id == "row-2":
            raise KeyboardInterrupt
        return TWIN if row_id == "row-0" else random_words(row_id, ids)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rows, dies_in_the_second_part)
    artifact, _ = run(tmp_path, rows, lambda row_id, ids: TWIN if row_id == "row-5" else random_words(row_id, ids))
    found = rejects_of(artifact)
    assert {row_id: (r["reason"], r["same_as"]) for row_id, r in found.items()} == {
        "row-0": ("duplicate_states", ["row-5"]),
        "row-5": ("duplicate_states", ["row-0"]),
    }
    assert [row["row_id"] for row in cached_rows(artifact)] == [f"row-{n}" for n in (1, 2, 3, 4, 6, 7)]
    assert {path.name for path in artifact.folder.glob("rows-*")} == {
        "rows-00000-without-twins.parquet",
        "rows-00001.parquet",
        "rows-00002-without-twins.parquet",
        "rows-00003.parquet",
    }


def test_a_kill_between_the_quarantine_of_two_twins_leaves_neither_in(tmp_path, monkeypatch):
    rows = [response(n) for n in range(4)]
    record, done = capture.twins.record, []

    def dies_after_the_first(*arguments):
        record(*arguments)
        done.append(arguments)
        raise KeyboardInterrupt

    def twins(row_id, ids):
        return TWIN if row_id in ("row-0", "row-3") else random_words(row_id, ids)

    monkeypatch.setattr(capture.twins, "record", dies_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rows, twins)
    monkeypatch.setattr(capture.twins, "record", record)
    artifact, engines = run(tmp_path, rows)
    assert len(done) == 1 and engines.requests == []
    assert set(rejects_of(artifact)) == {"row-0", "row-3"}
    assert {shard.path for shard in artifact.manifest.shards} >= {p.name for p in artifact.folder.glob("*.parquet")}, (
        "a table that no record names is left"
    )


def test_equal_inputs_may_have_equal_states(tmp_path):
    rows = [{**response(0), "row_id": "row-0"}, {**response(0), "row_id": "row-0b"}]
    artifact, _ = run(tmp_path, rows)
    assert artifact.manifest.rejects == {} and len(cached_rows(artifact)) == 2


def test_too_many_quarantined_rows_stop_the_stage(tmp_path):
    with pytest.raises(StageError, match=r"3 of 3 rows rejected.*zero_states.*capture.max_reject_share"):
        run(tmp_path, [response(n) for n in range(3)], lambda *row: random_words(*row) * 0, max_reject_share=0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_3_error": 0.4}, "layer 3: relative error 0.4"),
        ({"layer_3_error": float("nan")}, "layer 3: relative error nan"),
        ({"layer_1_nearest": 2.0}, "layer 1: nearest to the reference's layer 2"),
        ({"batched_error": 0.5}, "read alone and in a batch"),
    ],
)
def test_a_failed_check_stops_before_anything_is_captured(tmp_path, change, message):
    engines = ScriptedEngines(states=random_words, check=SOUND | change)
    config = config_for(tmp_path)
    with pytest.raises(StageError, match=message):
        capture.run(config, response_set(config, [response(0)]), engines=engines, target_layer_ids=LAYERS)
    assert engines.requests == []


def test_the_check_is_of_the_first_row_and_on_the_manifest(tmp_path):
    artifact, engines = run(tmp_path, [response(n) for n in range(4)])
    assert engines.checked == [[0, 7, 8, 10, 11, 12]]
    assert artifact.manifest.capture_check == SOUND | {"sampled_error": 0.0, "sampled_largest_error": 0.0}


def test_one_row_of_every_so_many_parts_is_read_again_alone(tmp_path):
    _, engines = run(tmp_path, [response(n) for n in range(10)], check_every=2)
    asked = engines.asked(CaptureRequest)
    assert sorted(set(asked)) == [f"row-{n}" for n in range(10)]
    again = {row_id for row_id in asked if asked.count(row_id) == 2}
    assert len(again) == 3 and len(asked) == 13
    assert {int(row_id.split("-")[1]) // 2 for row_id in again} == {0, 2, 4}


def test_a_row_that_is_another_when_read_alone_stops_the_stage_and_its_part_is_not_committed(tmp_path):
    seen = set()

    def other_when_alone(row_id, ids):
        words = random_words(row_id, ids)
        if row_id in seen:
            words = random_words("", (*ids, 1))[:-1]
        seen.add(row_id)
        return words

    with pytest.raises(StageError, match="of part 0, read again alone, has other states: relative error"):
        run(tmp_path, [response(n) for n in range(4)], other_when_alone)
    (folder,) = [path for path in (tmp_path / "states").iterdir() if path.is_dir()]
    assert not list(folder.glob("part-*.json"))


def test_a_row_that_differs_at_a_few_positions_when_read_alone_is_kept_out_with_their_number(tmp_path):
    seen = set()

    def other_at_one_position(row_id, ids):
        words = random_words(row_id, ids)
        if row_id in seen:
            words[3] = random_words("", (*ids, 1))[3]  # one position of six is not its own
        seen.add(row_id)
        return words

    artifact, _ = run(tmp_path, [response(n) for n in range(4)], other_at_one_position, check_every=2)
    assert artifact.manifest.rejects == {"differs_when_read_alone": 1} and len(cached_rows(artifact)) == 3
    (reject,) = [json.loads(line) for line in (artifact.folder / "rejects.jsonl").read_text().splitlines()]
    assert reject["positions"] == 1 and artifact.manifest.capture_check["sampled_largest_error"] > 0.1


def test_layers_out_of_order_and_another_targets_responses_are_refused(tmp_path):
    config = config_for(tmp_path)
    responses = response_set(config, [response(0)])
    for layers in ((), (3, 1), (1, 1)):
        with pytest.raises(ConfigError, match="rising order"):
            capture.run(config, responses, engines=ScriptedEngines(), target_layer_ids=layers)
    save_file({"w": np.ones(2, np.float32)}, config.target.model / "model.safetensors")
    with pytest.raises(FingerprintError, match="weights"):
        capture.run(config, responses, engines=ScriptedEngines(), target_layer_ids=LAYERS)


def test_a_cache_of_some_splits_has_their_rows_alone_and_is_another(tmp_path):
    split = {1: "validation", 4: "gate", 5: "gate"}
    rows = [response(n, split=split.get(n, "train")) for n in range(8)]
    held_out, engines = run(tmp_path, rows, splits=("validation", "gate"))
    assert [row["row_id"] for row in cached_rows(held_out)] == ["row-1", "row-4", "row-5"]
    assert set(engines.asked(CaptureRequest)) == {"row-1", "row-4", "row-5"}
    assert held_out.manifest.splits == ("validation", "gate")
    everything, _ = run(tmp_path, rows)
    assert everything.id != held_out.id and len(cached_rows(everything)) == 8


def test_no_engine_is_begun_where_no_row_is_of_the_splits(tmp_path):
    artifact, engines = run(tmp_path, [response(n) for n in range(4)], splits=("gate",))
    assert cached_rows(artifact) == [] and artifact.manifest.num_states == 0
    assert engines.checked == [] and engines.requests == []


def test_parts_with_the_states_of_other_replies_are_made_again(tmp_path):
    rows = [response(n) for n in range(6)]
    first, _ = run(tmp_path, rows)
    kept = files_of(first.folder, "*-00000*", "*-00002*")
    (first.folder / "manifest.json").unlink()  # as when the responses were removed, and came out otherwise
    responses = response_set(config_for(tmp_path), rows)
    changed = [{**row, "response_ids": [90, 91]} if row["row_id"] == "row-3" else row for row in rows]
    (shard,) = [shard for shard in responses.manifest.shards if shard.path == "responses-00001.parquet"]
    write_table(pa.Table.from_pylist(changed[2:4], schema=RESPONSES))(responses.folder / shard.path)
    again, engines = run(tmp_path, rows)
    assert again.id == first.id
    assert set(engines.asked(CaptureRequest)) == {"row-2", "row-3"}
    assert files_of(first.folder, "*-00000*", "*-00002*") == kept
    assert {row["row_id"]: row["ids"][3:] for row in cached_rows(again)}["row-3"] == [90, 91]


def test_eight_bit_states_are_another_cache_of_half_the_bytes(tmp_path):
    rows = [response(n, num_tokens=400) for n in range(4)]
    raw, _ = run(tmp_path, rows)
    small, _ = run(tmp_path, rows, states_format="int8")
    size = [sum(s.bytes for s in a.manifest.shards if s.path.endswith(".arrow")) for a in (raw, small)]
    assert raw.id != small.id and small.manifest.states_format == "int8"
    assert size[1] < size[0]  # the toy's four channels have a scale of their own
    (row, *_) = cached_rows(small)
    found = StatesFile(small.folder / row["states_file"]).read(row["states_batch"])
    expected = torch.from_numpy(random_words("", row["ids"]).view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_states_go_to_storage_part_by_part_and_what_a_kill_left_follows(tmp_path, monkeypatch):
    storage = (tmp_path / "bucket").as_uri()
    rows = [response(n) for n in range(6)]

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_parts, "move_part", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rows, storage=storage)
    monkeypatch.undo()
    artifact, engines = run(tmp_path, rows, storage=storage)
    assert set(engines.asked(CaptureRequest)) == {f"row-{n}" for n in range(2, 6)}
    uri = f"{storage}/states/{artifact.id}"
    assert artifact.manifest.storage == uri and not list(artifact.folder.glob("*.arrow"))
    names = {shard.path for shard in artifact.manifest.shards if shard.path.endswith(".arrow")}
    assert names == {path.name for path in (tmp_path / "bucket" / "states" / artifact.id).iterdir()} and len(names) == 3
    words = StatesFile(tmp_path / "bucket" / "states" / artifact.id / cached_rows(artifact)[0]["states_file"]).words(0)
    assert words.tobytes() == random_words("", cached_rows(artifact)[0]["ids"]).tobytes()


def test_storage_that_fails_amid_a_run_leaves_the_part_here_and_the_end_tries_again(tmp_path, monkeypatch):
    moved, tries = cache_parts.move_part, []

    def fails_once(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise StageError("upload failed 4 times, at last with: slow down")
        return moved(*arguments)

    monkeypatch.setattr(cache_parts, "move_part", fails_once)
    artifact, engines = run(tmp_path, [response(n) for n in range(6)], storage=(tmp_path / "bucket").as_uri())
    assert len(engines.asked(CaptureRequest)) == 6 + 1 and not list(artifact.folder.glob("*.arrow"))
    assert len(list((tmp_path / "bucket" / "states" / artifact.id).iterdir())) == 3


@pytest.mark.parametrize("uri", ["nowhere", "file:///proc/slipstream"])
def test_storage_that_cannot_be_written_stops_before_an_engine_begins(tmp_path, monkeypatch, uri):
    monkeypatch.setattr(storage, "RETRY_WAIT_S", 0.0)
    config, engines = config_for(tmp_path, storage=uri), ScriptedEngines(states=random_words, check=SOUND)
    with pytest.raises((ConfigError, StageError), match=uri):
        capture.run(config, response_set(config, [response(1)]), engines=engines, target_layer_ids=LAYERS)
    assert engines.checked == []


@pytest.mark.parametrize("later", ["other", None])
def test_parts_that_went_to_another_storage_are_made_again_where_the_others_are(tmp_path, later):
    rows = [response(n) for n in range(6)]
    first, _ = run(tmp_path, rows, storage=(tmp_path / "bucket").as_uri())
    (first.folder / "manifest.json").unlink()
    drop_part(first.folder, 2)
    storage = later and (tmp_path / later).as_uri()
    again, engines = run(tmp_path, rows, storage=storage)
    assert again.id == first.id and set(engines.asked(CaptureRequest)) == {f"row-{n}" for n in range(6)}
    assert again.manifest.storage == (storage and f"{storage}/states/{again.id}")
    folder = tmp_path / later / "states" / again.id if later else again.folder
    listed = {shard.path for shard in again.manifest.shards if shard.path.endswith(".arrow")}
    assert {path.name for path in folder.glob("*.arrow")} == listed and len(listed) == 3


def test_states_that_do_not_fit_the_budget_stop_before_the_first_row(tmp_path):
    engines = ScriptedEngines(states=random_words, check=SOUND)
    config = config_for(tmp_path, max_bytes=4000)
    with pytest.raises(StageError, match=r"capture needs .* of states as bf16.*capture.max_bytes = 4000"):
        capture.run(
            config, response_set(config, [response(n) for n in range(9)]), engines=engines, target_layer_ids=LAYERS
        )
    assert engines.checked == [] and engines.requests == []


KILLED = """
import sys, time
from pathlib import Path
from tests.pipeline import test_capture as t
root = Path(sys.argv[1])
def states(row_id, ids):
    if row_id == "row-5":  # the second row of part 2: its file is half written
        (root / "writing").touch()
        time.sleep(60)
    return t.random_words(row_id, ids)
t.run(root, [t.response(n) for n in range(9)], states)
"""


def test_a_kill_in_the_middle_of_a_file_costs_that_part_alone(tmp_path):
    checkout = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=checkout)
    deadline = time.monotonic() + 120
    while not (tmp_path / "writing").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = [path for path in (tmp_path / "states").iterdir() if path.is_dir()]
    assert list(folder.glob(".states-00002*")) and not (folder / "manifest.json").exists()
    (folder / "states-00003-00.arrow").touch()  # what other writers have left behind: nothing, and no footer
    (folder / "rows-00003.parquet").write_bytes(b"PAR1cut")
    committed = files_of(folder, "*-0000[01]*")
    assert len(committed) == 6
    artifact, engines = run(tmp_path, [response(n) for n in range(9)])
    assert set(engines.asked(CaptureRequest)) == {f"row-{n}" for n in range(4, 9)}
    assert files_of(folder, "*-0000[01]*") == committed
    assert [row["row_id"] for row in cached_rows(artifact)] == [f"row-{n}" for n in range(9)]
    listed = {shard.path for shard in artifact.manifest.shards} | {"manifest.json"}
    assert {name for name in os.listdir(folder) if not name.startswith("part-")} == listed
    _, again = run(tmp_path, [response(n) for n in range(9)])
    assert again.requests == []


def test_a_part_that_is_missing_is_captured_alone(tmp_path):
    rows = [response(n) for n in range(6)]
    first, _ = run(tmp_path, rows)
    (first.folder / "manifest.json").unlink()
    drop_part(first.folder, 1)
    again, engines = run(tmp_path, rows)
    assert set(engines.asked(CaptureRequest)) == {"row-2", "row-3"} and again.id == first.id
