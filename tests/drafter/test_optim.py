import math
import weakref

import pytest
import torch
import toys

from drafter import processes
from drafter.muon import Muon
from drafter.optim import Optimizer, learning_rate_scale
from drafter.orthogonal import orthogonalize


def test_muon_steps_along_the_polar_factor_of_nesterovs_momentum():
    # Counted by hand: momentum m = 0.95 m + 0.05 g, update 0.05 g + 0.95 m, of size 0.2 sqrt(max side) an element.
    generator = torch.Generator().manual_seed(1)
    start = [
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((6, 15), (15, 6), (6, 15), (7, 7))
    ]
    ours = [p.clone().requires_grad_() for p in start]
    muon, expected = Muon(ours, learning_rate=0.1), [p.clone() for p in start]
    momenta = [torch.zeros_like(p) for p in start]
    for _ in range(4):
        for i, p in enumerate(ours):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            momenta[i] = 0.95 * momenta[i] + 0.05 * p.grad
            u, _, vh = torch.linalg.svd(0.05 * p.grad + 0.95 * momenta[i], full_matrices=False)
            expected[i] -= 0.1 * 0.2 * max(p.shape) ** 0.5 * u @ vh
        muon.step()
    for a, b, first in zip(ours, expected, start, strict=True):
        assert (a - b).norm() < 0.02 * (b - first).norm()


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
        named = [("a", parameters[0]), ("b", parameters[1])]
        return parameters, Optimizer(named, kind="muon", learning_rate=0.01, muon_turns=2)

    def step(parameters, optimizer, i):
        for p in parameters:
            p.grad = torch.sin(torch.arange(p.numel()) + i).view(p.shape).float()
        optimizer.step(1 / (i + 1), i)

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


def test_no_process_but_the_first_keeps_a_whole_tensor_while_the_next_is_gathered(monkeypatch):
    model, asked = toys.drafter(dtype=torch.float32), []
    optimizer = Optimizer(model.named_parameters(), kind="muon", learning_rate=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1.0, 0)

    def whole(tensor):
        assert not any(earlier() is not None for earlier in asked)
        found = tensor.clone()
        asked.append(weakref.ref(found))
        return found

    monkeypatch.setattr(processes, "whole", whole)
    monkeypatch.setattr(processes, "rank_and_world", lambda: (1, 2))
    assert not processes.whole_state(model) and not any(optimizer.state_dict().values())
    names, matrices = len(list(model.parameters())), sum(p.dim() == 2 for p in model.parameters())
    assert len(asked) == names + matrices + 3 * (names - matrices), "Muon keeps one state, AdamW three"


def test_matrices_go_to_muon_and_gains_to_adamw():
    named = [("a", torch.ones(2, 2, requires_grad=True)), ("b", torch.ones(2, requires_grad=True))]
    parts = Optimizer(named, kind="muon", learning_rate=1.0).parts
    assert [type(part).__name__ for part in parts] == ["AdamW", "Muon"]
    assert parts[1].param_groups[0]["params"][0] is named[0][1]
    assert len(Optimizer(named, kind="adamw", learning_rate=1.0).parts) == 1


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_matrices_decay_by_the_learning_rate_and_gains_keep_their_size(kind):
    matrix, gain = torch.ones(3, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = Optimizer([("a", matrix), ("b", gain)], kind=kind, learning_rate=0.5, weight_decay=0.1)
    matrix.grad, gain.grad = torch.zeros(3, 3), torch.zeros(3)
    optimizer.step(0.4, 0)
    torch.testing.assert_close(matrix.detach(), torch.full((3, 3), 0.98))  # 1 - 0.4 * 0.5 * 0.1
    assert torch.equal(gain.detach(), torch.ones(3))


def test_muons_matrices_take_turns_of_about_equal_work_and_step_as_far():
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((8, 8), (2, 4), (8, 8), (4, 2))]
    ours = [p.clone().requires_grad_() for p in start]
    named = [(str(i), p) for i, p in enumerate(ours)]
    optimizer = Optimizer(named, kind="muon", learning_rate=0.1, weight_decay=0.5, muon_turns=2)
    seen = [torch.zeros_like(p) for p in start]
    moved = []
    for step in range(4):
        before = [p.detach().clone() for p in ours]
        for p, sum_of_momentum in zip(ours, seen, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            sum_of_momentum.mul_(0.95).add_(p.grad, alpha=0.05)
        nesterov = [0.05 * p.grad + 0.95 * momentum for p, momentum in zip(ours, seen, strict=True)]
        optimizer.step(0.5, step)
        moved.append([not torch.equal(a, b) for a, b in zip(ours, before, strict=True)])
        for place in [i for i, has_moved in enumerate(moved[-1]) if has_moved]:
            # As Muon alone would at twice the learning rate; momentum has seen every gradient, also between turns.
            size = 2 * 0.05 * 0.2 * max(start[place].shape) ** 0.5
            expected = before[place] * (1 - 2 * 0.05 * 0.5) - size * orthogonalize(nesterov[place])
            torch.testing.assert_close(ours[place].detach(), expected, rtol=0, atol=1e-12)
    assert sum(moved[0][i] for i in (0, 2)) == 1, "one of the two large ones in each turn"
    assert moved[1] == [not one for one in moved[0]] and moved[2:] == moved[:2]
