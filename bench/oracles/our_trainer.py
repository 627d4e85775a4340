"""Slipstream's training loop in a process of its own, in turns: the peer of bench/peers' trainers, by their protocol.

python -m bench.oracles.our_trainer SETTINGS.json

The loop itself waits in its feed for the next command, so what is timed is all of it: rows read, packed, forward,
backward, clipped and stepped.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.oracles.trainers import resident
from drafter.checkpoint import save_drafter
from drafter.dataset import read_rows
from drafter.deal import Deal
from drafter.feed import CachedFeed
from drafter.frozen import read_frozen
from drafter.loop import train_loop
from drafter.measurement import Validation
from drafter.model import Drafter
from drafter.precision import compute_dtype
from drafter.start import new_drafter
from drafter.trainer import trainable_rows
from pipeline.artifacts import HiddenStateCache
from pipeline.config import Config
from pipeline.stages import open_artifact


class Turns:
    """A feed that hands out another's rows for as many steps as a command asks for, and answers in between."""

    def __init__(self, feed: CachedFeed, drafter: Drafter, memory: Mapping[str, float]):
        self._feed, self._drafter, self._memory = feed, drafter, dict(memory)
        self._left = self._asked = self._blocks = 0
        self._started = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def rows_of(self, step: int) -> list[Deal]:
        """The rows of a step, once somebody wants it."""
        self._memory.setdefault("before_steps", resident("VmRSS"))
        while not self._left:
            if self._asked:
                spent = time.perf_counter() - self._started
                answer({"seconds": spent, "blocks": self._blocks, "steps": self._asked})
                self._asked = self._blocks = 0
            command = json.loads(sys.stdin.readline() or '{"do": "quit"}')
            if command["do"] == "quit":
                raise SystemExit
            if command["do"] == "train":
                self._left = self._asked = command["steps"]
                self._started = time.perf_counter()
            else:
                answer(getattr(self, command["do"])(**{k: v for k, v in command.items() if k != "do"}))
        self._left -= 1
        deals = self._feed.rows_of(step)
        self._blocks += sum(len(deal.anchors) for deal in deals)
        return deals

    def save(self, path: str) -> dict[str, Any]:
        """Write what it has trained, as a drafter's folder."""
        save_drafter(Path(path), self._drafter)
        return {"tensors": len(list(self._drafter.parameters()))}

    def usage(self) -> dict[str, float]:
        """Bytes that this process holds, and held at most."""
        return {**self._memory, "peak": resident("VmHWM")}


def answer(told: Mapping[str, Any]) -> None:
    """One line for whoever asked."""
    with os.fdopen(os.dup(int(os.environ["ANSWERS_FD"])), "w") as answers:
        print(json.dumps(told), file=answers)


def main() -> None:
    """Make the loop's inputs, say so, and train as commands come."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    memory = {"imported": resident("VmRSS")}
    torch.set_num_threads(settings["threads"])
    config = Config.model_validate(settings["config"])
    # The last step is never asked for: the loop would measure and end after it.
    training = config.train.model_copy(update={"steps": settings["steps"] + 1})
    states = open_artifact(config.root, HiddenStateCache, settings["states"])
    frozen = read_frozen(config.target.model, dtype=compute_dtype(training.compute, torch.device("cpu")))
    drafter = new_drafter(config, frozen)
    rows = trainable_rows(read_rows(states, "train"), drafter.shape.block_size)
    feed = CachedFeed(rows, training, block_size=drafter.shape.block_size)
    # One row: the loop walks before its first step, which is not what is measured here.
    validation = Validation(read_rows(states, "validation")[:1])
    memory["loaded"] = resident("VmRSS")
    answer({"ready": True, "parameters": sum(p.numel() for p in drafter.parameters())})
    folder = Path(settings["workdir"])
    folder.mkdir(parents=True, exist_ok=True)
    train_loop(drafter, frozen, Turns(feed, drafter, memory), validation, training, folder)


if __name__ == "__main__":
    main()
