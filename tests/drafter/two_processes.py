"""What each process of the two-process tests runs; spawned, so it lives in a module of its own."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def train_rank(rank: int, world: int, root: str, names: list[str]) -> None:
    """Train each named case with the others, and save what this process ends with."""
    sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=world)
    (Path(root) / f"ready-{rank}").touch()
    for name in names:
        torch.save(train_case(name, Path(root) / f"{name}-{world}"), Path(root) / f"{name}-{world}-{rank}.pt")
    dist.destroy_process_group()
    (Path(root) / f"done-{rank}").touch()
    os._exit(0)  # what follows is torch's own tear-down, a minute on a busy machine


def train_case(name: str, folder: Path) -> dict:
    """Weights and curve after a few steps on toy rows."""
    import toys

    from drafter.feed import CachedFeed
    from drafter.loop import train_loop

    rows = [toys.counting_row(3 * i, 16 + i, 3) for i in range(5)]
    settings = {"steps": 5, "checkpoint_every": 1}
    if name == "short row":  # its 3 tokens have no room for a block of 4: one process has nothing to do in some steps
        rows.append(toys.row(3, 1, seed=8))
    if name == "a row a step":  # the second process never has anything to do
        settings["blocks_per_step"] = 4
    config = toys.config(folder, **settings).train
    model = toys.drafter(toys.shape(num_hidden_layers=1))
    feed = CachedFeed(rows, config, block_size=model.shape.block_size)
    progress = train_loop(model, toys.frozen(), feed, [toys.counting_row(1, 14, 4)], config, folder)
    return {"weights": model.state_dict(), "curve": progress.curve, "step": progress.step}
