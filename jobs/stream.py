"""Stream: capture and train at the same time, for a corpus whose states do not fit on the disk.

python jobs/stream.py --config slipstream.toml --set capture.max_bytes=100000000000
ray job submit --working-dir . -- python jobs/stream.py --config slipstream.toml --set capture.max_bytes=100000000000

The states of the held-out rows are cached as ever. Those of the train rows go through a queue on disk, from the engines
to the trainer, each row once; drafter/stream.py says what such a run cannot do.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import train, unlearn
from jobs.capture import layers_to_capture
from jobs.engines import EnginePool
from jobs.resources import say_if_lacking
from jobs.session import job_main
from pipeline import capture, stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet
from pipeline.config import Config
from pipeline.engines import Engines
from pipeline.stages import Artifact

HELD_OUT = ("validation", "gate")


def run(
    config: Config,
    responses: Artifact[ResponseSet],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    target_layer_ids: Sequence[int],
    role: str = "challenger",
    replay: Sequence[str] = (),
    engines: Engines | None = None,
) -> tuple[Artifact[HiddenStateCache], Artifact[DrafterCheckpoint]]:
    """The cache of the held-out rows, and the drafter that was trained on the others as they were captured.

    ``replay`` names caches that rows are replayed of, beside the general states. Engines that are handed over must have
    been made for these layers.

    Raises: ConfigError without capture.max_bytes; StageError with what ended the engines, where they end the run; at
    once, as ``train.to_replay``, where what is named isn't there.
    """
    named = train.named_caches(config, replay)
    engines = engines or EnginePool(config, target_layer_ids=target_layer_ids)
    held = [stages.hold_for_reading(cache.folder) for cache in named]  # else capture may remove them to make room
    try:
        states = held_out(config, responses, target_layer_ids=target_layer_ids, engines=engines)
        caches = train.to_replay(config, states, role=role, named=[cache.id for cache in named])
        trained = train_on(config, responses, states, start=start, role=role, replay=caches, engines=engines)
    finally:
        for file in filter(None, held):
            file.close()
    return states, trained


def held_out(
    config: Config, responses: Artifact[ResponseSet], *, target_layer_ids: Sequence[int], engines: Engines
) -> Artifact[HiddenStateCache]:
    """The states of the rows that are never trained on."""
    return capture.run(config, responses, engines=engines, target_layer_ids=target_layer_ids, splits=HELD_OUT)


def train_on(
    config: Config,
    responses: Artifact[ResponseSet],
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    role: str,
    engines: Engines,
    replay: Sequence[Artifact[HiddenStateCache]] = (),
) -> Artifact[DrafterCheckpoint]:
    """The drafter that was trained on the train rows as they were captured; ``states`` are those of the others."""
    from drafter import stream

    config = train.resolved(config, replay)

    def beside(folder: Path) -> AbstractContextManager[None]:
        settings = config.regenerate
        at_once = [*[settings.tensor_parallel_size] * settings.num_engines, *[1] * config.train.num_workers]
        say_if_lacking("stream: engines and trainers", at_once)
        return stream.fed(folder, config, states, start, responses, replay, engines=engines)

    return train.run(
        config,
        states,
        start=start,
        role=role,
        responses=responses,
        replay=replay,
        beside=beside,
    )


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage from the current champion; remember the held-out states and the challenger."""
    responses = stages.current(config.root, "responses", ResponseSet)
    start = unlearn.clean_start(config, stages.current(config.root, "champion", DrafterCheckpoint))
    layers = layers_to_capture(config)
    states, challenger = run(config, responses, start=start, target_layer_ids=layers, replay=arguments.replay)
    stages.set_current(config.root, "states", states)
    stages.set_current(config.root, "challenger", challenger)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is replayed."""
    train.add_replay(parser)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments)
