"""The capture check's figures and verdicts, on arrays whose errors are known."""

import numpy as np
import pytest

from pipeline.capture_check import (
    MAX_HEAD_MARGIN,
    compare_head,
    compare_reference,
    compare_runs,
    judge,
    typical_norms,
    worst_error,
)
from pipeline.errors import StageError

LAYERS = (1, 3)


def outputs(num_layers=5, n=6, hidden=8):  # float32 [num_layers, n, H]
    return np.random.default_rng(0).normal(size=(num_layers, n, hidden)).astype(np.float32)


def captured(reference, layers=LAYERS):  # float32 [n, L, H]
    return np.stack([reference[layer] for layer in layers], axis=1)


def checked(states, reference, *, batched=None, answered=None):
    batched = states if batched is None else batched
    answered = states if answered is None else answered
    return compare_runs(states, batched, answered, LAYERS) | compare_reference(states, reference, LAYERS)


def test_the_targets_own_states_pass_and_every_figure_is_as_counted():
    reference = outputs()
    states = captured(reference)
    states[2, 1] *= 1.01  # one position of layer 3
    check = checked(states, reference)
    judge(check, layer_ids=LAYERS, max_error=0.02)
    assert check["layer_1_error"] == 0 and check["layer_3_error"] == pytest.approx(0.01, rel=1e-3)
    assert (check["layer_1_nearest"], check["layer_3_nearest"]) == (1, 3)
    assert worst_error(check) == check["layer_3_error"]
    expected = [np.median([np.sqrt(np.mean(row**2)) for row in states[:, i]]) for i in (0, 1)]
    assert typical_norms(check, LAYERS) == pytest.approx(expected)


def test_a_layer_that_is_off_by_one_is_named():
    reference = outputs()
    with pytest.raises(StageError, match="layer 3: nearest to the reference's layer 4"):
        judge(checked(captured(reference, (1, 4)), reference), layer_ids=LAYERS, max_error=10)


def test_positions_that_are_shifted_by_one_fail():
    reference = outputs()
    with pytest.raises(StageError, match="layer 1: relative error"):
        judge(checked(np.roll(captured(reference), 1, axis=0), reference), layer_ids=LAYERS, max_error=0.1)


def test_a_number_that_is_none_fails():
    reference = outputs()
    states = captured(reference)
    states[4, 0, 2] = np.nan
    with pytest.raises(StageError, match="layer 1"):
        judge(checked(states, reference), layer_ids=LAYERS, max_error=0.1)


@pytest.mark.parametrize(("which", "message"), [("batched", "in a batch"), ("answered", "read and answered")])
def test_a_run_that_differs_from_the_prompt_alone_fails(which, message):
    reference = outputs()
    states = captured(reference)
    other = states.copy()
    other[5, 0] *= 1.5  # a small layer must not hide behind a large one, nor a position behind its neighbours
    with pytest.raises(StageError, match=message):
        judge(checked(states, reference, **{which: other}), layer_ids=LAYERS, max_error=0.1)


def head_check(rebuilt, best, emitted):
    states = captured(outputs())
    return compare_runs(states, states, states, LAYERS) | compare_head(rebuilt, best, emitted)


def test_the_head_check_counts_the_tokens_that_come_back():
    check = head_check(rebuilt=[-0.1, -2.0, -1.0], best=[-0.1, -1.9, -1.0], emitted=[-0.1, -2.0, -1.2])
    assert check["head_top1"] == pytest.approx(2 / 3)
    assert check["head_margin"] == pytest.approx(0.1)
    assert check["head_error"] == pytest.approx(np.exp(-1.0) - np.exp(-1.2))
    judge(check, layer_ids=LAYERS, max_error=0.1)  # 0.1 nats below the best is a near-tie


def test_a_token_that_the_last_layer_does_not_explain_fails():
    check = head_check(rebuilt=[-0.1, -3.0], best=[-0.1, -0.4], emitted=[-0.1, -3.0])
    with pytest.raises(StageError, match="50% of the engine's next tokens"):
        judge(check, layer_ids=LAYERS, max_error=0.1)


def test_probabilities_that_are_too_flat_fail_though_every_token_is_the_best():
    check = head_check(rebuilt=[-1.0, -1.2], best=[-1.0, -1.2], emitted=[-0.1, -0.2])
    assert check["head_top1"] == 1 and check["head_margin"] < MAX_HEAD_MARGIN
    with pytest.raises(StageError, match="probability is off"):
        judge(check, layer_ids=LAYERS, max_error=0.1)
