"""Two trainers on the same states for the same seconds, each at its own best learning rate and batch.

Both are tuned by the same number of short runs of the same length, judged by the walk over the validation rows. The
schedule of a run needs its number of steps beforehand: it comes from the pace of an earlier one. Only training counts;
imports, loading and what is measured afterwards don't.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.oracles.peer_drafter import converted, same_drafts
from bench.oracles.peer_environment import SPECULATORS, command_of
from bench.oracles.trainer_speed import OURS, Ground, PeerSetting, our_settings, peer_settings, say, with_train
from bench.oracles.trainers import TrainerProcess, Turn, trainer
from drafter.checkpoint import load_drafter
from drafter.dataset import CachedRow
from drafter.frozen import FrozenTarget
from drafter.shape import DrafterShape
from drafter.walk import walk
from pipeline.artifacts import write_durably

_PACE_STEPS = 4
# Of the seconds that a run should have taken.
_OFF = 0.1


@dataclass(frozen=True)
class Held:
    """What a run is judged on."""

    validation: Sequence[CachedRow]
    frozen: FrozenTarget  # float32
    shape: DrafterShape
    first_exported: Sequence[CachedRow]
    """The first of the exported rows: what both forward passes are compared on."""


@dataclass(frozen=True)
class Trained:
    """One run: what it was set to, what it took, and where its drafter is."""

    learning_rate: float
    blocks_per_step: int
    turn: Turn
    accepted: float
    """Accepted drafts a step of the walk over the validation rows."""
    folder: Path
    same_drafts: float | None = None

    def told(self) -> dict[str, Any]:
        """For the figure's note."""
        return {
            "learning_rate": self.learning_rate,
            "blocks_per_step": self.blocks_per_step,
            "steps": self.turn.steps,
            "seconds": round(self.turn.seconds, 1),
            "accepted": round(self.accepted, 4),
        }


class Side:
    """One of the two trainers: how it is started, and how its weights become a drafter's folder."""

    def __init__(self, name: str, ground: Ground, held: Held, setting: PeerSetting | None):
        self.name, self._ground, self._held, self._setting = name, ground, held, setting

    def seconds_a_step(self, blocks_per_step: int) -> float:
        """Of a few at the beginning; measured once, since a run that is gone on with must not ask for other steps."""
        path = self._ground.work / "equal_time" / f"{self.name}-pace-{blocks_per_step}.json"
        if not path.exists():
            with self._process("pace", 1e-3, blocks_per_step, 1000, seed=0) as process:
                process.train(2)
                turn = process.train(_PACE_STEPS)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(turn.seconds / turn.steps).encode())
        return json.loads(path.read_text())

    def run(self, learning_rate: float, blocks_per_step: int, *, steps: int, seed: int, name: str) -> Trained:
        """A whole run on its own whole schedule; one that is on record is not made again."""
        folder = self._ground.work / "equal_time" / f"{self.name}-{name}"
        record = folder / "run.json"
        if not record.exists():
            with self._process(name, learning_rate, blocks_per_step, steps, seed=seed) as process:
                turn = process.train(steps)
                told = {"turn": turn.__dict__, "same": self._keep(process, folder)}
            drafter, _ = load_drafter(folder)
            counts, _ = walk(drafter, self._held.frozen, self._held.validation)
            told["accepted"] = counts.num_accepted_tokens / max(1, counts.num_drafts)
            write_durably(record, json.dumps(told).encode())
        told = json.loads(record.read_text())
        turn = Turn(**told["turn"])
        trained = Trained(learning_rate, blocks_per_step, turn, told["accepted"], folder, told["same"])
        say(f"{self.name} {name}: {trained.told()}")
        return trained

    def _process(self, name: str, learning_rate: float, blocks_per_step: int, steps: int, *, seed: int) -> Any:
        ground = with_train(self._ground, learning_rate=learning_rate, blocks_per_step=blocks_per_step, seed=seed)
        folder = ground.work / "equal_time" / "processes"
        if self._setting is None:
            return trainer(OURS, our_settings(ground) | {"steps": steps}, folder, f"{self.name}-{name}")
        told = peer_settings(ground, self._setting, optimizer=ground.config.train.optimizer, steps=steps)
        return trainer(command_of(SPECULATORS, ground.work), told, folder, f"{self.name}-{name}")

    def _keep(self, process: TrainerProcess, folder: Path) -> float | None:
        """Write its drafter; the share of slots that a peer drafts as the drafter it was converted to does."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._setting is None:
            process.ask(do="save", path=str(folder))
            return None
        weights = folder.with_name(f"{folder.name}.safetensors")  # vLLM would load what lies in the folder
        process.ask(do="save", path=str(weights))
        drafter = converted(weights, self._held.shape, folder)
        weights.unlink()
        return same_drafts(process, drafter, self._held.frozen, list(self._held.first_exported))["share"]


def tuned(side: Side, *, rates: Sequence[float], batches: Sequence[int], seconds: float) -> list[Trained]:
    """A run of so many seconds at each learning rate and batch; the best is first."""
    runs = []
    for blocks in batches:
        steps = max(2, int(seconds / side.seconds_a_step(blocks)))
        runs += [side.run(rate, blocks, steps=steps, seed=0, name=f"{blocks}-{rate:g}-{seconds:g}s") for rate in rates]
    return sorted(runs, key=lambda run: -run.accepted)


def final(side: Side, best: Trained, *, seconds: float, seed: int) -> Trained:
    """The run that counts, at the best trial's settings: made again where its pace was not the trial's by far, as where
    compiling counts for more in a short run.
    """
    name = f"final-{seconds:g}s-seed{seed}"
    settings = best.learning_rate, best.blocks_per_step
    run = side.run(*settings, steps=_steps_in(seconds, best.turn), seed=seed, name=name)
    if abs(run.turn.seconds / seconds - 1) > _OFF:
        run = side.run(*settings, steps=_steps_in(seconds, run.turn), seed=seed, name=f"{name}-again")
    return run


def _steps_in(seconds: float, turn: Turn) -> int:
    """At the pace of a turn."""
    return max(2, int(seconds * turn.steps / turn.seconds))
