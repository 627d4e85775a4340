"""The capture worker in a real engine: the right layer, the right position, every position, and holes said aloud."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.target_engine import TargetEngine
from pipeline.engines import CaptureRequest, GenerateRequest
from pipeline.states import StatesFile, as_float32
from tests.tiny import tiny_target

LAYERS = (0, 2, 5)  # the first, one between, and the last: the one that a final norm must not touch
KV_BLOCK = 32


@pytest.fixture(scope="module", autouse=True)
def restored_environment():
    """An in-process engine sets variables that must not reach the servers of other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def counting_target(tmp_path_factory):
    """A Llama whose layer i adds exactly 1 to every element of the residual, so the state after it is i + 1.

    All matrices are zero; the attention's and the MLP's output biases are one half each.
    """
    folder = tiny_target(tmp_path_factory.mktemp("counting"), layers=6)
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.zeros_like(value) for name, value in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if "_proj." in name]:
        out = torch.zeros(tensors[name].shape[0])
        tensors[name.replace("weight", "bias")] = out + (0.5 if "o_proj" in name or "down_proj" in name else 0.0)
    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = torch.full_like(tensors[name], 7.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("random"), layers=6)


@pytest.fixture(scope="module")
def engine(random_target):
    """An engine that cuts long prompts into chunks of 64 tokens and caches prefixes in blocks of 32."""
    return TargetEngine(
        random_target,
        dtype="float32",
        max_model_len=512,
        target_layer_ids=LAYERS,
        kv_cache_gib=0.125,
        max_num_seqs=8,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
        block_size=KV_BLOCK,
        enable_prefix_caching=True,
    )


def reference(folder, ids):  # float32 [n, L, H]
    """The layers' outputs by transformers: hooks on the layers themselves."""
    from transformers import LlamaForCausalLM

    model, taken = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
    for layer in LAYERS:
        model.model.layers[layer].register_forward_hook(
            lambda _m, _i, out, layer=layer: taken.__setitem__(layer, out if torch.is_tensor(out) else out[0])
        )
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return torch.stack([taken[layer][0] for layer in LAYERS], dim=1).numpy()


def assert_same(words, expected):
    """Equal but for the rounding of float32 to bf16, which keeps 8 bits."""
    assert words.shape == expected.shape
    np.testing.assert_allclose(as_float32(words), expected, rtol=2**-8, atol=2e-5)


def ids_of(seed, length):
    return tuple(np.random.default_rng(seed).integers(6, 512, length).tolist())


def test_a_layers_number_can_be_read_from_a_target_that_counts(counting_target, tmp_path):
    engine = TargetEngine(
        counting_target, dtype="bfloat16", max_model_len=128, target_layer_ids=LAYERS, kv_cache_gib=0.125
    )
    (result,) = engine.capture([CaptureRequest("row", ids_of(1, 40))], tmp_path / "s.arrow", ())
    assert result.reason is None
    states = as_float32(StatesFile(tmp_path / "s.arrow").words(result.states_batch))
    assert states.shape == (39, 3, 128)
    for index, layer in enumerate(LAYERS):
        assert (states[:, index] == layer + 1).all()


def test_every_position_of_every_row_is_the_references_whatever_shares_its_batch(engine, random_target, tmp_path):
    requests = [CaptureRequest(f"row-{n}", ids_of(n, length)) for n, length in enumerate((2, 33, 64, 65, 200, 300))]
    results = engine.capture(requests, tmp_path / "s.arrow", ())
    file = StatesFile(tmp_path / "s.arrow")
    for request, result in zip(requests, results, strict=True):
        assert result.row_id == request.row_id and result.reason is None
        expected = reference(random_target, list(request.ids))[:-1]
        assert_same(file.words(result.states_batch), expected)


def test_states_taken_while_the_engine_generates_are_those_of_the_whole_reply(engine, random_target):
    prompt, num_new = ids_of(20, 50), 9
    params = engine._capture_sampling("live")
    params.max_tokens, params.ignore_eos = num_new, True
    assert engine._add("live", prompt, params) is None
    ((_, completion),) = engine._run()
    ids = [*prompt, *completion.token_ids]
    assert len(ids) == 59
    assert_same(engine._take("live", len(ids) - 1)["states"], reference(random_target, ids)[:-1])


def test_rows_that_the_engine_answered_are_captured_without_a_second_pass(engine, random_target, tmp_path, monkeypatch):
    asked = [GenerateRequest(f"kept-{n}", ids_of(40 + n, length), 9, 0.0, None, 1) for n, length in enumerate((70, 12))]
    replies = engine.generate(asked)
    rows = [CaptureRequest(r.row_id, (*r.prompt_ids, *reply.ids)) for r, reply in zip(asked, replies, strict=True)]
    run = []
    monkeypatch.setattr(engine, "_add", lambda *request: run.append(request))
    results = engine.capture(rows, tmp_path / "s.arrow", ())
    assert run == []
    for row, result in zip(rows, results, strict=True):
        words = StatesFile(tmp_path / "s.arrow").words(result.states_batch)
        assert_same(words, reference(random_target, list(row.ids))[:-1])
    assert engine._kept == {} and engine._llm.collective_rpc("drop_states") == [0]


def test_a_row_whose_ids_are_not_what_the_engine_emitted_is_run_through_it(engine, random_target, tmp_path):
    (reply,) = engine.generate([GenerateRequest("other", ids_of(50, 20), 5, 0.0, None, 1)])
    row = CaptureRequest("other", (*ids_of(51, 20), *reply.ids))
    (result,) = engine.capture([row], tmp_path / "s.arrow", ())
    words = StatesFile(tmp_path / "s.arrow").words(result.states_batch)
    assert_same(words, reference(random_target, list(row.ids))[:-1])


def test_a_cached_prefix_leaves_holes_that_are_said_and_capture_does_not_read_it(engine, random_target, tmp_path):
    shared = ids_of(30, 4 * KV_BLOCK)
    first, second = (*shared, *ids_of(31, 8)), (*shared, *ids_of(32, 8))
    engine.capture([CaptureRequest("first", first)], tmp_path / "first.arrow", ())
    params = engine._capture_sampling("reads-cache")
    params.skip_reading_prefix_cache = False
    assert engine._add("reads-cache", second[:-1], params) is None
    list(engine._run())
    taken = engine._take("reads-cache", len(second) - 1)
    assert taken["states"] is None and taken["holes"] == list(range(4 * KV_BLOCK))  # the cache was hit
    (result,) = engine.capture([CaptureRequest("second", second)], tmp_path / "second.arrow", ())
    assert result.reason is None
    expected = reference(random_target, list(second))[:-1]
    assert_same(StatesFile(tmp_path / "second.arrow").words(result.states_batch), expected)


def test_a_row_with_holes_is_taken_once_more_and_then_given_up(engine, tmp_path, monkeypatch):
    taken, lost = [], {"states": None, "holes": [3], "error": "1 of 9 positions never computed"}
    real = engine._take

    def loses_first(request_id, num_states):
        taken.append(request_id)
        found = real(request_id, num_states)
        return lost if len(taken) == 1 else found

    monkeypatch.setattr(engine, "_take", loses_first)
    (result,) = engine.capture([CaptureRequest("row", ids_of(40, 10))], tmp_path / "a.arrow", ())
    assert result.reason is None and len(taken) == 2
    monkeypatch.setattr(engine, "_take", lambda *_: lost)
    (result,) = engine.capture([CaptureRequest("row", ids_of(40, 10))], tmp_path / "b.arrow", ())
    assert result.reason == "holes" and result.detail["positions"] == [3]
    monkeypatch.undo()
    assert engine._llm.collective_rpc("drop_states") == [1]  # what the last try captured and nobody took


def test_a_row_that_cannot_be_run_is_refused_alone(engine, tmp_path):
    requests = [
        CaptureRequest("short", (7,)),
        CaptureRequest("foreign", (7, 9999, 8)),
        CaptureRequest("long", ids_of(50, 600)),
        CaptureRequest("good", ids_of(51, 10)),
    ]
    results = engine.capture(requests, tmp_path / "s.arrow", ())
    assert [result.reason for result in results] == ["too_short", "refused", "refused", None]


def test_the_capture_check_passes_on_the_targets_own_weights(engine):
    check = engine.check_capture(ids_of(60, 40), [ids_of(61, 100), ids_of(62, 30)])
    assert all(check[f"layer_{layer}_nearest"] == layer and check[f"layer_{layer}_error"] < 0.01 for layer in LAYERS)
    assert check["batched_error"] < 0.01


def test_layers_out_of_order_stop_the_engine(random_target):
    with pytest.raises(RuntimeError, match="rising order"):
        TargetEngine(random_target, dtype="float32", max_model_len=64, target_layer_ids=(3, 1), kv_cache_gib=0.125)


def test_seeded_replies_need_no_generator_to_be_set_back(random_target):
    engine = TargetEngine(
        random_target,
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.125,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    # The second and third prompt together do not fit one step: in chunks, vLLM's CPU runner would stop here.
    asked = [GenerateRequest(f"seeded-{n}", ids_of(60 + n, 150), 5, 0.7, 1.0, n) for n in range(3)]
    assert [len(reply.ids) for reply in engine.generate(asked)] == [5, 5, 5]
