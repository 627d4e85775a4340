"""Processes that train together: who is who, and sums and meetings that every one of them takes part in."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_world() -> tuple[int, int]:
    """This process's place among those that train together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def meet() -> None:
    """Wait until all processes are here."""
    if dist.is_initialized():
        dist.barrier()


def sum_gradients(parameters: Iterable[Tensor], measured: Tensor) -> Tensor:  # [M] -> [M]
    """Make every process's gradients those of the whole step; returns what was measured, summed over processes."""
    if rank_and_world()[1] == 1:
        return measured
    # A process without a block adds zeros. One collective a step: its cost is the waiting, not the bytes.
    parameters = list(parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(g.flatten() for g in gradients), measured.to(parameters[0])])
    dist.all_reduce(flat)
    *summed, totals = flat.split([*(p.numel() for p in parameters), len(measured)])
    for parameter, gradient in zip(parameters, summed, strict=True):
        parameter.grad = gradient.view_as(parameter)
    return totals
