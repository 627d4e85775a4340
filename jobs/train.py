"""Train: HiddenStateCache + starting drafter → DrafterCheckpoint, by Ray Train.

python jobs/train.py --config slipstream.toml                         the challenger, from the champion
python jobs/train.py --config slipstream.toml --role control          the champion on general prompts
ray job submit --working-dir . -- python jobs/train.py --config slipstream.toml
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.registry import Registry
from jobs.session import job_main, start_logging
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet
from pipeline.config import Config
from pipeline.errors import SlipstreamError, StageError
from pipeline.stages import Artifact

# Role → the name of the cache that it learns from.
CACHES = {"challenger": "states", "control": "general-states"}


def run(
    config: Config,
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    role: str,
    responses: Artifact[ResponseSet] | None = None,
    beside: Callable[[Path], AbstractContextManager[None]] = nullcontext,
) -> Artifact[DrafterCheckpoint]:
    """The trained drafter; its parameters and curve are an MLflow run.

    ``responses`` make it a streamed run (drafter/train.py); ``beside(folder)`` is entered for as long as it trains.
    """
    from drafter import train

    def execute(folder: Path) -> None:
        with beside(folder):
            _on_workers(folder, config, states, start, responses)

    checkpoint = train.run(config, states, start=start, role=role, responses=responses, execute=execute)
    Registry(config.promote.tracking_uri, config.root).log_training(
        f"{role}-{checkpoint.id}",
        config.train.model_dump(mode="json"),
        checkpoint.manifest.curve,
        experiment=config.model_name,
        derivation_id=checkpoint.id,
        tags={"role": role, "states": states.id},
    )
    return checkpoint


def _on_workers(folder: Path, config: Config, *inputs: Artifact[Any] | None) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    trainer = TorchTrainer(
        _work,
        train_loop_config={"arguments": (folder, config, *inputs)},
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=config.train.num_workers, use_gpu=has_gpu),
        # A lost worker starts again from the folder's own last checkpoint.
        run_config=RunConfig(
            name=folder.name, storage_path=str(config.root / "ray_train"), failure_config=FailureConfig(max_failures=2)
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        raise _own_error(error) from error


def _work(settings: dict[str, Any]) -> None:
    import ray.train
    import torch

    from drafter.train import train_in

    start_logging()
    # Ray gives a worker one thread for each CPU it reserved: on a machine of its own it may use them all.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ray.train.get_context().get_local_world_size()))
    train_in(*settings["arguments"])


def _own_error(error: BaseException) -> SlipstreamError:
    """The SlipstreamError inside what Ray Train raises, or one that carries its last line."""
    seen: list[BaseException] = [error]
    while seen:
        inner = seen.pop()
        if isinstance(inner, SlipstreamError):
            return inner
        seen += list(getattr(inner, "worker_failures", {}).values())
        seen += [e for e in (inner.__cause__, getattr(inner, "cause", None)) if isinstance(e, BaseException)]
    return StageError(f"train: the workers failed: {str(error).strip().splitlines()[-1]}")


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage from the current champion and remember its result under its role."""
    states = stages.current(config.root, CACHES[arguments.role], HiddenStateCache)
    champion = stages.current(config.root, "champion", DrafterCheckpoint)
    stages.set_current(config.root, arguments.role, run(config, states, start=champion, role=arguments.role))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained."""
    parser.add_argument("--role", choices=sorted(CACHES), default="challenger", help="what to train (challenger)")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments)
