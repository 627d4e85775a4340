import math

import pytest
import torch

from drafter.optim import Muon, Optimizer, learning_rate_scale, orthogonalize


@pytest.mark.parametrize("size", [(1, 20, 20), (3, 12, 40), (2, 40, 12)])
def test_orthogonalized_matrices_have_singular_values_near_one(size):
    matrices = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 7
    found = orthogonalize(matrices)
    assert found.shape == matrices.shape
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3
    assert values.median() > 0.65
    # the singular vectors stay: the polar factor's direction
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    overlap = ((u @ vh) * found).sum((-1, -2)) / (found.norm(dim=(-1, -2)) * (u @ vh).norm(dim=(-1, -2)))
    assert overlap.min() > 0.95


def test_muon_steps_as_torchs_own_does():
    # torch.optim.Muon orthogonalises in bfloat16: the same up to its rounding.
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(size, generator=generator) for size in ((24, 40), (40, 24), (24, 40))]
    ours = [p.clone().requires_grad_() for p in start]
    torchs = [p.clone().requires_grad_() for p in start]
    mine = Muon(ours, learning_rate=0.1)
    theirs = torch.optim.Muon(torchs, lr=0.1, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for a, b in zip(ours, torchs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        theirs.step()
    for a, b, first in zip(ours, torchs, start, strict=True):
        assert (a - first).norm() > 0.1
        assert (a - b).norm() / (b - first).norm() < 0.03


def test_the_learning_rate_is_a_function_of_the_step():
    # 20 steps, warm-up 5, cosine: counted by hand
    scales = [learning_rate_scale(step, 20, 0.25) for step in range(20)]
    assert scales[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert scales[5] == pytest.approx(1.0)
    assert scales[10] == pytest.approx(0.75)  # a third of the way: (1 + cos 60 degrees) / 2
    assert scales[15] == pytest.approx(0.25)
    assert scales[19] == pytest.approx((1 + math.cos(math.pi * 14 / 15)) / 2)
    assert scales[10:] == [learning_rate_scale(step, 20, 0.25) for step in range(10, 20)]


@pytest.mark.parametrize(("steps", "warmup_share"), [(1, 0.04), (2, 0.0), (10, 0.9)])
def test_short_runs_have_a_learning_rate_too(steps, warmup_share):
    scales = [learning_rate_scale(step, steps, warmup_share) for step in range(steps)]
    assert all(0 < scale <= 1 for scale in scales[:1])
    assert all(0 <= scale <= 1 for scale in scales)


def test_a_loaded_state_goes_on_as_if_never_stopped():
    def make():
        parameters = [torch.ones(4, 6, requires_grad=True), torch.ones(6, requires_grad=True)]
        return parameters, Optimizer([("a", parameters[0]), ("b", parameters[1])], kind="muon", learning_rate=0.01)

    def step(parameters, optimizer, i):
        for p in parameters:
            p.grad = torch.sin(torch.arange(p.numel()) + i).view(p.shape).float()
        optimizer.step(1 / (i + 1))

    straight, optimizer = make()
    for i in range(6):
        step(straight, optimizer, i)
    stopped, first = make()
    for i in range(3):
        step(stopped, first, i)
    resumed, second = make()
    with torch.no_grad():
        for p, q in zip(resumed, stopped, strict=True):
            p.copy_(q)
    second.load_state_dict(first.state_dict())
    for i in range(3, 6):
        step(resumed, second, i)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_matrices_go_to_muon_and_gains_to_adamw():
    named = [("a", torch.ones(2, 2, requires_grad=True)), ("b", torch.ones(2, requires_grad=True))]
    parts = Optimizer(named, kind="muon", learning_rate=1.0).parts
    assert [type(part).__name__ for part in parts] == ["AdamW", "Muon"]
    assert parts[1].param_groups[0]["params"][0] is named[0][1]
    assert len(Optimizer(named, kind="adamw", learning_rate=1.0).parts) == 1
