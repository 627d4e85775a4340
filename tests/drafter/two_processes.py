"""What each process of the two-process tests runs; spawned, so it lives in a module of its own."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True)
class Case:
    """A run of a few steps on toy rows."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: str = "plain"
    """plain: enough for both; uneven: of very different lengths, and some without room for a block."""
    killed_after: int | None = None
    """Steps after which every process ends without a word."""
    goes_on_from: str | None = None
    """The folder of an earlier run, by the name of its case and its number of processes."""
    dtype: str = "float64"


class Killed(BaseException):
    """Stands for a signal: nothing catches it but the case's end."""


def run_together(root: Path, cases: list[Case], *, timeout_s: float = 60) -> None:
    """Run every case in two processes; each saves what it ends with. Fails when they hang in one of them."""
    context = mp.start_processes(train_rank, (2, str(root), cases), nprocs=2, join=False, start_method="spawn")
    # Their imports may be slow on a busy machine, their training may not.
    for event, limit in (("ready", 300.0), *((case.name, timeout_s) for case in cases)):
        deadline = time.monotonic() + limit
        while not all((root / f"{event} - {rank}").exists() for rank in (0, 1)):
            context.join(timeout=0.05)  # raises what a process raised
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"the two processes are not through with {event!r} within {limit} s")


def result(root: Path, case: Case, rank: int) -> dict[str, Any]:
    """What a process of a case ended with."""
    return torch.load(root / f"{case.name}-2-{rank}.pt", weights_only=True)


def train_rank(rank: int, world: int, root: str, cases: list[Case]) -> None:
    """Train each case with the others, and save what this process ends with."""
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=world)
    import toys  # noqa: F401 - imports take long, so all before anyone counts the time

    import drafter.loop  # noqa: F401

    (Path(root) / f"ready - {rank}").touch()
    for case in cases:
        torch.save(train_case(case, Path(root)), Path(root) / f"{case.name}-{world}-{rank}.pt")
        dist.barrier()
        (Path(root) / f"{case.name} - {rank}").touch()
    dist.destroy_process_group()
    os._exit(0)  # what follows is torch's own tear-down, a minute on a busy machine


def train_case(case: Case, root: Path) -> dict[str, Any]:
    """Weights, curve and counts at the end, in this process."""
    import toys

    from drafter.feed import CachedFeed
    from drafter.loop import train_loop
    from drafter.measurement import Validation
    from drafter.processes import rank_and_world, whole

    world = rank_and_world()[1]
    folder = root / (case.goes_on_from or f"{case.name}-{world}")
    config = toys.config(folder, **{"steps": 5, "checkpoint_every": 1, **case.settings}).train
    dtype = getattr(torch, case.dtype)
    model, frozen = toys.drafter(toys.shape(num_hidden_layers=2), dtype=dtype), toys.frozen(dtype=dtype)
    feed = CachedFeed(rows_of(case), config, block_size=model.shape.block_size)
    validation, steps = Validation([toys.counting_row(1, 14, 4)]), counted_steps(case.killed_after)
    try:
        progress = train_loop(model, frozen, feed, validation, config, folder)
    except Killed:
        return {"steps_taken": len(steps)}
    return {
        "weights": {name: whole(p.detach()).clone() for name, p in model.named_parameters()},
        "curve": progress.curve,
        "step": progress.step,
        "num_empty": progress.num_empty,
        "steps_taken": len(steps),
        "rows_held": {name: p.to_local().shape[0] if hasattr(p, "to_local") else p.shape[0]
                      for name, p in model.named_parameters()},
    }  # fmt: skip


def rows_of(case: Case) -> list[Any]:
    """A case's rows."""
    import toys

    rows = [toys.counting_row(3 * i, 16 + i, 3) for i in range(5)]
    if case.rows == "uneven":
        rows[1] = toys.counting_row(2, 60, 3)
        rows.append(toys.row(3, 1, seed=8))  # 3 tokens: no room for a block of 4
        rows.append(toys.row(20, 20, seed=9))  # all prompt: every position is masked
    return rows


def counted_steps(killed_after: int | None) -> list[float]:
    """A list that grows with every optimiser step of this process; the run is killed after so many."""
    from drafter import loop, optim

    taken: list[float] = []

    class Counted(optim.Optimizer):
        def step(self, scale: float, step: int) -> None:
            super().step(scale, step)
            taken.append(scale)
            if len(taken) == killed_after:
                raise Killed

    loop.Optimizer = Counted
    return taken
