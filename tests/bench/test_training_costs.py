"""Counted costs of a training step: its multiplications as PyTorch counts them, its bytes by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import gpu_train
from bench.oracles.training_costs import fitted, peak_bytes, saved_bytes, step_flops
from drafter.frozen import FrozenTarget
from drafter.loss import block_loss, dpace_weights
from drafter.model import Drafter
from drafter.packing import pack
from drafter.step import hidden_of


@pytest.mark.parametrize("shape_of", [gpu_train.qwen3_8b, gpu_train.qwen35_27b])
def test_operations_are_those_that_a_step_without_masked_areas_multiplies(shape_of):
    shape = gpu_train.tiny(shape_of())
    # One block a row: its slots see all of the context that is multiplied.
    deals = gpu_train.deals_of(shape, gpu_train.Load(rows=3, prompt=20, reply=40, anchors=1))
    drafter, head = Drafter(shape), torch.randn(shape.vocab_size, shape.hidden_size)
    frozen = FrozenTarget(head, head, torch.ones(shape.hidden_size))
    packed = pack(deals, shape.block_size, torch.float32)
    with FlopCounterMode(display=False) as counted:
        loss, _ = block_loss(hidden_of(drafter, frozen, packed), head, packed.labels, dpace_weights(0.5), normalizer=3)
        loss.backward()
    assert step_flops(shape, gpu_train.work_of(deals)) == pytest.approx(counted.get_total_flops(), rel=1e-3)


def test_saved_bytes_are_those_that_backward_needs_and_nobody_else_holds():
    weight, x = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4)
    forward = lambda: (x @ weight.T).exp()  # noqa: E731 - saves x, and its own result
    assert saved_bytes(forward, [weight]) == 4 * (16 * 4 + 16 * 8)
    assert saved_bytes(forward, [weight, x]) == 4 * 16 * 8


def test_three_small_passes_tell_what_a_large_one_saves():
    def measure(positions, blocks):
        work = gpu_train.Work(10 * positions, 4 * blocks, 0)
        return work, 1000 + 7 * work.num_positions + 30 * work.num_blocks

    assert fitted(measure, (1, 3)).of(gpu_train.Work(500, 60, 0)) == pytest.approx(1000 + 3500 + 1800)


def test_the_peak_is_the_larger_of_what_backward_begins_with_and_what_the_optimiser_works_with():
    matrix, gain, head = torch.zeros(4, 8), torch.zeros(8), torch.zeros(5, 4)
    held = 4 * 40 + (4 * 32 + 8 * 8) + 4 * 20  # masters, momentum and two moments of the gain, head once
    much = peak_bytes([matrix, gain], [head, head], 10_000.0, compute_bytes=2, loss_bytes=100.0)
    assert much["peak"] == held + 10_100
    little = peak_bytes([matrix, gain], [head, head], 0.0, compute_bytes=2, loss_bytes=0.0)
    assert little["peak"] == held + 4 * 40 + 2 * (32 + 3 * 32)


def test_the_gpu_bench_runs_its_code_without_a_gpu_and_claims_nothing(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures = gpu_train.main(["--small"])
    assert {name.rsplit(".", 1)[1] for name in figures} == {"utilisation", "memory_error"}
    assert all(one["value"] is None and one["reason"] == "no GPU" and one["step_s"] > 0 for one in figures.values())
    assert capsys.readouterr().out.splitlines()[-1].startswith('{"bench": "gpu_train"')
