"""The producing side of a stream: engines fill the queue of states while somebody trains from it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pipeline.engines import Engine, Engines, PartDone, Work
from pipeline.errors import SlipstreamError, StageError
from pipeline.heartbeat import Heartbeat
from pipeline.progress import Progress
from pipeline.state_queue import StateQueue

logger = logging.getLogger("slipstream")

# An engine ends the part that it is at before it stops.
STOP_S = 300.0


@dataclass(frozen=True)
class QueueWork:
    """Work whose parts go into a queue, each as soon as there is room for it.

    A part that it is asked for is a turn: what is done in it is the earliest part that nobody is at, so that what a
    dead engine left undone comes before anything that the trainer needs later.
    """

    work: Work
    """Commits its parts in the queue's folder."""
    queue: StateQueue

    def begin(self, engine: Engine) -> Any:
        """As the work begins."""
        return self.work.begin(engine)

    def part(self, engine: Engine, index: int, begun: Any) -> PartDone:
        """The turn ``index``, once there is room; with no rows where nothing is left to do."""
        with self.queue.admitted() as admitted:
            if admitted is None:
                return PartDone(index, 0, 0)
            done = self.work.part(engine, admitted.index, begun)
        return replace(done, index=index, tries=admitted.tries)


@contextmanager
def producing(queue: StateQueue, work: Work, engines: Engines, *, total_rows: int, covered: int = 0) -> Iterator[None]:
    """Engines fill the queue for as long as the block runs, which trains from it.

    ``covered`` parts from the front are in a checkpoint already. When either side fails the other one stops.

    Raises: what the engines failed with, instead of what the block made of it.
    """
    queue.recover()
    queue.release(covered)
    failures: list[Exception] = []
    with Heartbeat(queue.heartbeat) as heartbeat:

        def produce() -> None:
            try:
                _fill(queue, work, engines, heartbeat, total_rows)
            except Exception as error:
                if heartbeat.ended:
                    logger.warning("produce: the engines failed when training had ended: %s", error)
                failures.append(error)
                heartbeat.end(f"the engines failed: {error}")

        thread = threading.Thread(target=produce, name="produce", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if failures:
                raise _own(failures[0]) from error
            raise
        finally:
            heartbeat.end("training has ended")
            thread.join(STOP_S)
            if thread.is_alive():
                logger.warning("produce: the engines have not stopped within %.0f s; going on without them", STOP_S)


def _fill(queue: StateQueue, work: Work, engines: Engines, heartbeat: Heartbeat, total_rows: int) -> None:
    todo = queue.missing()
    progress = Progress("produce", total_rows=total_rows)
    with closing(engines.run(QueueWork(work, queue), todo)) as parts:
        for done in parts:
            if heartbeat.ended:
                return
            if done.rows:
                progress.add(rows=done.rows, tokens=done.tokens)
    if (missing := queue.missing()) and not heartbeat.ended:
        raise StageError(f"{queue.folder}: the engines ended without parts {missing}; run the stage again")


def _own(error: Exception) -> SlipstreamError:
    return error if isinstance(error, SlipstreamError) else StageError(f"produce: {type(error).__name__}: {error}")
