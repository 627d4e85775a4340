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

from pipeline import capture, stages
from pipeline.artifacts import ResponseSet
from pipeline.capture_check import compare, judge
from pipeline.config import Config
from pipeline.errors import ConfigError, FingerprintError, SchemaError, StageError
from pipeline.fingerprint import target_fingerprint
from pipeline.schemas import CACHE, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.states import StatesFile, StatesWriter, find_fault
from tests.pipeline.scripted_engines import HIDDEN, ScriptedEngines

LAYERS = (1, 3)
SOUND = {f"layer_{layer}_{name}": value for layer in LAYERS for name, value in (("error", 0.01), ("norm", 1.0))} | {
    "layer_1_nearest": 1.0,
    "layer_3_nearest": 3.0,
    "batched_error": 0.0,
}


def bf16_words(values):
    """The words that torch stores for these numbers."""
    return torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def random_words(request):
    """Sound states of one row, another for every row."""
    generator = torch.Generator().manual_seed(sum(request.ids) * 1000 + len(request.ids))
    return bf16_words(torch.randn(len(request.ids) - 1, len(LAYERS), HIDDEN, generator=generator).tolist())


def config_for(root, **settings):
    model = root / "model"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        save_file({"w": np.zeros(2, np.float32)}, model / "model.safetensors")
    settings = {"rows_per_part": 2, "max_reject_share": 0.9, **settings}
    return Config.model_validate({"root": root, "target": {"model": model}, "capture": settings})


def response(number, *, num_tokens=6):
    return {
        "row_id": f"row-{number}",
        "conversation": f"conversation-{number}",
        "split": "train",
        "slice": "mails",
        "weight": 1,
        "prompt_ids": [number, 7, 8],
        "response_ids": list(range(10, 10 + num_tokens - 3)),
        "finish_reason": "length",
        "temperature": 0.0,
        "max_tokens": 16,
        "clamped": False,
    }


def response_set(config, rows):
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=())

    def build(folder, derivation):
        writer = PartWriter(folder)
        table = pa.Table.from_pylist(rows, schema=RESPONSES)
        writer.commit(0, {"responses-00000.parquet": (len(rows), write_table(table))})
        shards = writer.finish(1)[0]
        return ResponseSet(derivation_id=derivation, parents={}, shards=shards, fingerprint=fingerprint)

    return stages.complete(
        config.root, ResponseSet, stage="regenerate", version=1, parents={}, meaning={"rows": rows}, build=build
    )


def run(root, rows, states=random_words, *, check=SOUND, **settings):
    config = config_for(root, **settings)
    engines = ScriptedEngines(states=states, check=check)
    artifact = capture.run(config, response_set(config, rows), engines=engines, target_layer_ids=LAYERS)
    return artifact, engines


def cached_rows(artifact):
    return read_tables(artifact.folder, artifact.manifest.shards, CACHE).to_pylist()


def rejects_of(artifact):
    lines = (artifact.folder / "rejects.jsonl").read_text().splitlines()
    return {reject.pop("row_id"): reject for reject in map(json.loads, lines)}


def test_bf16_words_survive_bit_for_bit(tmp_path):
    values = [1.0, 3.0e38, 1e-39, -0.0]  # the second overflows float16, the third is subnormal
    states = torch.tensor([[values, values[::-1]], [values[::-1], values]]).to(torch.bfloat16)
    assert torch.isfinite(states).all()
    words = states.view(torch.int16).numpy().view(np.uint16)
    with StatesWriter(tmp_path / "s.arrow", num_layers=2, hidden_size=4) as writer:
        assert (writer.append(words), writer.append(words[:1])) == (0, 1)
    file = StatesFile(tmp_path / "s.arrow")
    assert (len(file), file.num_layers, file.hidden_size) == (2, 2, 4)
    assert file.words(0).tobytes() == words.tobytes() and file.words(1).tobytes() == words[:1].tobytes()
    back = torch.from_numpy(file.words(0).view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(back.view(torch.int16), states.view(torch.int16))
    schema = pa.ipc.open_file(str(tmp_path / "s.arrow")).schema
    assert schema.metadata == {b"dtype": b"bfloat16", b"shape": b"[2, 4]"}


def test_a_cut_or_empty_states_file_is_refused(tmp_path):
    with StatesWriter(tmp_path / "s.arrow", num_layers=2, hidden_size=4) as writer:
        writer.append(np.ones((3, 2, 4), np.uint16))
    whole = (tmp_path / "s.arrow").read_bytes()
    for cut in (0, len(whole) // 2, len(whole) - 1):
        (tmp_path / "s.arrow").write_bytes(whole[:cut])
        with pytest.raises(SchemaError, match="not a whole Arrow file"):
            StatesFile(tmp_path / "s.arrow")


def test_every_row_has_a_state_for_each_token_but_its_last(tmp_path):
    rows = [response(n, num_tokens=5 + n) for n in range(5)]
    artifact, _ = run(tmp_path, rows)
    found = cached_rows(artifact)
    assert [row["num_states"] for row in found] == [4, 5, 6, 7, 8]
    assert artifact.manifest.num_states == 30 and artifact.manifest.hidden_size == HIDDEN
    for row, asked in zip(found, rows, strict=True):
        assert row["ids"] == asked["prompt_ids"] + asked["response_ids"] and row["num_prompt_tokens"] == 3
        words = StatesFile(artifact.folder / row["states_file"]).words(row["states_batch"])
        expected = random_words(type("R", (), {"ids": tuple(row["ids"])}))
        assert words.tobytes() == expected.tobytes()


def test_one_number_that_is_none_keeps_one_row_out_with_its_place(tmp_path):
    def states(request):
        words = random_words(request)
        if request.row_id == "row-3":
            words[2, 1, 3] = bf16_words([float("nan")])[0]
        return words

    artifact, _ = run(tmp_path, [response(n) for n in range(6)], states)
    assert rejects_of(artifact) == {
        "row-3": {"reason": "not_finite", "position": 2, "layer_index": 1, "element": 3},
    }
    assert [row["row_id"] for row in cached_rows(artifact)] == ["row-0", "row-1", "row-2", "row-4", "row-5"]


def test_zeros_gaps_other_scales_and_anothers_states_are_kept_out(tmp_path):
    twin = random_words(type("R", (), {"ids": (1, 2, 3, 4, 5, 6)}))

    def states(request):
        words = random_words(request)
        match int(request.row_id.split("-")[1]):
            case 0:
                words[:] = 0
            case 1:
                words[1:] = 0x8000  # negative zeros: 4 of 5 positions
            case 2 | 3:
                words = twin
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


def test_another_rows_states_are_found_across_parts_and_across_runs(tmp_path):
    twin = random_words(type("R", (), {"ids": (1, 2, 3, 4, 5, 6)}))
    rows = [response(n) for n in range(6)]

    def dies_in_the_second_part(request):
        if request.row_id == "row-2":
            raise KeyboardInterrupt
        return twin if request.row_id == "row-0" else random_words(request)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rows, dies_in_the_second_part)
    artifact, _ = run(tmp_path, rows, lambda r: twin if r.row_id == "row-5" else random_words(r))
    assert rejects_of(artifact) == {"row-5": {"reason": "duplicate_states", "same_as": ["row-0"]}}


def test_equal_inputs_may_have_equal_states(tmp_path):
    rows = [{**response(0), "row_id": "row-0"}, {**response(0), "row_id": "row-0b"}]
    artifact, _ = run(tmp_path, rows)
    assert artifact.manifest.rejects == {} and len(cached_rows(artifact)) == 2


def test_too_many_quarantined_rows_stop_the_stage(tmp_path):
    with pytest.raises(StageError, match=r"3 of 3 rows rejected.*zero_states.*capture.max_reject_share"):
        run(tmp_path, [response(n) for n in range(3)], lambda r: random_words(r) * 0, max_reject_share=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_3_error": 0.4}, "layer 3: relative error 0.4"),
        ({"layer_3_error": float("nan")}, "layer 3: relative error nan"),
        ({"layer_1_nearest": 2.0}, "layer 1: nearest to the reference's layer 2"),
        ({"batched_error": 0.5}, "captured alone and in a batch"),
    ],
)
def test_a_failed_check_stops_before_anything_is_captured(tmp_path, change, message):
    engines = ScriptedEngines(states=random_words, check=SOUND | change)
    config = config_for(tmp_path)
    with pytest.raises(StageError, match=message):
        capture.run(config, response_set(config, [response(0)]), engines=engines, target_layer_ids=LAYERS)
    assert engines.requests == []


def test_the_check_tells_a_shifted_layer_and_a_shifted_position_apart_from_noise():
    reference = np.random.default_rng(0).standard_normal((5, 12, 8)).astype(np.float32).cumsum(axis=0) + 3
    taken = [1, 3]

    def check(states):
        words = bf16_words(states.transpose(1, 0, 2).tolist())
        return compare(words, words, reference, taken)

    judge(check(reference[taken]), layer_ids=taken, max_error=0.1)
    assert check(reference[taken])["layer_3_error"] < 0.005
    with pytest.raises(StageError, match="nearest to the reference's layer 4"):
        judge(check(reference[[1, 4]]), layer_ids=taken, max_error=0.1)
    with pytest.raises(StageError, match="relative error"):
        judge(check(np.roll(reference[taken], 1, axis=1)), layer_ids=taken, max_error=0.1)


def test_layers_out_of_order_and_another_targets_responses_are_refused(tmp_path):
    config = config_for(tmp_path)
    responses = response_set(config, [response(0)])
    for layers in ((), (3, 1), (1, 1)):
        with pytest.raises(ConfigError, match="rising order"):
            capture.run(config, responses, engines=ScriptedEngines(), target_layer_ids=layers)
    save_file({"w": np.ones(2, np.float32)}, config.target.model / "model.safetensors")
    with pytest.raises(FingerprintError, match="weights"):
        capture.run(config, responses, engines=ScriptedEngines(), target_layer_ids=LAYERS)


def test_without_norms_to_compare_with_only_the_rest_is_judged():
    words = bf16_words([[[1e6] * 4]])
    assert find_fault(words, num_states=1) is None
    assert find_fault(words, num_states=1, typical_norms=[1.0]).reason == "norm_out_of_range"


KILLED = """
import sys, time
from pathlib import Path
from tests.pipeline import test_capture as t
root = Path(sys.argv[1])
def states(request):
    if request.row_id == "row-5":  # the second row of part 2: its file is half written
        (root / "writing").touch()
        time.sleep(60)
    return t.random_words(request)
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
    left_over = folder / ".capturing-00002.arrow"
    assert left_over.exists() and not (folder / "manifest.json").exists()
    (folder / "states-00003.arrow").touch()  # what other writers have left behind: nothing, and no footer
    (folder / "rows-00003.parquet").write_bytes(b"PAR1cut")
    committed = {path: path.stat().st_mtime_ns for path in folder.glob("*-0000[01].*")}
    assert len(committed) == 6
    artifact, engines = run(tmp_path, [response(n) for n in range(9)])
    assert [request.row_id for request in engines.requests] == [f"row-{n}" for n in range(4, 9)]
    assert {path: path.stat().st_mtime_ns for path in committed} == committed
    assert [row["row_id"] for row in cached_rows(artifact)] == [f"row-{n}" for n in range(9)]
    listed = {shard.path for shard in artifact.manifest.shards} | {"manifest.json"}
    assert {name for name in os.listdir(folder) if not name.startswith("part-")} == listed
    _, again = run(tmp_path, [response(n) for n in range(9)])
    assert again.requests == []
