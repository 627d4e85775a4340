"""Processes that train together: who is who, what each holds of the drafter, and what all of them take part in.

Under ddp every process holds the whole drafter; under fsdp (FSDP2) each holds a slice of the rows of every parameter,
gradient and optimiser state. What is saved is always whole, so that a run may go on with other processes.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from drafter.model import Drafter
from pipeline.config import TrainConfig

# Gradients are summed over processes in buckets: one collective for a small drafter, bounded copies for a large one.
_BUCKET_BYTES = 256 << 20


def rank_and_world() -> tuple[int, int]:
    """This process's place among those that train together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def meet() -> None:
    """Wait until all processes are here."""
    if dist.is_initialized():
        dist.barrier()


def agreed(value: Any) -> Any:
    """The first process's value, for a decision that all must take alike, as when it leads to a collective."""
    if rank_and_world()[1] == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gathered(value: Any) -> list[Any]:
    """Every process's value, by rank. Every process must ask."""
    values: list[Any] = [value] * rank_and_world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def prepare(drafter: Drafter, config: TrainConfig) -> Drafter:
    """The drafter, made ready in place to be trained as configured; its parameters' names stay what they are.

    Under fsdp its parameters are sharded masters in their own precision, and gathered in it too: a gather in bfloat16
    would be half the bytes, but round the norms' gains as well, and the results would depend on ``parallel``.
    """
    for layer in drafter.layers:
        if config.compile:  # what is compiled is what is computed again
            layer.forward = torch.compile(layer.forward, dynamic=True)  # every pass has its own number of tokens
        if config.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if config.parallel == "fsdp" and rank_and_world()[1] > 1:
        device = next(drafter.parameters()).device.type
        mesh = dist.init_device_mesh(device, (rank_and_world()[1],))
        for part in (*drafter.layers, drafter):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            # Each process's loss is divided by the whole step's weight already: gradients add up.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other for float32
    return drafter


def sum_gradients(parameters: Iterable[Tensor], measured: Tensor) -> Tensor:  # [M] -> [M]
    """Make every process's gradients those of the whole step; returns what was measured, summed over processes.

    A process without a block adds zeros. Sharded gradients are summed already, in the backward pass.
    """
    if rank_and_world()[1] == 1:
        return measured
    parameters = list(parameters)
    measured = measured.to(parameters[0].device)
    for some in _buckets([p for p in parameters if not isinstance(p, DTensor)]):
        # One collective for most drafters, what was measured included: its cost is the waiting, not the bytes.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
        rides = measured if some[0] is parameters[0] else measured[:0]
        flat = torch.cat([*(g.flatten() for g in gradients), rides.to(some[0].dtype)])
        dist.all_reduce(flat)
        *summed, totals = flat.split([*(p.numel() for p in some), len(rides)])
        for parameter, gradient in zip(some, summed, strict=True):
            parameter.grad = gradient.view_as(parameter)
        if len(rides):
            measured = totals.to(measured.dtype)
    if isinstance(parameters[0], DTensor):
        dist.all_reduce(measured)
    return measured


def clip(parameters: Iterable[Tensor], max_norm: float) -> Tensor:  # -> []
    """The norm of the whole gradient, which is scaled down to ``max_norm`` where it is above; equal everywhere."""
    with_gradient = [p for p in parameters if p.grad is not None]
    gradients = [local(p.grad) for p in with_gradient]
    norm = torch.nn.utils.get_total_norm(gradients)
    if any(isinstance(p, DTensor) for p in with_gradient):
        squared = norm**2
        dist.all_reduce(squared)
        norm = squared.sqrt()
    if norm > max_norm:  # not a number is not above: the caller looks at it
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. Every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, that every process has, as ``like`` is: on its device, and sharded where it is."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def whole_state(drafter: Drafter) -> dict[str, Tensor]:
    """Every whole parameter by name, as ``kept_whole``."""
    return kept_whole((name, parameter.detach()) for name, parameter in drafter.named_parameters())


def kept_whole(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The whole tensors by name, in the first process's own memory; nothing in the others. Every process must ask.

    One is gathered at a time: a device that holds a slice of each need not have room for all of them.
    """
    kept = {}
    for name, tensor in tensors:
        if rank_and_world()[0] == 0:
            kept[name] = whole(tensor).cpu()
        else:
            whole(tensor)
    return kept


@torch.no_grad()
def load_whole_state(drafter: Drafter, state: Mapping[str, Tensor]) -> None:
    """Give the drafter these whole parameters, which every process has.

    Raises: KeyError or RuntimeError when they are another drafter's.
    """
    parameters = dict(drafter.named_parameters())
    if parameters.keys() != state.keys():
        raise KeyError(f"parameters {sorted(parameters.keys() ^ state.keys())} are on one side alone")
    for name, parameter in parameters.items():
        local(parameter).copy_(local(placed_as(state[name], parameter)))


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    for parameter in parameters:
        if some and sum(p.nbytes for p in some) + parameter.nbytes > _BUCKET_BYTES:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some
