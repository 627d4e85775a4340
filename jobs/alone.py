"""Work that needs the machine to itself: in one Ray task, where its engine and its tensors live and die."""

import os
from collections.abc import Callable
from typing import Any

import ray

from jobs.session import start_logging
from pipeline.errors import SlipstreamError, StageError


def run_alone(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``work(*arguments)`` on a machine of the cluster, with a GPU where there are any.

    Raises: the work's own SlipstreamError; StageError for anything else.
    """
    gpus = 1 if ray.cluster_resources().get("GPU", 0) > 0 else 0
    try:
        return ray.get(_alone.options(num_gpus=gpus).remote(work, arguments, os.environ.get("OMP_NUM_THREADS")))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SlipstreamError):
            raise error.cause
        raise StageError(f"{stage}: {type(error.cause).__name__}: {error.cause}")


@ray.remote(num_cpus=1, max_retries=0)
def _alone(work: Callable[..., Any], arguments: tuple[Any, ...], num_threads: str | None) -> Any:
    """Run with the threads that were asked for, or all: Ray gives a worker one for each CPU it reserved."""
    import torch

    num_threads = num_threads or str(len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = num_threads
    torch.set_num_threads(int(num_threads))
    start_logging()
    return work(*arguments)
