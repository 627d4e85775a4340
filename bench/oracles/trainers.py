"""Trainers in processes of their own, ours and a peer's, which take turns on one machine by one protocol.

A process is told a settings file, says that it is ready, and then answers a line of JSON for a line of JSON:
{"do": "train", "steps": n} → seconds, blocks; {"do": "usage"} → bytes; {"do": "save", "path": ...}; {"do": "quit"}.
Between its turns it waits for a line and takes no processor time. Commands come on its standard input, answers go to
the descriptor that ANSWERS_FD names: standard output is everybody's, and ends in the log.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.errors import StageError

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    # Threads that spin while they wait would take the cores of whose turn it is.
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Turn:
    """What one turn did."""

    seconds: float
    blocks: int
    steps: int

    @property
    def blocks_per_s(self) -> float:
        """Trained blocks a second."""
        return self.blocks / self.seconds


class TrainerProcess:
    """A trainer that waits for its turns."""

    def __init__(self, process: subprocess.Popen[str], answers: IO[str], log: Path):
        self._process, self._answers, self._log = process, answers, log
        self.parameters: int = self._answer()["parameters"]

    def train(self, steps: int) -> Turn:
        """Go on for so many optimiser steps. Raises: StageError with the end of its log when it has died."""
        told = self.ask(do="train", steps=steps)
        return Turn(told["seconds"], told["blocks"], told["steps"])

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to one command. Raises: as ``train``."""
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            raise StageError(f"{self._log}: the trainer ended with exit status {status}: {last_words(self._log)}")
        return json.loads(line)


@contextmanager
def trainer(command: list[str], settings: Mapping[str, Any], folder: Path, name: str) -> Iterator[TrainerProcess]:
    """A trainer's process, ready; it ends with the block. Raises: StageError with the end of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    shutil.rmtree(folder / name, ignore_errors=True)  # nobody goes on with what an earlier one left
    path.write_text(json.dumps({**settings, "workdir": str(folder / name)}))
    reading, writing = os.pipe()
    threads = {"OMP_NUM_THREADS": str(settings["threads"]), "ANSWERS_FD": str(writing)}
    with open(log, "w") as said, open(reading) as answers:
        process = subprocess.Popen(
            [*command, str(path)],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **_ENVIRONMENT, **threads, **settings.get("environment", {})},
            cwd=ROOT,
            pass_fds=(writing,),
        )
        os.close(writing)
        try:
            yield TrainerProcess(process, answers, log)
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()  # it takes that for the end
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def resident(name: str) -> float:
    """Bytes of this process's memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


def last_words(log: Path) -> str:
    """The last line of a log, which is where Python says what went wrong."""
    lines = log.read_text().strip().splitlines()
    return lines[-1][-300:] if lines else "nothing was logged"
