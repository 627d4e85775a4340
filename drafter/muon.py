"""Muon, with its matrix products shared out among the processes that train together.

With several turns each step updates some of the matrices alone, the next step others, by as many times the learning
rate: momentum hardly changes from one step to the next, and the products are what a step of few blocks takes longest
for.

Under ddp each process orthogonalises some of the matrices and all exchange them. Under fsdp each holds some rows of
every matrix: they are sent to the process whose matrix it is, and what becomes of them is sent back.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from drafter.orthogonal import orthogonalized
from drafter.processes import local, rank_and_world


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised in the dtype ``compute``, with steps of AdamW's root-mean-square size.

    Source: Muon (Keller Jordan, 2024); Muon is scalable, arXiv 2502.16982 (the 0.2 * sqrt(max(m, n)) scale, so that
    learning rates of AdamW carry over, and decoupled weight decay).
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        learning_rate: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        turns: int = 1,
        compute: torch.dtype = torch.float32,
    ):
        """``turns``: a matrix is updated at every so many steps; the group's "turn" says whose turn it is."""
        defaults = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay, "turn": 0}
        super().__init__(parameters, defaults)
        self._turns, self._compute = turns, compute

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the matrices whose turn it is, of those with a gradient; all their gradients are used up."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [local(self.state[p]["momentum"]) for p in parameters]
            torch._foreach_lerp_(momenta, [local(p.grad) for p in parameters], 1 - group["momentum"])
            turn = _shared([p.shape for p in parameters], self._turns)[group["turn"] % self._turns]
            self._update([parameters[place] for place in sorted(turn)], group, group["lr"] * self._turns)

    def _update(self, parameters: Sequence[Tensor], group: Mapping[str, Any], learning_rate: float) -> None:
        if not parameters:
            return
        updates, momenta = [local(p.grad) for p in parameters], [local(self.state[p]["momentum"]) for p in parameters]
        torch._foreach_lerp_(updates, momenta, group["momentum"])
        torch._foreach_mul_([local(p) for p in parameters], 1 - learning_rate * group["weight_decay"])
        for places, found in _shared_out(parameters, updates, self._compute):
            for place, update in zip(places, found, strict=True):
                scale = 0.2 * max(parameters[place].shape) ** 0.5
                local(parameters[place]).add_(update, alpha=-learning_rate * scale)


Found = Iterator[tuple[Sequence[int], Sequence[Tensor]]]


def _shared_out(parameters: Sequence[Tensor], updates: Sequence[Tensor], compute: torch.dtype) -> Found:
    """The orthogonalised updates: places in the sequence, and this process's part of each."""
    # Doubles are for exactness, on toys: they are never rounded.
    dtypes = [torch.float64 if update.dtype == torch.float64 else compute for update in updates]
    updates = [update.to(dtype) for update, dtype in zip(updates, dtypes, strict=True)]
    if rank_and_world()[1] == 1:
        return orthogonalized(updates)
    owned = _shared([p.shape for p in parameters], rank_and_world()[1])
    if isinstance(parameters[0], DTensor):
        return _sent_to_owners(parameters, updates, owned)
    return _exchanged(updates, owned)


def _shared(shapes: Sequence[torch.Size], count: int) -> list[list[int]]:
    """The places of the matrices, dealt out into so many shares of about equal work; equal in every process."""
    work = [min(shape) ** 2 * max(shape) for shape in shapes]
    shares: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(shapes)), key=lambda place: -work[place]):
        min(shares, key=lambda places: sum(work[p] for p in places)).append(place)
    return shares


def _exchanged(updates: Sequence[Tensor], owned: Sequence[Sequence[int]]) -> Found:
    """Every process has every update: it orthogonalises its own, and gets the others'."""
    rank, world = rank_and_world()
    sizes = [sum(updates[place].numel() for place in places) for places in owned]
    gathered = updates[0].new_zeros(world, max(sizes))
    own = _split(gathered[rank], owned[rank], updates)
    for places, found in orthogonalized([updates[place] for place in owned[rank]]):
        for place, update in zip(places, found, strict=True):
            own[place].copy_(update)
    dist.all_gather(list(gathered), gathered[rank].clone())
    for theirs, places in zip(gathered, owned, strict=True):
        yield places, _split(theirs, places, updates)


def _split(flat: Tensor, places: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """The matrices that lie one after another in a vector, which may be longer."""
    sizes = [like[place].numel() for place in places]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view_as(like[place]) for piece, place in zip(pieces, places, strict=True)]


def _sent_to_owners(parameters: Sequence[Tensor], updates: Sequence[Tensor], owned: Sequence[Sequence[int]]) -> Found:
    """Every process has some rows of every update; each owner is sent the rest of its own, and sends back."""
    rank, world = rank_and_world()
    shapes = [p.shape for p in parameters]
    mine = owned[rank]
    # Rows of my matrices that each process holds, and how many numbers they are.
    rows = [[_rows_of(source, shapes[place][0], world) for place in mine] for source in range(world)]
    held = [sum(n * shapes[place][1] for n, place in zip(some, mine, strict=True)) for some in rows]
    sent = [sum(updates[place].numel() for place in places) for places in owned]
    flat = torch.cat([updates[place].flatten() for places in owned for place in places])
    arrived = flat.new_empty(sum(held))
    dist.all_to_all_single(arrived, flat, held, sent)
    parts = [
        piece.split([n * shapes[place][1] for n, place in zip(some, mine, strict=True)])
        for piece, some in zip(arrived.split(held), rows, strict=True)
    ]  # [process][own matrix], each the rows of one matrix
    matrices = [torch.cat([part[i] for part in parts]).view(shapes[place]) for i, place in enumerate(mine)]
    for places, found in orthogonalized(matrices):
        for i, update in zip(places, found, strict=True):
            for part, piece in zip(parts, update.flatten().split([part[i].numel() for part in parts]), strict=True):
                part[i].copy_(piece)
    dist.all_to_all_single(flat, arrived, sent, held)
    for places, piece in zip(owned, flat.split(sent), strict=True):
        yield places, _split(piece, places, updates)


def _rows_of(rank: int, num_rows: int, world: int) -> int:
    """How many rows of a matrix a process holds under FSDP2: those of torch.chunk."""
    chunk = ceil(num_rows / world)
    return max(0, min(chunk, num_rows - rank * chunk))
