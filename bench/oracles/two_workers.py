"""Two processes on gloo that train together on rows of which some are nothing, against one process.

python -m bench.oracles.two_workers FOLDER CONFIG STATES RANK WORLD    one of them
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drafter import train
from drafter.dataset import CachedRow, read_rows
from drafter.feed import CachedFeed
from drafter.frozen import read_frozen
from drafter.loop import train_loop
from drafter.measurement import Validation
from drafter.processes import whole_state
from drafter.start import new_drafter
from pipeline.artifacts import HiddenStateCache, load
from pipeline.config import Config
from pipeline.stages import Artifact

CHECKOUT = Path(__file__).resolve().parents[2]


def uneven_workers(
    workdir: Path, config: Config, states: Artifact[HiddenStateCache], *, timeout_s: float = 600
) -> dict[str, dict[str, Any]]:
    """For ddp and for fsdp: workers that finished, the steps each counted, and the largest difference of a weight from
    those that one process ends with.

    Every third row has too short a reply for a block, and every third none at all. ``config.train`` should compute in
    float32: bfloat16 rounds sums of another order to other numbers.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for parallel in ("ddp", "fsdp"):
        settings = config.train.model_copy(update={"parallel": parallel, "patience": None})
        path = workdir / f"{parallel}.json"
        path.write_text(config.model_copy(update={"train": settings}).model_dump_json())
        if not found:
            _processes(workdir / "one", path, states, world=1, timeout_s=timeout_s)
        finished = _processes(workdir / parallel, path, states, world=2, timeout_s=timeout_s)
        found[parallel] = {"finished": len(finished), "steps": [one["steps"] for one in finished]}
        found[parallel] |= {"empty_steps": [one["empty_steps"] for one in finished]}
        if len(finished) == 2:
            one, two = (torch.load(workdir / name / "weights.pt") for name in ("one", parallel))
            found[parallel]["largest_difference"] = max(float((one[name] - two[name]).abs().max()) for name in one)
    return found


def _processes(
    folder: Path, config: Path, states: Artifact[HiddenStateCache], *, world: int, timeout_s: float
) -> list[dict[str, Any]]:
    """What each process that finished in time reports."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(folder), str(config), str(states.folder)]
    started = []
    for rank in range(world):
        command = [sys.executable, "-m", "bench.oracles.two_workers", *arguments, str(rank), str(world)]
        with open(folder / f"{rank}.log", "w") as log:
            started.append(subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log))
    deadline = time.monotonic() + timeout_s
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    reports = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(report.read_text()) for report in reports if report.exists()]


def _with_rows_of_nothing(rows: Sequence[CachedRow], block_size: int) -> list[CachedRow]:
    """Whole rows, rows without room for a block, and rows that are all prompt, in turns."""
    left = (None, block_size - 1, 0)  # reply tokens that are left
    return [
        row if left[i % 3] is None else replace(row, num_prompt_tokens=row.num_tokens - left[i % 3])
        for i, row in enumerate(rows)
    ]


def main() -> None:
    """One process: it trains, and reports what it counted when it is through."""
    folder, path, states, rank, world = Path(sys.argv[1]), *map(Path, sys.argv[2:4]), *map(int, sys.argv[4:])
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    config = train.resolved(Config.model_validate_json(path.read_text()), ())
    cache = Artifact(states, load(states, HiddenStateCache))
    dtype = getattr(torch, config.train.compute)
    frozen = read_frozen(config.target.model, dtype=dtype)
    drafter = new_drafter(config, frozen)
    rows = _with_rows_of_nothing(read_rows(cache, "train"), drafter.shape.block_size)
    feed = CachedFeed(rows, config.train, block_size=drafter.shape.block_size)
    validation = Validation(read_rows(cache, "validation")[: config.train.walk_rows])
    progress = train_loop(drafter, frozen, feed, validation, config.train, folder)
    weights = whole_state(drafter)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    if world > 1:
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps({"steps": progress.step, "empty_steps": progress.num_empty}))


if __name__ == "__main__":
    main()
