"""What every peer's script shares: rows that Slipstream exported, and turns that are taken on command.

Runs inside a peer's environment: torch and numpy alone. bench/oracles/trainers.py has the other side of the protocol.

Legend: n tokens of a row, F = layers x H, H width of the target.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_answers = os.fdopen(int(os.environ["ANSWERS_FD"]), "w")  # standard output is everybody's


class Rows:
    """Rows on disk (bench/oracles/exported_rows.py), read when a batch needs them."""

    def __init__(self, folder: Path):
        told = json.loads((folder / "rows.json").read_text())
        self.folder, self.width, self.hidden_size = folder, told["width"], told["hidden_size"]
        self.rows: list[list[int]] = told["rows"]  # start, tokens, tokens of the prompt

    def ids(self, index: int) -> Tensor:  # int64 [n]
        """A row's prompt and reply."""
        start, n, _ = self.rows[index]
        return torch.from_numpy(np.fromfile(self.folder / "ids.bin", np.int32, n, offset=4 * start).astype(np.int64))

    def supervised(self, index: int) -> Tensor:  # int64 [n]
        """1 where a token is the target's."""
        _, n, num_prompt_tokens = self.rows[index]
        return (torch.arange(n) >= num_prompt_tokens).long()

    def states(self, index: int) -> Tensor:  # bfloat16 [n, F]
        """The states that a drafter reads; the last token's is 0, as nothing ever sees it."""
        return self._read("states.bin", index, self.width)

    def last(self, index: int) -> Tensor:  # bfloat16 [n, H]
        """The target's last layer, before its final norm."""
        return self._read("last.bin", index, self.hidden_size)

    def _read(self, name: str, index: int, width: int) -> Tensor:
        start, n, _ = self.rows[index]
        words = np.fromfile(self.folder / name, np.int16, n * width, offset=2 * width * start)
        return torch.from_numpy(words).view(torch.bfloat16).view(n, width)


class Turns:
    """Batches for as long as a command asks for steps, answers in between; rows are shuffled anew each epoch."""

    def __init__(
        self,
        settings: dict[str, Any],
        rows: Rows,
        batch_of: Callable[[Sequence[int]], tuple[Any, int]],
        memory: dict[str, float],
        answers: dict[str, Callable[..., dict[str, Any]]],
    ):
        self._settings, self._rows, self._batch_of = settings, rows, batch_of
        self._memory, self._answers = memory, {**answers, "usage": self._usage}
        self._generator = torch.Generator().manual_seed(settings["seed"])
        self._queue: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self._memory["before_steps"] = resident("VmRSS")
        for line in sys.stdin:
            command = json.loads(line)
            do = command.pop("do")
            if do == "quit":
                return
            if do != "train":
                answer(self._answers[do](**command))
                continue
            started, blocks = time.perf_counter(), 0
            for _ in range(command["steps"]):
                batch, num_blocks = self._batch_of(self._dealt())
                blocks += num_blocks
                yield batch
            answer({"seconds": time.perf_counter() - started, "blocks": blocks, "steps": command["steps"]})

    def _dealt(self) -> list[int]:
        count = self._settings["rows_per_step"]
        while len(self._queue) < count:
            self._queue += torch.randperm(len(self._rows.rows), generator=self._generator).tolist()
        dealt, self._queue = self._queue[:count], self._queue[count:]
        return dealt

    def _usage(self) -> dict[str, float]:
        return {**self._memory, "peak": resident("VmHWM")}


def begin(settings: dict[str, Any]) -> dict[str, float]:
    """Threads and seed as told; returns what the imports took of memory."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    return {"imported": resident("VmRSS")}


def resident(name: str) -> float:
    """Bytes of this process's memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


def answer(told: dict[str, Any]) -> None:
    """One line for whoever asked."""
    print(json.dumps(told), file=_answers, flush=True)
