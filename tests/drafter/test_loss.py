import math

import pytest
import torch
import toys

from bench.oracles.plain_reference import decay, dpace, full_logit_loss
from drafter import loss as loss_module
from drafter.loss import Piece, block_loss, decay_weights, dpace_weights

WEIGHTINGS = {
    "decay": (decay_weights(8), decay(4.0), 7),
    "decay with a gamma": (decay_weights(4, 1.7), decay(1.7), 3),
    "dpace": (dpace_weights(0.5), dpace(0.5), 7),
    "dpace, little smoothing": (dpace_weights(0.05), dpace(0.05), 3),
}


def problem(num_blocks, K, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_blocks, K, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, toys.VOCAB, (num_blocks, K), generator=generator)
    return hidden, toys.frozen().head, labels


@pytest.mark.parametrize("piece", [(1, 1), (9, 5), (21, 31), (1 << 20, 1 << 20)], ids=str)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_value_and_gradient_are_those_of_whole_logits(weighting, piece, monkeypatch):
    monkeypatch.setitem(loss_module._PIECES, "cpu", Piece(*piece))
    slot_weights, weigh, K = WEIGHTINGS[weighting]
    hidden, head, labels = problem(5, K)
    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, parts = block_loss(a, head, labels, slot_weights, normalizer=5)
    expected = full_logit_loss(b, head, labels, weigh, 5)
    (3 * found).backward()
    (3 * expected).backward()
    assert abs(float(found.detach()) - float(expected.detach())) < 1e-9
    assert (a.grad - b.grad).abs().max() < 1e-9
    logits = hidden @ head.T
    cross_entropy = -torch.log_softmax(logits, -1).gather(-1, labels[..., None]).squeeze(-1)
    assert torch.allclose(parts[0], cross_entropy, atol=1e-9)
    assert torch.equal(parts[1], (logits.argmax(-1) == labels).double())
    assert head.grad is None


@pytest.mark.parametrize("piece", [(9, 5), (1 << 20, 1 << 20)], ids=str)
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 3.0), (2.0, 5.0)])
def test_scaled_and_capped_logits_have_the_plain_loss_and_gradient(scale, cap, piece, monkeypatch):
    monkeypatch.setitem(loss_module._PIECES, "cpu", Piece(*piece))
    hidden, head, labels = problem(5, 3)
    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found, parts = block_loss(a, head, labels, dpace_weights(0.5), normalizer=5, logit_scale=scale, logit_soft_cap=cap)
    expected = full_logit_loss(b, head, labels, dpace(0.5), 5, logit_scale=scale, soft_cap=cap)
    found.backward()
    expected.backward()
    assert abs(float(found.detach()) - float(expected.detach())) < 1e-9
    assert (a.grad - b.grad).abs().max() < 1e-9 < b.grad.abs().max()
    assert torch.equal(parts[1], ((hidden @ head.T).argmax(-1) == labels).double()), "neither moves the argmax"


def test_of_equal_logits_the_first_is_the_argmax_in_whatever_piece(monkeypatch):
    hidden = torch.ones(4, 1, 2, dtype=torch.float64)
    head = torch.tensor([[0, 0], [1, 1], [0, 0], [1, 1], [2, 0], [0, 0]], dtype=torch.float64)
    labels = torch.tensor([[0], [1], [3], [4]])
    for size in (1, 2, 3, 6):
        monkeypatch.setitem(loss_module._PIECES, "cpu", Piece(100, size))
        assert block_loss(hidden, head, labels, torch.ones_like, normalizer=1)[1][1].tolist() == [[0], [1], [0], [0]]


def test_blocks_count_by_their_weight():
    hidden, head, labels = problem(3, 4)
    weights = torch.tensor([1.0, 16.0, 0.5])
    for dtype in (torch.float64, torch.float32):
        _, parts = block_loss(hidden.to(dtype), head.to(dtype), labels, decay_weights(5), normalizer=7)
        found, _ = block_loss(
            hidden.to(dtype), head.to(dtype), labels, decay_weights(5), normalizer=7, block_weights=weights
        )
        slots = decay_weights(5)(parts[0])
        assert float(found) == pytest.approx(float((slots * parts[0] * weights[:, None]).sum() / 7), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_block_has_no_loss_and_no_gradient(dtype):
    hidden = torch.empty(0, 3, 16, dtype=dtype, requires_grad=True)
    labels = torch.empty(0, 3, dtype=torch.int64)
    loss, parts = block_loss(hidden, toys.frozen().head.to(dtype), labels, dpace_weights(0.5), normalizer=1)
    loss.backward()
    assert float(loss.detach()) == 0 and parts.shape == (2, 0, 3) and hidden.grad.shape == (0, 3, 16)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("size", [64, 1000])
def test_bfloat16_is_within_its_rounding_of_float32(size, is_fast, monkeypatch):
    monkeypatch.setattr("drafter.precision.has_fast_bfloat16", lambda: is_fast)
    monkeypatch.setitem(loss_module._PIECES, "cpu", Piece(100, size))
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(1000, 64, generator=generator).bfloat16()
    hidden = (0.7 * torch.randn(40, 5, 64, generator=generator)).bfloat16()
    labels = torch.randint(0, 1000, (40, 5), generator=generator)
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = hidden.to(dtype).clone().requires_grad_()
        loss, parts = block_loss(x, head.to(dtype), labels, torch.ones_like, normalizer=200)
        loss.backward()
        results[dtype] = float(loss.detach()), x.grad.float(), parts[0]
    (low, low_gradient, low_parts), (high, high_gradient, high_parts) = results.values()
    assert abs(low - high) < 2e-3 * high
    assert (low_gradient - high_gradient).norm() < 2e-2 * high_gradient.norm()
    difference = (low_parts - high_parts).abs().max()
    assert difference < (3 * 2**-9 * 30 if is_fast else 1e-4), "logits are rounded where tiles do it, and reach 30"


def test_decay_weights_are_the_published_ones():
    # gamma 7, 5 and 4 for blocks of 16, 10 and 8 (DFlash): weight of the second slot, and of the last
    for block_size, gamma in ((16, 7), (10, 5), (8, 4)):
        weights = decay_weights(block_size)(torch.zeros(2, block_size - 1, dtype=torch.float64))
        assert weights.shape == (2, block_size - 1)
        assert weights[0, 0] == 1
        assert float(weights[1, 1]) == pytest.approx(math.exp(-1 / gamma), abs=1e-12)
        assert float(weights[1, -1]) == pytest.approx(math.exp(-(block_size - 2) / gamma), abs=1e-12)


def test_dpace_weights_counted_by_hand():
    # confidences 0.8, 0.5, 0.2; alpha 0.5: smoothed 0.9, 0.75, 0.6; reached 0.9, 0.675, 0.405
    cross_entropy = -torch.tensor([[0.8, 0.5, 0.2], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    weights = dpace_weights(0.5)(cross_entropy)
    assert weights[0].tolist() == pytest.approx([1.98, 1.08, 0.405], abs=1e-12)
    assert weights[1].tolist() == pytest.approx([3, 2, 1], abs=1e-12)


def test_dpace_without_smoothing_is_the_gradient_of_the_expected_accepted_length():
    log_q = torch.tensor([[-0.3, -1.2, -0.1, -0.7]], dtype=torch.float64, requires_grad=True)
    log_q.cumsum(-1).exp().sum().backward()
    assert torch.allclose(dpace_weights(0.0)(-log_q.detach()), log_q.grad, atol=1e-12)


def test_the_loss_does_not_depend_on_how_blocks_are_grouped():
    # A row with 2 blocks and one with 200, whether together, apart, or dealt to two ranks: each block weighs the same.
    hidden, head, labels = problem(202, 3)
    labels[:], weights = 7, dpace_weights(0.5)
    groupings = {
        "together": [slice(0, 202)],
        "by row": [slice(0, 2), slice(2, 202)],
        "two ranks": [slice(0, 202, 2), slice(1, 202, 2)],
    }
    results = {}
    for name, groups in groupings.items():
        x = hidden.clone().requires_grad_()
        losses = [block_loss(x[g], head, labels[g], weights, normalizer=202)[0] for g in groups]
        sum(losses).backward()
        results[name] = (float(sum(losses).detach()), x.grad)
    for value, gradient in results.values():
        assert value == pytest.approx(results["together"][0], abs=1e-12)
        assert torch.allclose(gradient, results["together"][1], atol=1e-12)


def test_rows_of_one_loss_report_that_loss_in_every_grouping():
    # Weight 1 and cross-entropy log(32) everywhere (a head of zeros): the loss a block is 3 log 32.
    hidden, head, labels = problem(202, 3)
    for groups in ([slice(0, 202)], [slice(0, 2), slice(2, 202)]):
        total = sum(
            float(block_loss(hidden[g], head * 0, labels[g], torch.ones_like, normalizer=202)[0]) for g in groups
        )
        assert total == pytest.approx(3 * math.log(32), abs=1e-9)
