"""Work that goes wrong on its engine as a test dictates; a module of its own, for Ray's workers import it by name."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.engines import PartDone
from pipeline.errors import ConfigError, StageError


@dataclass(frozen=True)
class Frail:
    """Work in an engine's place: some parts end their process in their first calls, or fail."""

    folder: Path
    deaths: int = 0
    seconds: float = 0.0

    def begin(self, engine):
        return engine * 2

    def part(self, engine, index, begun):
        assert (engine, begun) == (1, 2)
        with open(self.folder / f"calls-{index}", "a") as file:
            file.write("x")
        calls = os.path.getsize(self.folder / f"calls-{index}")
        if index == 1 and calls <= self.deaths:
            os._exit(1)
        if index == 6 and calls <= self.deaths:
            raise RuntimeError("the engine is out of order")
        if index == 7:
            raise ConfigError("part 7 is not to be done")
        time.sleep(self.seconds)
        return PartDone(index, 1, 10)

    def calls(self, index):
        return os.path.getsize(self.folder / f"calls-{index}")


def starts():
    return 1


def does_not_start():
    raise ValueError("no such model")


def dies_while_it_loads_once(marker):
    """An engine whose first process ends before it is loaded, as on a machine that is short of memory."""
    if not marker.exists():
        marker.touch()
        os._exit(1)
    return 1


@dataclass(frozen=True)
class Refuses(Frail):
    """Work that a check at the beginning stops."""

    def begin(self, engine):
        with open(self.folder / "checks", "a") as file:
            file.write("x")
        raise StageError("capture check failed: layer 1")
