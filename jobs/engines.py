"""Engines of the target on Ray Data: a row is a part's number, an actor is an engine, what comes back is a count.

Ray Data starts the actors, hands each a second part before it is through with the first, brings dead ones back and
gives their parts to them again. Which parts were begun how often is written down at a desk (jobs/engine_desk.py).
"""

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from jobs import engine_desk
from jobs.resources import say_if_lacking
from pipeline.config import Config
from pipeline.engines import Engine, PartDone, Work
from pipeline.errors import SlipstreamError, StageError

logger = logging.getLogger("slipstream")

# A part that has taken this many engines down is given up.
MAX_TRIES = 3
# Two parts at a time keep an engine full while the longest replies of one come to their end.
PARTS_PER_ENGINE = 2


class EnginePool:
    """``config.regenerate.num_engines`` engines of one target; implements pipeline.engines.Engines.

    Every run starts its own and ends them: the next stage has the memory. A run of no parts starts none.
    """

    def __init__(self, config: Config, *, target_layer_ids: Sequence[int] = (), drafter: Path | None = None):
        settings, target = config.regenerate, config.target
        self._num_engines, self._model = settings.num_engines, target.model
        self._gpus_per_engine = settings.tensor_parallel_size
        self._start: Callable[[], Engine] = partial(
            _load_target,
            target.model,
            dtype=target.dtype,
            max_model_len=target.max_model_len,
            target_layer_ids=tuple(target_layer_ids),
            drafter=drafter,
            check=config.capture.check,
            kv_cache_gib=settings.kv_cache_gib,
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel_size=settings.tensor_parallel_size,
            num_threads=max(1, len(os.sched_getaffinity(0)) // settings.num_engines),
            **settings.engine_args,
        )

    def run(self, work: Work, parts: Sequence[int]) -> Generator[PartDone, None, None]:
        """The parts as they are done, in any order. Closing it ends the engines.

        Raises: the SlipstreamError that the work raised; StageError when an engine cannot start, or a part takes down
        one engine after another.
        """
        if not parts:
            return
        logger.info("engines: starting %d for %s", num := min(self._num_engines, len(parts)), self._model.name)
        say_if_lacking("engines", [self._gpus_per_engine] * num)
        desk = engine_desk.open_desk()
        rows = self._dataset(work, parts, desk, num).iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        )
        results = iter(rows)
        try:
            for batch in results:
                yield _done(pickle.loads(batch.column("result")[0].as_py()))
        except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
            raise StageError(
                f"the engines' run broke off: {last_line(error)}. Committed parts stand; look at Ray's log, then run "
                "the stage again"
            )
        finally:
            del rows, results  # Ray Data lets go of the engines
            if left := engine_desk.end_engines(desk):
                logger.warning("engines: processes %s have not ended, and hold their memory", left)

    def _dataset(self, work: Work, parts: Sequence[int], desk: Any, num_engines: int) -> "ray.data.Dataset":
        keep_ray_data_quiet()
        return ray.data.from_blocks([pa.table({"part": [index]}) for index in parts]).map_batches(
            EngineActor,
            fn_constructor_args=(self._start, work, desk, str(self._model)),
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=num_engines,
                max_tasks_in_flight_per_actor=PARTS_PER_ENGINE,
                max_concurrent_calls_per_actor=PARTS_PER_ENGINE,
                enable_true_multi_threading=True,
            ),
            num_cpus=1,
            num_gpus=self._gpus_per_engine if ray.cluster_resources().get("GPU", 0) > 0 else 0,
        )


class EngineActor:
    """One engine in its own process. What goes wrong on purpose is returned: what is raised, Ray would try for ever."""

    def __init__(self, start: Callable[[], Engine], work: Work, desk: Any, model: str):
        self._start, self._work, self._desk, self._model = start, work, desk, model
        self._starting, self._suspects = threading.Lock(), threading.Lock()
        self._ready: tuple[Engine, Any] | None = None
        self._refusal: SlipstreamError | None = None
        here = ray.get_runtime_context()
        ray.get(desk.greet.remote(here.current_actor, here.get_node_id(), os.getpid()))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The part's PartDone, or the SlipstreamError that ends the run, pickled."""
        index = batch.column("part")[0].as_py()
        # One of the parts that an engine died over is to blame. They are begun one at a time, so that it is found.
        with self._suspects if ray.get(self._desk.tries.remote(index)) else nullcontext():
            result = self._part(index)
        return pa.table({"result": [pickle.dumps(result)]})

    def _part(self, index: int) -> PartDone | SlipstreamError:
        tries, last = ray.get(self._desk.begin.remote(index))
        if tries > MAX_TRIES:
            return StageError(
                f"part {index} took down {MAX_TRIES} engines in a row, last with: {last}. Committed parts stand; look "
                "at the engine's log, then run the stage again"
            )
        if tries > 1:
            logger.warning("engines: an engine died over part %d (%s); try %d", index, last, tries)
        try:
            engine, begun = self._started()
            began = time.monotonic()
            done = self._work.part(engine, index, begun)
            return replace(done, tries=max(done.tries, tries), seconds=time.monotonic() - began)
        except SlipstreamError as error:
            return error
        except Exception as error:
            # The engine is in no known state: a new process takes its place and is given its parts.
            logger.exception("engines: part %d", index)
            ray.get(self._desk.fault.remote(index, last_line(error)))
            os._exit(1)

    def _started(self) -> tuple[Engine, Any]:
        """The engine, and what the work's beginning made of it. Raises: SlipstreamError, once and for all."""
        with self._starting:
            if self._refusal:
                raise self._refusal
            if self._ready is None:
                try:
                    engine = self._load()
                    self._ready = engine, self._work.begin(engine)
                except SlipstreamError as error:
                    self._refusal = error
                    raise
            return self._ready

    def _load(self) -> Engine:
        try:
            return self._start()
        except SlipstreamError:
            raise
        except Exception as error:
            logger.exception("engines: loading %s", self._model)
            raise StageError(f"an engine for {self._model} could not start: {last_line(error)}")


def _load_target(model: Path, **settings: Any) -> Engine:
    from jobs.target_engine import TargetEngine

    return TargetEngine(model, **settings)


def _done(result: PartDone | SlipstreamError) -> PartDone:
    if isinstance(result, SlipstreamError):
        raise result
    return result


def keep_ray_data_quiet() -> None:
    """No progress bars and notices of Ray Data's own: the stages log theirs."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
