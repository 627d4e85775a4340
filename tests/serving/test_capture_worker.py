"""The capture worker in a real engine: the right layer, the right position, every position, and holes said aloud."""

import numpy as np
import pytest
import torch
from tiny import HeldStates, counting_target, tiny_target

from jobs.engine_calls import Asked
from jobs.engine_check import Probe
from jobs.engine_rows import capture_args
from jobs.engine_sampling import read_params
from jobs.target_engine import TargetEngine
from pipeline.capture_check import judge
from pipeline.engines import CaptureRequest, GenerateRequest
from pipeline.errors import StageError
from pipeline.quantize import as_float32

LAYERS = (0, 2, 5)  # the first, one between, and the last: the one that a final norm must not touch
KV_BLOCK = 32

pytestmark = pytest.mark.usefixtures("restored_environment")


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("random"), layers=6)


@pytest.fixture(scope="module")
def start():
    """A function that starts an engine; all of them end together, as vLLM wants it."""
    engines = []

    def start(target, **settings):
        common = {"target_layer_ids": LAYERS, "max_model_len": 512, "kv_cache_gib": 0.125, "max_num_seqs": 8}
        engines.append(TargetEngine(target, **common | settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(start, random_target):
    """An engine that cuts long prompts into chunks of 64 tokens and caches prefixes in blocks of 32."""
    return start(
        random_target,
        dtype="float32",
        check="head",
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


def test_a_layers_number_can_be_read_from_a_target_that_counts(start, tmp_path):
    engine = start(counting_target(tmp_path / "counting"), dtype="bfloat16")
    sink = HeldStates()
    (captured,) = engine.prefill([CaptureRequest("row", ids_of(1, 40))], states=sink)
    assert captured.reason is None
    states = as_float32(sink.words["row"])
    assert states.shape == (39, 3, 128)
    for index, layer in enumerate(LAYERS):
        assert (states[:, index] == layer + 1).all()


def test_every_position_of_every_row_is_the_references_whatever_shares_its_batch(engine, random_target):
    requests = [CaptureRequest(f"row-{n}", ids_of(n, length)) for n, length in enumerate((2, 33, 64, 65, 200, 300))]
    sink = HeldStates()
    results = engine.prefill(requests, states=sink)
    for request, result in zip(requests, results, strict=True):
        assert result.row_id == request.row_id and result.reason is None
        assert_same(sink.words[request.row_id], reference(random_target, list(request.ids))[:-1])


def test_states_kept_while_the_engine_answers_are_those_of_the_whole_reply(engine, random_target, monkeypatch):
    asked = [GenerateRequest(f"row-{n}", ids_of(40 + n, length), 9, 0.0, None, 1) for n, length in enumerate((170, 12))]
    sink, added, add = HeldStates(), [], engine._shared.add
    monkeypatch.setattr(engine._shared, "add", lambda call, rows: added.extend(rows) or add(call, rows))
    replies, captured = engine.generate(asked, states=sink)
    assert len(added) == 2  # no token goes through the target again
    assert [result.reason for result in captured] == [None, None]
    for request, reply in zip(asked, replies, strict=True):
        ids = [*request.prompt_ids, *reply.ids]
        assert_same(sink.words[request.row_id], reference(random_target, ids)[:-1])
    assert engine._shared.ask_worker("drop_states") == 0


def test_a_preempted_reply_has_the_states_of_one_that_ran_through(start, random_target, monkeypatch):
    # Twelve blocks of 32 tokens; the six replies end at 100 tokens, so at 24 blocks.
    settings = {"max_model_len": 256, "block_size": KV_BLOCK, "num_gpu_blocks_override": 12}
    engine = start(random_target, dtype="float32", **settings)
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda request, *args, **kwargs: preempted.append(request) or preempt(request, *args, **kwargs),
    )
    sampling = '{"ignore_eos": true}'
    asked = [GenerateRequest(f"row-{n}", ids_of(70 + n, 30), 70, 0.0, None, 1, sampling) for n in range(6)]
    sink = HeldStates()
    replies, captured = engine.generate(asked, states=sink)
    assert preempted and [result.reason for result in captured] == [None] * 6
    for request, reply in zip(asked, replies, strict=True):
        ids = [*request.prompt_ids, *reply.ids]
        assert len(ids) == 100
        assert_same(sink.words[request.row_id], reference(random_target, ids)[:-1])


def test_a_cached_prefix_leaves_holes_that_are_said_and_capture_does_not_read_it(engine, random_target):
    shared = ids_of(30, 4 * KV_BLOCK)
    first, second = (*shared, *ids_of(31, 8)), (*shared, *ids_of(32, 8))
    sink = HeldStates()
    engine.prefill([CaptureRequest("first", first)], states=sink)
    with engine._shared.call() as call:
        key = call.new_key()
        params = read_params(capture_args(key))
        params.skip_reading_prefix_cache = False
        assert call.add([Asked(key, second[:-1], params, captured=True)]) == {}
        (done,) = call.results()
    assert done.taken["states"] is None and done.taken["holes"] == list(range(4 * KV_BLOCK))  # the cache was hit
    (result,) = engine.prefill([CaptureRequest("second", second)], states=sink)
    assert result.reason is None
    assert_same(sink.words["second"], reference(random_target, list(second))[:-1])


def changed_answer(monkeypatch, change):
    """Make the head check see other states of the checked prompt than the engine's."""
    answer = Probe.answer

    def changed(self, ids, **settings):
        reply, logprobs, states = answer(self, ids, **settings)
        return reply, logprobs, change(states)

    monkeypatch.setattr(Probe, "answer", changed)


def test_the_last_layers_states_give_the_engines_own_next_tokens_back(engine):
    check = engine.check_capture(ids_of(60, 40), [ids_of(61, 100)])
    judge(check, layer_ids=LAYERS, max_error=1e-3)
    assert check["head_top1"] == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("one position late", lambda states: np.roll(states, 1, axis=0)),
        ("another layer", lambda states: states[:, [0, 1, 1]]),
    ],
)
def test_states_that_are_not_the_last_layers_fail_the_head_check(engine, monkeypatch, name, change):
    changed_answer(monkeypatch, change)
    check = engine.check_capture(ids_of(60, 40), [])
    with pytest.raises(StageError, match="next tokens"):
        judge(check, layer_ids=LAYERS, max_error=0.1)


def test_layers_out_of_order_stop_the_engine(random_target):
    with pytest.raises(RuntimeError, match="rising order"):
        TargetEngine(random_target, dtype="float32", max_model_len=64, target_layer_ids=(3, 1), kv_cache_gib=0.125)
