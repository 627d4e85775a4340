"""Parts of a stage on Ray Data: a row is a part's number, what comes back is small. Dead workers' parts come again."""

import gc
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data

from jobs.engines import keep_ray_data_quiet, last_line
from jobs.session import start_logging
from pipeline.errors import SlipstreamError, StageError

logger = logging.getLogger("slipstream")


class Tasks:
    """Implements pipeline.workers.Workers: as many tasks at a time as the cluster has CPUs."""

    def run(self, do: Callable[[int], Any], parts: Sequence[int]) -> Iterator[Any]:
        """What ``do`` returned for each part, as they are done.

        Raises: the SlipstreamError that ``do`` raised; StageError when Ray gives up.
        """
        if not parts:
            return
        keep_ray_data_quiet()
        blocks = [pa.table({"part": [index]}) for index in parts]
        done = ray.data.from_blocks(blocks).map_batches(
            partial(_part, do), batch_size=1, batch_format="pyarrow", concurrency=_at_a_time(len(parts))
        )
        try:
            for batch in done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for pickled in batch.column("result").to_pylist():
                    result = pickle.loads(pickled)
                    if isinstance(result, SlipstreamError):
                        raise result
                    yield result
        except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
            raise StageError(
                f"the run broke off: {last_line(error)}. Committed parts stand; look at Ray's log, then run the stage "
                "again"
            )


def _part(do: Callable[[int], Any], batch: pa.Table) -> pa.Table:
    """What came of a part, pickled. An error is returned: what is raised, Ray would try for ever."""
    start_logging()
    index = batch.column("part")[0].as_py()
    try:
        result = do(index)
    except SlipstreamError as error:
        result = error
    except Exception as error:  # its message may quote what people wrote
        frame = traceback.extract_tb(error.__traceback__)[-1]
        result = StageError(f"part {index}: {type(error).__name__} at {frame.filename}:{frame.lineno}")
    gc.collect()
    pa.default_memory_pool().release_unused()  # a worker that waits for its next part holds no more than it needs
    return pa.table({"result": [pickle.dumps(result)]})


def _at_a_time(num_parts: int) -> int:
    return max(1, min(num_parts, int(ray.cluster_resources().get("CPU", 1))))
