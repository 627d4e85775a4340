"""What a training run keeps in its folder, so that an interrupted one goes on where it was."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafter.model import Drafter
from drafter.optim import Optimizer
from pipeline.artifacts import publish
from pipeline.shards import fsync_file

logger = logging.getLogger("slipstream")

RESUME, BEST = "resume.pt", "best.pt"


@dataclass
class Progress:
    """What a resumed run goes on from, besides weights and optimiser."""

    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    """Walk of the best step so far: its counts, and "step"."""


def save(folder: Path, drafter: Drafter, optimizer: Optimizer, progress: Progress) -> None:
    """Make this step durable: from here on a killed run goes on from it."""
    state = {
        "drafter": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {"step": progress.step, "curve": progress.curve, "best": progress.best},
    }
    _save_torch(folder / RESUME, state)


def save_best(folder: Path, drafter: Drafter) -> None:
    """Keep these weights as the best so far."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_torch(folder / BEST, drafter.state_dict())


def load_best(folder: Path, drafter: Drafter) -> None:
    """Give the drafter the best weights."""
    drafter.load_state_dict(torch.load(folder / BEST, weights_only=True))


def resume(folder: Path, drafter: Drafter, optimizer: Optimizer) -> Progress:
    """The progress of the last checkpoint, drafter and optimiser set to it; step 0 where there is none."""
    path = folder / RESUME
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    drafter.load_state_dict(state["drafter"])
    optimizer.load_state_dict(state["optimizer"])
    progress = Progress(**state["progress"])
    logger.info("train: resumed at step %d", progress.step)
    return progress


def saved_step(folder: Path) -> int:
    """The step of the last checkpoint."""
    path = folder / RESUME
    return torch.load(path, weights_only=True, mmap=True)["progress"]["step"] if path.exists() else 0


def remove(folder: Path) -> None:
    """Remove what only an interrupted run needs."""
    for name in (BEST, RESUME):
        (folder / name).unlink(missing_ok=True)


def _save_torch(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(value, temporary)
    fsync_file(temporary)
    publish(temporary, path)
