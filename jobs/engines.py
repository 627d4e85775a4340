"""Engines of the target as Ray actors: started at first use, restarted when they die, kept between stages."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import ray

from jobs.target_engine import TargetEngine
from pipeline.config import Config
from pipeline.engines import Captured, CaptureRequest, EngineInfo, GenerateRequest, Reply
from pipeline.errors import SlipstreamError, StageError

logger = logging.getLogger("slipstream")

# A batch that has taken this many engines down is given up.
MAX_TRIES = 3
MAX_NUM_SEQS = 96

T = TypeVar("T")


class EngineActor(TargetEngine):
    """One engine in its own process. Tensors stay there: batches and paths go in, ids and counts come out."""


class EnginePool:
    """``config.regenerate.num_engines`` engines of one target; implements pipeline.engines.Engines.

    Nothing starts before the first call, so a run whose stages are complete loads no model. Use it as a
    context manager: the engines and their memory are given back at the end.
    """

    def __init__(self, config: Config, *, target_layer_ids: Sequence[int] = ()):
        self._config = config
        self._layer_ids = tuple(target_layer_ids)
        self._actors: list[Any] = []
        self._infos: list[Any] = []
        self.restarts = 0
        """Engines that died and were started again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engines."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def info(self) -> EngineInfo:
        """The engines' common settings."""
        return self._ask(lambda actor: actor.info.remote())

    def generate(self, batches: Iterable[tuple[int, Sequence[GenerateRequest]]]) -> Iterator[tuple[int, list[Reply]]]:
        """Every request's reply, a batch at a time, as the engines finish them."""
        return self._spread(lambda actor, batch: actor.generate.remote(list(batch[1])), batches)

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        """One prompt's captured states against a reference forward pass."""
        return self._ask(lambda actor: actor.check_capture.remote(list(ids), [list(other) for other in others]))

    def capture(
        self, batches: Iterable[tuple[int, Sequence[CaptureRequest], Path]], typical_norms: Sequence[float]
    ) -> Iterator[tuple[int, list[Captured]]]:
        """Every row's states, written to the batch's path by the engine that computed them."""
        norms = list(typical_norms)
        return self._spread(lambda actor, batch: actor.capture.remote(list(batch[1]), batch[2], norms), batches)

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        return next(self._spread(lambda actor, _: call(actor), [(0,)]))[1]

    def _spread(self, call: Callable[[Any, Any], Any], batches: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, T]]:
        """Results by batch number as they finish: one batch an engine at a time, retried on another when it dies."""
        self._start()
        waiting, retries = iter(batches), []
        idle = list(range(len(self._actors)))
        running: dict[Any, tuple[int, tuple[Any, ...], int]] = {}  # reference → engine, batch, tries
        while True:
            while idle and (job := retries.pop() if retries else _first_try(waiting)):
                batch, tries = job
                engine = idle.pop()
                running[call(self._actors[engine], batch)] = (engine, batch, tries + 1)
            if not running:
                return
            (done,), _ = ray.wait(list(running), num_returns=1)
            engine, batch, tries = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayError as error:
                self._revive(engine, batch[0], tries, error)
                retries.append((batch, tries))
            else:
                yield batch[0], result
            idle.append(engine)

    def _start(self) -> None:
        """Begin to load the engines; calls wait for them, and the caller's own preparations go on meanwhile."""
        if self._actors:
            return
        count = self._config.regenerate.num_engines
        logger.info("engines: starting %d for %s", count, self._config.target.model.name)
        self._actors = [self._actor() for _ in range(count)]
        self._infos = [actor.info.remote() for actor in self._actors]

    def _require_started(self, engine: int) -> None:
        """Raises: StageError when this engine never came up: another try would end the same way."""
        if self.restarts:
            return
        try:
            ray.get(self._infos[engine])
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.ActorDiedError) and not error.actor_init_failed:
                return  # it came up and died before its word arrived: another may live
            self.close()
            raise StageError(f"an engine for {self._config.target.model} could not start: {_last_line(error)}")

    def _actor(self) -> Any:
        has_gpu = ray.cluster_resources().get("GPU", 0) > 0
        remote = ray.remote(EngineActor).options(num_cpus=1, num_gpus=1 if has_gpu else 0)
        target = self._config.target
        return remote.remote(
            target.model,
            dtype=target.dtype,
            max_model_len=target.max_model_len,
            target_layer_ids=self._layer_ids,
            kv_cache_gib=self._config.regenerate.kv_cache_gib,
            max_num_seqs=MAX_NUM_SEQS,
            num_threads=max(1, len(os.sched_getaffinity(0)) // self._config.regenerate.num_engines),
        )

    def _revive(self, engine: int, batch: int, tries: int, error: ray.exceptions.RayError) -> None:
        """Put a new engine in a failed one's place. Raises: the engine's own SlipstreamError, or StageError."""
        if isinstance(cause := getattr(error, "cause", None), SlipstreamError):
            raise cause
        self._require_started(engine)
        if tries >= MAX_TRIES:
            raise StageError(
                f"batch {batch} failed on {tries} engines in a row, last with: {_last_line(error)}. Committed parts "
                "stand; look at the engine's log, then run the stage again"
            )
        logger.warning(
            "engines: engine %d failed in batch %d (%s); starting it again", engine, batch, _last_line(error)
        )
        ray.kill(self._actors[engine])
        self._actors[engine] = self._actor()
        self.restarts += 1


def _first_try(waiting: Iterator[tuple[Any, ...]]) -> tuple[tuple[Any, ...], int] | None:
    batch = next(waiting, None)
    return None if batch is None else (batch, 0)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
