"""Training runs in processes of their own, killed with signal 9 at random steps and gone on with, against one that
nobody killed.

python -m bench.oracles.resumed_runs FOLDER CONFIG STATES [STEP SECONDS]    one try of one run
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter import loop, train, trainer
from drafter.optim import Optimizer
from drafter.resume import RESUME, Progress, best_path
from pipeline.artifacts import HiddenStateCache, load
from pipeline.config import Config
from pipeline.stages import Artifact

CHECKOUT = Path(__file__).resolve().parents[2]
# What a clock and a memory meter say differs from run to run.
_METERS = {"blocks_per_s", "tokens_per_s", "seconds", "remaining_s", "peak_memory_mb"}


def resumed_at_random_steps(
    workdir: Path, config: Config, states: Artifact[HiddenStateCache], *, count: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Of ``count`` runs that were killed once each, at a random moment of a random step, and gone on with: tensors
    (weights, best weights and optimiser) that differ from the uninterrupted run's, and curves that do.

    ``config.train`` says how long a run is; it should have several checkpoints. Raises: RuntimeError with the end of
    its log when a run fails, or was not killed.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(config.model_dump_json())
    seconds_a_step = _uninterrupted(workdir, states) / config.train.steps
    expected, curve = _end_of(workdir / "straight")
    moments, steps, different, other_curves = random.Random(seed), [], 0, 0
    for number in range(count):
        steps.append(moments.randrange(1, config.train.steps))
        folder = workdir / f"killed-{number}"
        killed = _try(workdir, folder, states, str(steps[-1]), str(moments.uniform(0, seconds_a_step)))
        if killed != -signal.SIGKILL or _try(workdir, folder, states) != 0:
            raise RuntimeError(f"{folder}: {folder.with_suffix('.log').read_text()[-2000:]}")
        tensors, its_curve = _end_of(folder)
        different += sum(
            name not in tensors or not torch.equal(tensors[name], tensor) for name, tensor in expected.items()
        )
        other_curves += its_curve != curve
    return {
        "n": count,
        "killed_at_steps": steps,
        "tensors": len(expected) * count,
        "different_tensors": different,
        "different_curves": other_curves,
    }


def _uninterrupted(workdir: Path, states: Artifact[HiddenStateCache]) -> float:
    """Train without a kill; seconds."""
    started = time.monotonic()
    if _try(workdir, workdir / "straight", states) != 0:
        raise RuntimeError((workdir / "straight.log").read_text()[-2000:])
    return time.monotonic() - started


def _try(workdir: Path, folder: Path, states: Artifact[HiddenStateCache], *kill: str) -> int:
    """The exit status of one try."""
    arguments = [str(folder), str(workdir / "config.json"), str(states.folder), *kill]
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.run(
            [sys.executable, "-m", "bench.oracles.resumed_runs", *arguments], cwd=CHECKOUT, stdout=log, stderr=log
        ).returncode


def _end_of(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Everything that a run ended with: its tensors by name, and its curve without meters."""
    state = torch.load(folder / RESUME, weights_only=True)
    tensors = dict(_tensors(state["drafter"], "drafter")) | dict(_tensors(state["optimizer"], "optimizer"))
    best = best_path(folder, Progress(**state["progress"]))
    tensors |= dict(_tensors(torch.load(best, weights_only=True), "best"))
    curve = [{k: v for k, v in point.items() if k not in _METERS} for point in state["progress"]["curve"]]
    return tensors, curve


def _tensors(tree: Mapping[str, Any], name: str):
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{name}/{key}")
        else:
            yield f"{name}/{key}", value


def _kill_at(step: int, seconds: float) -> None:
    """Have this process killed so long after its ``step``-th optimiser step."""
    taken = []

    class Watched(Optimizer):
        def step(self, scale: float, number: int) -> None:
            super().step(scale, number)
            taken.append(scale)
            if len(taken) == step:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    loop.Optimizer = Watched


def main() -> None:
    """One try, in this process."""
    folder, config, states = map(Path, sys.argv[1:4])
    if len(sys.argv) > 4:
        _kill_at(int(sys.argv[4]), float(sys.argv[5]))
    folder.mkdir(parents=True, exist_ok=True)
    cache = Artifact(states, load(states, HiddenStateCache))
    trainer.train_in(folder, train.resolved(Config.model_validate_json(config.read_text()), ()), cache, None)
    if len(sys.argv) > 4:
        time.sleep(60)  # the last steps' timer may still be running


if __name__ == "__main__":
    main()
