"""An engine in a process of its own, without Ray, that does a stage's parts one by one and times them.

Two of them take turns on one machine: while one works, the other's threads sleep.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.artifacts import HiddenStateCache, PromptSet, ResponseSet
from pipeline.config import Config
from pipeline.engines import Engine, PartDone, Work
from pipeline.stages import Artifact

_engine: Engine | None = None


class TimedEngine:
    """pipeline.engines.Engines over one engine; ``seconds`` is what its parts took, ``check_seconds`` the beginning."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.seconds = self.check_seconds = 0.0

    def run(self, work: Work, parts: Sequence[int]) -> Iterator[PartDone]:
        """The parts, in order."""
        started = time.monotonic()
        begun = work.begin(self._engine)
        self.check_seconds += time.monotonic() - started
        for index in parts:
            started = time.monotonic()
            done = work.part(self._engine, index, begun)
            self.seconds += time.monotonic() - started
            yield done


@contextmanager
def engine_process(model: Path, **settings: Any) -> Iterator[Callable[..., Any]]:
    """A function that has the engine's process call ``f(engine, *arguments)``; f is a module's function."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_load, initargs=(model, settings)) as pool:
        pool.submit(_loaded).result()
        yield lambda f, *arguments: pool.submit(_call, f, arguments).result()


def answer(
    engine: Engine, config: Config, prompts: Artifact[PromptSet], layers: Sequence[int]
) -> tuple[Artifact[ResponseSet], float, float]:
    """The responses, seconds of the parts, and seconds of the checks before them; the states in the same pass."""
    from pipeline import regenerate

    timed = TimedEngine(engine)
    found = regenerate.run(config, prompts, engines=timed, target_layer_ids=layers)
    return found, timed.seconds, timed.check_seconds


def read(
    engine: Engine, config: Config, responses: Artifact[ResponseSet], layers: Sequence[int]
) -> tuple[Artifact[HiddenStateCache], float]:
    """The states of responses, and seconds of the parts that were not done yet."""
    from pipeline import capture

    timed = TimedEngine(engine)
    return capture.run(config, responses, engines=timed, target_layer_ids=layers), timed.seconds


def check(engine: Engine, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
    """The capture check of one prompt."""
    return engine.check_capture(ids, others)


def _load(model: Path, settings: dict[str, Any]) -> None:
    global _engine
    from jobs.target_engine import TargetEngine

    _engine = TargetEngine(model, **settings)


def _loaded() -> bool:
    return _engine is not None


def _call(f: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return f(_engine, *arguments)
