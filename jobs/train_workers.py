"""A training run as Ray Train workers, one or many, each with its threads or its GPU; a lost one starts them anew."""

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.session import start_logging
from pipeline.config import Config
from pipeline.errors import SlipstreamError, StageError
from pipeline.shards import VISIBLE_WITHIN_S


def train_on_workers(
    folder: Path, config: Config, *inputs: Any, work: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Run ``drafter.train.train_in(folder, config, *inputs)`` on train.num_workers Ray Train workers.

    When a worker is lost, all start again from the folder's last checkpoint; so they all must see the folder.
    ``work`` takes the place of what a worker does.

    Raises: the SlipstreamError that a worker raised, at once; StageError when workers are lost for the third time.
    """
    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    marker = folder / f".workers-{uuid.uuid4().hex}"
    trainer = TorchTrainer(
        work or _work,
        train_loop_config={"arguments": (folder, config, *inputs), "marker": marker},
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=config.train.num_workers, use_gpu=has_gpu),
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(config.root / "ray_train"),
            failure_config=FailureConfig(max_failures=2),
            callbacks=[_OwnErrorsEnd()],
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        trainer.fit()
    except Exception as error:
        raise own_error(error) or StageError(
            f"train: the workers failed: {(str(error).strip() or repr(error)).splitlines()[-1]}"
        ) from error
    finally:
        marker.unlink(missing_ok=True)


def compute_of_workers() -> Literal["float32", "bfloat16"]:
    """What train.compute = "auto" means on this cluster, whichever machine asks: it is part of what a run is.

    bfloat16 on GPUs; on CPUs where every machine that could train multiplies it fast.
    """
    if ray.cluster_resources().get("GPU", 0) > 0:
        return "bfloat16"
    from drafter.precision import has_fast_bfloat16

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    ask = ray.remote(num_cpus=0)(has_fast_bfloat16)
    there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    answers = ray.get([ask.options(scheduling_strategy=node).remote() for node in there])
    return "bfloat16" if answers and all(answers) else "float32"


class _OwnErrorsEnd(UserCallback):
    """Lets a worker's SlipstreamError end the run, which would meet it again in every try."""

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, BaseException]) -> None:
        """Raise it in Ray Train's controller, whose own errors are not tried again."""
        for error in worker_exceptions.values():
            if own := own_error(error):
                raise own


def _work(settings: dict[str, Any]) -> None:
    import torch

    from drafter.precision import compute_dtype, flush_denormals, require_multiplied
    from drafter.train import train_in
    from drafter.trainer import device_here

    flush_denormals()
    start_logging()
    require_visible(settings["marker"])
    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())
    else:
        # Ray gives a worker one thread for each CPU it reserved: on a machine of its own it may use them all.
        num_local = ray.train.get_context().get_local_world_size()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local))
    device, config = device_here(), settings["arguments"][1]
    require_multiplied(compute_dtype(config.train.compute, device), device)
    train_in(*settings["arguments"])


def require_visible(marker: Path, *, within_s: float = VISIBLE_WITHIN_S) -> None:
    """Raises: StageError when this worker does not see what the run's driver has put into the run's folder."""
    deadline = time.monotonic() + within_s
    while not marker.exists():
        if time.monotonic() > deadline:
            raise StageError(
                f"{marker.parent}: node {socket.gethostname()} does not see the run's folder; workers read states and "
                "the last checkpoint under root, so put root on storage that every node mounts at the same path"
            )
        time.sleep(0.2)


def own_error(error: BaseException) -> SlipstreamError | None:
    """The SlipstreamError inside what Ray Train raises."""
    seen: list[BaseException] = [error]
    while seen:
        inner = seen.pop()
        if isinstance(inner, SlipstreamError):
            return inner
        seen += list(getattr(inner, "worker_failures", {}).values())
        causes = (inner.__cause__, getattr(inner, "cause", None), getattr(inner, "controller_failure", None))
        seen += [cause for cause in causes if isinstance(cause, BaseException)]
    return None
