"""Muon for the matrices, AdamW for everything else, and the learning rate as a function of the step alone."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from drafter.muon import Muon
from drafter.processes import kept_whole, placed_as


def learning_rate_scale(step: int, num_steps: int, warmup_share: float) -> float:
    """Linear warm-up, then a cosine to zero; a function of the step, so that a resumed run cannot be off."""
    warmup = max(1, round(num_steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """The optimisers of one drafter under one schedule."""

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        *,
        kind: str,
        learning_rate: float,
        weight_decay: float = 0.0,
        muon_turns: int = 1,
        compute: torch.dtype = torch.float32,
    ):
        """``compute`` is what Muon multiplies matrices in (drafter/precision.py); every state has its parameter's.

        ``weight_decay`` is decoupled, and that of matrices: gains and biases keep their size.
        """
        named = list(named)
        is_matrix = {name: kind == "muon" and parameter.dim() == 2 for name, parameter in named}
        others = [parameter for name, parameter in named if not is_matrix[name]]
        groups = [
            {"params": [p for p in others if p.dim() == 2], "weight_decay": weight_decay},
            {"params": [p for p in others if p.dim() != 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
        self.parts: list[torch.optim.Optimizer] = [adamw]
        if any(is_matrix.values()):
            matrices = [parameter for name, parameter in named if is_matrix[name]]
            settings = {"learning_rate": learning_rate, "weight_decay": weight_decay}
            self.parts.append(Muon(matrices, **settings, turns=muon_turns, compute=compute))
        self.learning_rate = learning_rate
        self._owners = {name: (self.parts[is_matrix[name]], parameter) for name, parameter in named}

    def step(self, scale: float, step: int) -> None:
        """One update at ``scale`` times the learning rate; uses the gradients up. Every process takes part.

        ``step``: the run's; Muon's turns go by it.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate * scale
                group["turn"] = step
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and state, as ``kept_whole``. Every process must ask."""
        return {name: kept_whole(part.state[parameter].items()) for name, (part, parameter) in self._owners.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue where this whole state, which every process has, was saved.

        Raises: ValueError when it is not one of such an optimiser of these parameters; nothing is changed then.
        """
        if state.keys() != self._owners.keys():
            raise ValueError(f"states of {sorted(state.keys() ^ self._owners.keys())} are on one side alone")
        found = {}
        for name, (part, parameter) in self._owners.items():
            if state[name] and state[name].keys() != _STATES[type(part)]:
                raise ValueError(
                    f"{name}: {sorted(state[name])}, {type(part).__name__} has {sorted(_STATES[type(part)])}"
                )
            found[name] = {key: _as_state_of(parameter, name, value) for key, value in state[name].items()}
        for name, (part, parameter) in self._owners.items():
            part.state[parameter] = found[name]


_STATES = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, Muon: {"momentum"}}


def _as_state_of(parameter: Tensor, name: str, value: Tensor) -> Tensor:
    if value.dim() == 0:  # AdamW's count of steps
        return value.to(parameter.device)
    if value.shape != parameter.shape:
        raise ValueError(f"{name}: a state of shape {list(value.shape)}, the parameter has {list(parameter.shape)}")
    return placed_as(value, parameter).clone()
