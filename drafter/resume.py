"""What a training run keeps in its folder, so that an interrupted one goes on where it was."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from drafter.model import Drafter
from drafter.optim import Optimizer
from drafter.processes import agreed, gathered, load_whole_state, meet, rank_and_world, whole_state
from pipeline.artifacts import publish
from pipeline.errors import StageError
from pipeline.shards import VISIBLE_WITHIN_S, fsync_file

logger = logging.getLogger("slipstream")

RESUME = "resume.pt"
_BEST = "best-*.pt"
# What a kill may leave amid a write, and the sign by which workers know the folder (jobs/train_workers.py).
_LEFTOVERS = (".*.tmp", ".workers-*")


@dataclass
class Progress:
    """What a resumed run goes on from, besides weights and optimiser."""

    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    """Walk of the best step so far: its counts, and "step"."""
    num_empty: int = 0
    """Steps that had no block."""
    fed: dict[str, Any] = field(default_factory=dict)
    """What the feed goes on from (``Feed.state``)."""


def save(folder: Path, drafter: Drafter, optimizer: Optimizer, progress: Progress) -> None:
    """Make this step durable: from here on a killed run goes on from it. Every process takes part, the first writes."""
    state = {
        "drafter": whole_state(drafter),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
    }
    if rank_and_world()[0] == 0:
        _save_torch(folder / RESUME, state)
        for path in folder.glob(_BEST):
            if path != best_path(folder, progress):
                path.unlink()


def best_path(folder: Path, progress: Progress) -> Path:
    """The file of the best weights so far: of this step, for a killed try may have gone on to another."""
    return folder / _BEST.replace("*", str(progress.best["step"]))


def save_best(folder: Path, drafter: Drafter, progress: Progress) -> None:
    """Keep these weights as the best so far. Every process takes part, the first writes."""
    state = whole_state(drafter)
    if rank_and_world()[0] == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _save_torch(best_path(folder, progress), state)


def load_best(folder: Path, drafter: Drafter, progress: Progress) -> None:
    """Give the drafter the best weights. Raises: StageError when they cannot be read."""
    load_whole_state(drafter, _load_torch(best_path(folder, progress)))


def resume(folder: Path, drafter: Drafter, optimizer: Optimizer) -> Progress:
    """The progress of the last checkpoint, drafter and optimiser set to it; step 0 where there is none.

    The checkpoint may be of a run with other processes. Every one of them reads it, and takes what is its own.

    Raises: StageError when the file cannot be read, is another drafter's, or has no best weights beside it, and when
    not every process sees the same one.
    """
    path, state = folder / RESUME, _seen_by_all(folder)
    if state is None:
        return Progress()
    try:
        load_whole_state(drafter, state["drafter"])
        progress = Progress(**state["progress"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise StageError(f"{path}: not a checkpoint of this run ({error}); remove {folder} to train anew")
    if not agreed((best := best_path(folder, progress)).exists()):
        raise StageError(f"{best}: missing, though {path.name} is there and needs it; remove {folder} to train anew")
    try:
        optimizer.load_state_dict(state["optimizer"])
    except (KeyError, ValueError) as error:
        logger.warning(
            "train: %s has no state of this optimiser (%s): its momenta begin at nothing, weights and learning rate "
            "go on at step %d", path, error, progress.step,
        )  # fmt: skip
    logger.info("train: resumed at step %d", progress.step)
    meet()  # before the first of them writes the next one
    return progress


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint. Raises: StageError when it cannot be read."""
    return _step_of(_last(folder), folder) or 0


def remove(folder: Path) -> None:
    """Remove what only an interrupted run needs, and what kills left of its files."""
    for pattern in (RESUME, _BEST, *_LEFTOVERS):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _seen_by_all(folder: Path) -> Any:
    """The last checkpoint, the same in every process; None where there is none.

    Raises: StageError, in all of them, when some see another one for longer than ``VISIBLE_WITHIN_S``.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        state = _last(folder)
        steps = gathered(_step_of(state, folder))
        if len(set(steps)) == 1:
            return state
        if agreed(time.monotonic() > deadline):
            found = ", ".join("none" if step is None else f"step {step}" for step in steps)
            raise StageError(
                f"{folder / RESUME}: the processes see other checkpoints than each other (by rank: {found}); put root "
                "on storage that shows every node the same files, then run the stage again"
            )
        time.sleep(0.2)


def _last(folder: Path) -> Any:
    """The last checkpoint; None where there is none."""
    path = folder / RESUME
    return _load_torch(path) if path.exists() else None


def _step_of(state: Any, folder: Path) -> int | None:
    """The step of a checkpoint; None of none."""
    try:
        return None if state is None else state["progress"]["step"]
    except (KeyError, TypeError) as error:
        raise StageError(f"{folder / RESUME}: not a checkpoint of this run ({error}); remove {folder} to train anew")


def _save_torch(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(value, temporary)
    fsync_file(temporary)
    publish(temporary, path)


def _load_torch(path: Path) -> Any:
    """What was saved there, its tensors mapped. Raises: StageError when it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, UnpicklingError) as error:
        raise StageError(f"{path}: cannot be read ({error}); remove {path.parent} to train anew")
