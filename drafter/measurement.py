"""What is measured while training: walks over validation rows, which select the best step, and the pace."""

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.processes import agreed, rank_and_world
from drafter.resume import Progress, save_best
from drafter.walk import WalkCounts, walk

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Validation:
    """Rows that a run walks over and never trains on."""

    own: Sequence[CachedRow]
    """What the best step is selected by."""
    replayed: Mapping[str, Sequence[CachedRow]] = field(default_factory=dict)
    """Id of each replayed cache → its rows."""

    def walk(self, drafter: Drafter, frozen: FrozenTarget) -> "Walks":
        """The drafter's walks over all of them."""
        counts, slices = walk(drafter, frozen, self.own)
        return Walks(counts, slices, {name: walk(drafter, frozen, rows)[0] for name, rows in self.replayed.items()})


@dataclass(frozen=True)
class Walks:
    """Counts over validation rows: the run's own, those by slice, and each replayed cache's."""

    own: WalkCounts
    slices: Mapping[str, WalkCounts]
    replayed: Mapping[str, WalkCounts]

    def figures(self) -> dict[str, float]:
        """For a point of the curve: lengths, and the share of steps that accept at least k drafts."""
        per_pos = self.own.num_accepted_tokens_per_pos
        return {
            "walk_acceptance_length": self.own.acceptance_length,
            **{f"walk_accepted_{k + 1}": n / max(1, self.own.num_drafts) for k, n in enumerate(per_pos)},
            **{f"walk_slice/{name}": counts.acceptance_length for name, counts in sorted(self.slices.items())},
            **{f"walk_replay/{name}": counts.acceptance_length for name, counts in self.replayed.items()},
        }


class Pace:
    """How fast training is: of the steps since the last measurement, and how long the rest will take."""

    def __init__(self, first_step: int, num_steps: int):
        self._first, self._num_steps = first_step, num_steps
        self._started = self._since = time.monotonic()
        self._blocks = self._tokens = 0

    def add(self, deals: Sequence[Deal]) -> None:
        """Count a step of all processes."""
        self._blocks += sum(len(deal.anchors) for deal in deals)
        self._tokens += sum(int(deal.anchors[-1]) for deal in deals)

    def figures(self, step: int) -> dict[str, float]:
        """Blocks and context tokens a second, seconds so far and left, and the peak of memory in MB."""
        now = time.monotonic()
        elapsed, spent = now - self._started, max(1e-9, now - self._since)
        return {
            "blocks_per_s": self._blocks / spent,
            "tokens_per_s": self._tokens / spent,
            "seconds": elapsed,
            "remaining_s": elapsed / max(1, step - self._first) * (self._num_steps - step),
            "peak_memory_mb": peak_memory_mb(),
        }

    def go_on(self) -> None:
        """Begin to count anew: what was measured in between is not training."""
        self._since, self._blocks, self._tokens = time.monotonic(), 0, 0


def peak_memory_mb() -> float:
    """The most memory so far: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(
    progress: Progress,
    drafter: Drafter,
    frozen: FrozenTarget,
    validation: Validation,
    folder: Path,
    point: dict[str, float],
) -> Walks:
    """Walk over the validation rows and add a point to the curve; the best weights so far are kept.

    Every process takes part, and comes to the same decisions.
    """
    walks = agreed(validation.walk(drafter, frozen))  # near-ties may fall otherwise on another kind of hardware
    point = {**point, **walks.figures()}
    progress.curve.append(point)
    is_best = progress.best is None or walks.own.acceptance_length > progress.best["acceptance_length"]
    if is_best:
        progress.best = {**walks.own.as_dict(), "step": progress.step}
        save_best(folder, drafter, progress)
    if rank_and_world()[0] == 0:
        logger.info(
            "train: step %d  loss %s  walk acceptance %.3f%s  %.0f blocks/s  %.0f s left",
            progress.step,
            f"{point['loss']:.3f}" if "loss" in point else "-",
            walks.own.acceptance_length,
            "".join(f" ({name}: {one.acceptance_length:.3f})" for name, one in walks.replayed.items()),
            point.get("blocks_per_s", 0),
            point.get("remaining_s", 0),
        )
    return walks


def has_stalled(progress: Progress, patience: int | None) -> bool:
    """Whether so many measurements in a row have not raised the walk acceptance; the first is of step 0."""
    if patience is None or progress.best is None:
        return False
    return sum(point["step"] > progress.best["step"] for point in progress.curve) >= patience
