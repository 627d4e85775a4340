"""What a training step costs by counting: multiplications of the model, and bytes that it holds at its peak.

Legend: T context positions, A blocks, B block size, K = B - 1, H width, F = layers x H_target, I MLP width, N heads,
G key-value heads, E head width, V vocabulary, P parameters of the drafter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from drafter.shape import DrafterShape


@dataclass(frozen=True)
class Work:
    """What a step is over."""

    num_positions: int  # T
    num_blocks: int  # A
    num_seen: int  # context positions that a block sees, summed over blocks


def step_flops(shape: DrafterShape, work: Work) -> float:
    """Floating-point operations that the model asks for: forward and backward, two a multiplication and addition.

    Backward is twice the forward: by the weights, and by what went in. ``fc`` has only the first, since states are not
    trained; the frozen head only the second. What is computed again, masked areas and the optimiser don't count, so a
    utilisation from this can only be too low.
    """
    H, B, E = shape.hidden_size, shape.block_size, shape.head_dim
    N, G, slots = shape.num_attention_heads, shape.num_key_value_heads, work.num_blocks * B
    fc = 2.0 * work.num_positions * shape.context_size * H
    context = 2.0 * work.num_positions * H * 2 * G * E
    projections = 2.0 * slots * H * (2 * N * E + 2 * G * E)
    attention = 2.0 * 2 * N * E * B * (work.num_seen + work.num_blocks * B)
    mlp = 2.0 * 3 * slots * H * shape.intermediate_size
    head = 2.0 * work.num_blocks * shape.num_draft_tokens * H * shape.vocab_size
    layers = shape.num_hidden_layers * (context + projections + attention + mlp)
    return 2 * fc + 3 * layers + 2 * head


@dataclass(frozen=True)
class Saved:
    """Bytes that a forward pass saves for its backward pass: so many whatever it is over, and for each of its parts."""

    fixed: float
    a_position: float
    a_block: float

    def of(self, work: Work) -> float:
        """For a pass over this."""
        return self.fixed + self.a_position * work.num_positions + self.a_block * work.num_blocks


def saved_bytes(forward: Callable[[], Tensor], held: Iterable[Tensor]) -> int:
    """Bytes that ``forward`` saves for backward, without those of tensors that are there anyhow."""
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = tensor  # kept: its address is not given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def fitted(measure: Callable[[int, int], tuple[Work, int]], sizes: tuple[int, int]) -> Saved:
    """What is saved, from small passes: ``measure(factor of positions, factor of blocks)``, once each doubled."""
    small, large = sizes
    base, base_bytes = measure(small, small)
    longer, longer_bytes = measure(large, small)
    wider, wider_bytes = measure(small, large)
    a_position = (longer_bytes - base_bytes) / (longer.num_positions - base.num_positions)
    a_block = (wider_bytes - base_bytes) / (wider.num_blocks - base.num_blocks)
    fixed = base_bytes - a_position * base.num_positions - a_block * base.num_blocks
    return Saved(fixed, a_position, a_block)


def peak_bytes(
    parameters: Sequence[Tensor], frozen: Iterable[Tensor], saved: float, *, compute_bytes: int, loss_bytes: float
) -> dict[str, float]:
    """Parts of a step's peak, and their sum ("peak"): the larger of two moments.

    When backward begins: masters, optimiser, frozen tensors, everything that is saved, and the loss's pieces. When the
    optimiser steps: the same but what was saved, and beside it gradients and, of Muon, every matrix in the dtype that
    it is multiplied in and the largest group of equal shapes three times over.
    """
    numbers = sum(p.numel() for p in parameters)
    groups: dict[tuple[int, ...], int] = {}
    for p in parameters:
        if p.dim() == 2:
            shape = tuple(sorted(p.shape))
            groups[shape] = groups.get(shape, 0) + prod(p.shape)
    state = sum(p.numel() * (4 if p.dim() == 2 else 8) for p in parameters)
    own = {id(tensor): tensor.nbytes for tensor in frozen}
    base = 4.0 * numbers + state + sum(own.values())
    muon = compute_bytes * (sum(groups.values()) + 3 * max(groups.values(), default=0))
    parts = {"held": base, "saved": saved, "loss": loss_bytes, "gradients": 4.0 * numbers, "muon": muon}
    parts["peak"] = base + max(saved + loss_bytes, parts["gradients"] + muon)
    return parts
