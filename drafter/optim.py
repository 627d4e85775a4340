"""Muon for the matrices, AdamW for everything else, and the learning rate as a function of the step alone."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# Quintic Newton-Schulz coefficients that send singular values in (0, 1] to about 1.
# Source: Muon (Keller Jordan, 2024), as in torch.optim.Muon.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def learning_rate_scale(step: int, num_steps: int, warmup_share: float) -> float:
    """Linear warm-up, then a cosine to zero; a function of the step, so that a resumed run cannot be off."""
    warmup = max(1, round(num_steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def orthogonalize(matrices: Tensor, num_iterations: int = 5) -> Tensor:  # [S, m, n] -> [S, m, n]
    """The nearest semi-orthogonal matrices, roughly: every singular value near 1.

    Computed in the given dtype: torch.optim.Muon always takes bfloat16, which CPUs without bfloat16
    arithmetic run a hundred times slower than float32. Equal shapes are one batched product.
    """
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, with steps of AdamW's root-mean-square size.

    Source: Muon is scalable, arXiv 2502.16982 (the 0.2 * sqrt(max(m, n)) scale, so that learning rates of
    AdamW carry over).
    """

    def __init__(self, parameters: Iterable[Tensor], *, learning_rate: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": learning_rate, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                by_shape[parameter.shape].append((parameter, parameter.grad.lerp(buffer, group["momentum"])))
            for shape, pairs in by_shape.items():
                updates = orthogonalize(torch.stack([update for _, update in pairs]))
                scale = 0.2 * max(shape) ** 0.5
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)


class Optimizer:
    """The optimisers of one drafter under one schedule."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], *, kind: str, learning_rate: float):
        matrices, others = [], []
        for _, parameter in named:
            (matrices if parameter.dim() == 2 and kind == "muon" else others).append(parameter)
        self.learning_rate = learning_rate
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if matrices:
            self.parts.append(Muon(matrices, learning_rate=learning_rate))

    def step(self, scale: float) -> None:
        """One update at ``scale`` times the learning rate; clears the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """Everything that a resumed run needs."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict]) -> None:
        """Continue where this state was saved."""
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)
