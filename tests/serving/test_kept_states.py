"""What the worker keeps, from scripted forward passes: by the device's positions, the last write, after the copy."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serving.engine import versions
from serving.engine.capture import LAST_LAYER_KEY, CaptureWorker
from serving.engine.kept_states import KeptStates
from serving.engine.runners import RunnerV1, RunnerV2, known_runner
from serving.errors import VersionError

HIDDEN = 4
V1State = namedtuple("V1State", "scheduler_output aux_hidden_states")
V2State = namedtuple("V2State", "input_batch aux_hidden_states")


def layers(values, num_layers=2, padding=3):
    """A forward pass's states: layer l of row t is the value 1000 * l + values[t], and rows of padding follow."""
    rows = torch.tensor([*values, *[-1.0] * padding])
    return [(rows + 1000 * layer)[:, None].expand(-1, HIDDEN).contiguous() for layer in range(num_layers)]


def v1_runner(requests, *, host_counts):
    """A V1 runner after a forward pass: ``requests`` are (id, device positions, values), in batch order."""
    counts = [len(positions) for _, positions, _ in requests]
    values = [value for _, _, found in requests for value in found]
    positions = [position for _, found, _ in requests for position in found]
    return SimpleNamespace(
        execute_model_state=V1State(None, layers(values)),
        input_batch=SimpleNamespace(
            req_ids=[name for name, _, _ in requests], num_computed_tokens_cpu=np.array(host_counts)
        ),
        requests={
            name: SimpleNamespace(num_computed_tokens=n) for (name, _, _), n in zip(requests, host_counts, strict=True)
        },
        query_start_loc=SimpleNamespace(np=np.cumsum([0, *counts, *[0] * 4])),
        positions=torch.tensor([*positions, *[0] * 8]),
    )


def words(values):
    return torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def test_positions_are_the_devices_where_the_host_counts_rejected_drafts_as_computed():
    kept = KeptStates(2)
    kept.want("engine-7", "row", capacity=16, exact=False)
    # A prompt of 4; then an anchor and three drafts, of which the device accepts one, twice.
    passes = [
        ([0, 1, 2, 3], [10, 11, 12, 13], 0),
        ([4, 5, 6, 7], [20, 21, 22, 23], 4),
        ([6, 7, 8, 9], [30, 31, 32, 33], 8),  # the host thinks that all of 4..7 stand
        ([8, 9, 10, 11], [40, 41, 42, 43], 12),
    ]
    for positions, values, host_count in passes:
        kept.keep(RunnerV1(v1_runner([("engine-7", positions, values)], host_counts=[host_count])).forward_pass())
    found, holes = kept.take("row", 10)
    assert holes == []
    expected = [10, 11, 12, 13, 20, 21, 30, 31, 40, 41]
    assert (found[:, 0, 0] == words([float(v) for v in expected])).all()
    assert (found[:, 1, :] == words([1000.0 + v for v in expected])[:, None]).all()


def test_rows_of_one_batch_go_to_their_own_requests_and_others_are_not_kept():
    kept = KeptStates(2)
    kept.want("b", "row-b", capacity=8, exact=False)
    kept.want("c", "row-c", capacity=8, exact=False)
    batch = [("a", [0, 1], [1, 2]), ("c", [0, 1, 2], [5, 6, 7]), ("b", [0], [9])]
    kept.keep(RunnerV1(v1_runner(batch, host_counts=[0, 0, 0])).forward_pass())
    assert (kept.take("row-c", 3)[0][:, 0, 0] == words([5.0, 6.0, 7.0])).all()
    assert (kept.take("row-b", 1)[0][:, 0, 0] == words([9.0])).all()
    assert kept.take("a", 2) == (None, [0, 1])


def test_drafts_beyond_what_a_request_can_emit_are_left_out_and_holes_are_said():
    kept = KeptStates(2)
    kept.want("a", "row", capacity=6, exact=False)
    kept.keep(RunnerV1(v1_runner([("a", [4, 5, 6, 7], [1, 2, 3, 4])], host_counts=[4])).forward_pass())
    assert kept.take("row", 7) == (None, [0, 1, 2, 3, 6])


def test_a_preempted_request_that_starts_again_keeps_its_row():
    kept = KeptStates(2)
    kept.want("a", "row", capacity=6, exact=False)
    kept.keep(RunnerV1(v1_runner([("a", [0, 1], [1, 2])], host_counts=[0])).forward_pass())
    kept.want("a", "row", capacity=6, exact=False)
    kept.keep(RunnerV1(v1_runner([("a", [0, 1, 2], [1, 2, 3])], host_counts=[0])).forward_pass())
    assert len(kept) == 1 and (kept.take("row", 3)[0][:, 0, 0] == words([1.0, 2.0, 3.0])).all()
    assert len(kept) == 0


def test_nothing_is_written_for_a_request_whose_states_were_taken():
    kept = KeptStates(2)
    kept.want("a", "row", capacity=6, exact=False)
    late = RunnerV1(v1_runner([("a", [0], [1])], host_counts=[0])).forward_pass()
    kept.keep(late)
    kept.take("row", 1)
    kept.keep(late)  # a step that was already under way
    assert len(kept) == 0


def test_an_exact_request_has_float32_states_of_every_layer_and_its_neighbours_have_theirs():
    kept = KeptStates(1)
    kept.want("exact", "exact", capacity=2, exact=True)
    kept.want("plain", "plain", capacity=2, exact=False)
    third = 1 / 3
    batch = [("plain", [0], [third]), ("exact", [0], [third])]
    kept.keep(RunnerV1(v1_runner(batch, host_counts=[0, 0])).forward_pass())
    exact, plain = kept.take("exact", 1)[0], kept.take("plain", 1)[0]
    assert exact.dtype == np.float32 and exact.shape == (1, 2, HIDDEN) and exact[0, 0, 0] == np.float32(third)
    assert plain.dtype == np.uint16 and plain.shape == (1, 1, HIDDEN) and plain[0, 0, 0] == words([third])[0]


def test_states_on_their_way_from_a_gpu_are_dealt_out_only_after_the_copy_is_over(monkeypatch):
    kept = KeptStates(2)
    kept.want("a", "row", capacity=4, exact=False)
    plain_copy, over = kept._copy, []

    def slow_copy(*args):
        copy = plain_copy(*args)
        event = SimpleNamespace(query=lambda: bool(over), synchronize=lambda: arrived(copy))
        copy.arrives, copy.states = copy.states, torch.full_like(copy.states, float("nan"))
        copy.event = event
        return copy

    def arrived(copy):
        over.append(copy)
        copy.states = copy.arrives

    monkeypatch.setattr(kept, "_copy", slow_copy)
    kept.keep(RunnerV1(v1_runner([("a", [0, 1], [1, 2])], host_counts=[0])).forward_pass())
    assert len(kept._copies) == 1  # still on its way
    assert (kept.take("row", 2)[0][:, 0, 0] == words([1.0, 2.0])).all() and len(over) == 1


def test_the_v2_runners_batch_is_read_from_its_execution_state():
    batch = SimpleNamespace(
        req_ids=["b", "a"],
        num_reqs=2,
        query_start_loc_np=np.array([0, 1, 3, 3, 3]),
        positions=torch.tensor([5, 0, 1, 0, 0, 0]),
    )
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=1)),
        speculator=None,
        execute_model_state=V2State(batch, layers([7, 8, 9])),
    )
    kept = KeptStates(2)
    kept.want("a", "row", capacity=2, exact=False)
    kept.keep(RunnerV2(runner).forward_pass())
    assert (kept.take("row", 2)[0][:, 0, 0] == words([8.0, 9.0])).all()


def test_a_drafter_gets_its_own_layers_when_one_more_was_asked_for():
    runner = SimpleNamespace(execute_model_state=V1State("step", layers([1], num_layers=3)))
    RunnerV1(runner).leave(2)
    assert len(runner.execute_model_state.aux_hidden_states) == 2
    assert runner.execute_model_state.scheduler_output == "step"


def test_an_unknown_runner_is_refused_by_name():
    class ModelRunnerV3:
        pass

    with pytest.raises(RuntimeError, match=r"ModelRunnerV3 computes; expected vLLM's V1 or V2"):
        known_runner(ModelRunnerV3())


@pytest.mark.parametrize(
    ("parallel", "adaptive", "message"), [(2, False, "context parallelism"), (1, True, "adaptive verification")]
)
def test_batches_that_v2_splits_or_trims_are_refused(parallel, adaptive, message):
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=parallel)),
        speculator=SimpleNamespace(enable_adaptive_verification=adaptive),
    )
    with pytest.raises(RuntimeError, match=message):
        RunnerV2(runner)


def test_last_states_go_through_the_models_own_norm_whatever_its_gain_means():
    """A family that stores w and applies 1 + w: only its own module knows."""
    gain, head = (
        torch.tensor([0.5, -0.25, 0.0, 1.0]),
        torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)),
    )

    def norm(hidden):
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True)) * (1 + gain)

    model = SimpleNamespace(model=SimpleNamespace(norm=norm), compute_logits=lambda hidden: hidden @ head.T)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        device=torch.device("cpu"),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    states = np.array([[1.0, 2.0, -1.0, 0.5], [0.1, 0.0, 3.0, 1.0]], np.float32)
    found = CaptureWorker.rebuilt_logprobs(worker, states, [2, 6])
    for row, token, logprob, best in zip(states, (2, 6), found["tokens"], found["best"], strict=True):
        normed = row / np.sqrt((row**2).mean()) * (1 + gain.numpy())
        scores = head.numpy() @ normed
        scores -= np.log(np.exp(scores).sum())
        np.testing.assert_allclose([logprob, best], [scores[token], scores.max()], rtol=1e-5)


def test_a_model_without_that_norm_says_so_and_raises_nothing():
    model = SimpleNamespace(model=SimpleNamespace(), compute_logits=lambda hidden: hidden)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        device=torch.device("cpu"),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    found = CaptureWorker.rebuilt_logprobs(worker, np.ones((1, HIDDEN), np.float32), [0])
    assert "norm" in found["error"]


def test_an_engine_of_another_release_is_refused_by_name_before_it_loads(monkeypatch):
    monkeypatch.setattr(versions, "installed_vllm", lambda: ("vllm", "0.33.1"))
    with pytest.raises(VersionError, match=r"vllm 0\.33\.1 is installed, expected 0\.32\.0"):
        CaptureWorker.load_model(SimpleNamespace())


def worker_of(model, *, layers=(0, 2), pipeline_stages=1):
    return SimpleNamespace(
        _layers=layers,
        _num_decoder_layers=lambda: 4,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline_stages)),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (worker_of(None, layers=(2, 0)), "rising order"),
        (worker_of(None, layers=(1, 1)), "rising order"),
        (worker_of(None, layers=(-1, 2)), "rising order"),
        (worker_of(None, layers=(0, 4)), "below 4"),
        (worker_of(None, pipeline_stages=2), "needs one pipeline stage, found 2"),
        (worker_of(SimpleNamespace()), "SimpleNamespace gives no auxiliary hidden states"),
    ],
)
def test_an_engine_that_cannot_capture_says_why_when_it_loads(worker, message):
    with pytest.raises(RuntimeError, match=message):
        CaptureWorker._ask_for_layers(worker)


def test_a_compiled_engine_gives_one_more_layer_only_where_it_loaded_with_it():
    def worker(config, *, eager):
        return SimpleNamespace(
            _reader=object(),
            _set_layers=lambda *, last: None,
            vllm_config=SimpleNamespace(additional_config=config),
            model_config=SimpleNamespace(enforce_eager=eager),
        )

    assert CaptureWorker.give_last_layer(worker({}, eager=True), True) is None
    assert "compiled" in CaptureWorker.give_last_layer(worker({}, eager=False), True)
    assert CaptureWorker.give_last_layer(worker({LAST_LAYER_KEY: True}, eager=False), True) is None
