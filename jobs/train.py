"""Train: HiddenStateCache + starting drafter → DrafterCheckpoint, by Ray Train.

python jobs/train.py --config slipstream.toml                         the challenger, from the champion
python jobs/train.py --config slipstream.toml --role control          the champion on general prompts
python jobs/train.py --config slipstream.toml --replay ID             also replays rows of earlier states
ray job submit --working-dir . -- python jobs/train.py --config slipstream.toml
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import unlearn
from jobs.attachments import data_behind, datasets_behind
from jobs.registry import Registry, data_tags, lineage_tags
from jobs.session import job_main
from pipeline import lease, stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet
from pipeline.config import Config
from pipeline.errors import ConfigError, Declined, FingerprintError, SchemaError
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")

# Role → the name of the cache that it learns from.
CACHES = {"challenger": "states", "control": "general-states"}


def run(
    config: Config,
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    role: str,
    responses: Artifact[ResponseSet] | None = None,
    replay: Sequence[Artifact[HiddenStateCache]] = (),
    beside: Callable[[Path], AbstractContextManager[None]] = nullcontext,
) -> Artifact[DrafterCheckpoint]:
    """The trained drafter; its parameters and curve are an MLflow run.

    ``replay`` are earlier caches that a share of the rows come from (``to_replay``). ``responses`` make it a streamed
    run (drafter/train.py); ``beside(folder)`` is entered for as long as it trains.
    """
    from drafter import train
    from jobs.train_workers import train_on_workers

    config = resolved(config, replay)

    def execute(folder: Path) -> None:
        with beside(folder):
            train_on_workers(folder, config, states, start, responses, replay)

    checkpoint = train.run(config, states, start=start, role=role, responses=responses, replay=replay, execute=execute)
    parents = checkpoint.manifest.parents
    Registry(config.promote.tracking_uri, config.root).log_training(
        f"{role}-{checkpoint.id}",
        {**checkpoint.manifest.config, "num_parameters": checkpoint.manifest.counts["parameters"]},
        checkpoint.manifest.curve,
        experiment=config.model_name,
        derivation_id=checkpoint.id,
        tags={"role": role, **lineage_tags(checkpoint), **data_tags(data_behind(config.root, parents))},
        datasets=datasets_behind(config.root, parents),
    )
    return checkpoint


def resolved(config: Config, replay: Sequence[Artifact[HiddenStateCache]]) -> Config:
    """The configuration of one run on this cluster (``drafter.train.resolved``)."""
    from drafter import train
    from jobs.train_workers import compute_of_workers

    if config.train.compute == "auto":
        settings = config.train.model_copy(update={"compute": compute_of_workers()})
        config = config.model_copy(update={"train": settings})
    return train.resolved(config, replay)


def to_replay(
    config: Config, states: Artifact[HiddenStateCache], *, role: str, named: Sequence[str] = ()
) -> list[Artifact[HiddenStateCache]]:
    """The caches that a run on these states replays rows of: the general states, and those that are named.

    ``named`` are names of current.json, or ids. A control learns from the general states anyway. General states of
    another target or other layers are left out with a warning: nobody asked for them.

    Raises: ConfigError when something is named and train.replay_share is 0; StageError or SchemaError when what is
    named isn't there.
    """
    caches = named_caches(config, named)
    if not config.train.replay_share:
        return []
    if role == "challenger" and (general := _general_states(config, states)) is not None:
        caches.insert(0, general)
    caches = list({cache.id: cache for cache in caches if cache.id != states.id}.values())
    if not caches:
        logger.info("train: nothing to replay: all rows of a step come from %s", states.id)
    return caches


def named_caches(config: Config, named: Sequence[str]) -> list[Artifact[HiddenStateCache]]:
    """The caches of these names of current.json, or ids. Raises: as ``to_replay``."""
    names = stages.current_names(config.root)
    if named and not config.train.replay_share:
        raise ConfigError(f"--replay {' '.join(named)} needs train.replay_share above 0")
    return [stages.open_artifact(config.root, HiddenStateCache, names.get(name, name)) for name in named]


def _general_states(config: Config, states: Artifact[HiddenStateCache]) -> Artifact[HiddenStateCache] | None:
    """The cache of `slipstream init-drafter`, where there is one that fits to these states."""
    if (name := stages.current_names(config.root).get("general-states")) is None:
        return None
    try:
        general = stages.open_artifact(config.root, HiddenStateCache, name)
        _require_same_target(general, states)
    except (SchemaError, FingerprintError) as error:
        logger.warning("train: the general states are not replayed: %s", error)
        return None
    return general


def _require_same_target(cache: Artifact[HiddenStateCache], states: Artifact[HiddenStateCache]) -> None:
    ours, theirs = states.manifest, cache.manifest
    if theirs.fingerprint and ours.fingerprint:
        theirs.fingerprint.require_same(ours.fingerprint, where=f"{cache.folder}, {states.folder}")
    if theirs.hidden_size != ours.hidden_size:
        raise FingerprintError(f"{cache.folder}: states of {theirs.hidden_size} channels, not {ours.hidden_size}")


def has_learned(config: Config, champion: Artifact[DrafterCheckpoint], states: Artifact[HiddenStateCache]) -> bool:
    """Whether the champion has learned from these very states, and from nothing that was erased."""
    return unlearn.clean_start(config, champion) is champion and champion.manifest.parents.get("states") == states.id


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage from the current champion and remember its result under its role."""
    role = arguments.role
    states = stages.current(config.root, CACHES[role], HiddenStateCache)
    champion = stages.current(config.root, "champion", DrafterCheckpoint)
    # Of a scheduled run; by hand, the same states may be tried with other settings.
    if role == "challenger" and lease.RUN in os.environ and has_learned(config, champion, states):
        raise Declined(f"train: the champion {champion.id} has learned from the states {states.id} already")
    start = unlearn.clean_start(config, champion)
    replay = to_replay(config, states, role=role, named=arguments.replay)
    stages.set_current(config.root, role, run(config, states, start=start, role=role, replay=replay))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained."""
    parser.add_argument("--role", choices=sorted(CACHES), default="challenger", help="what to train (challenger)")
    add_replay(parser)


def add_replay(parser: argparse.ArgumentParser) -> None:
    """What is replayed."""
    about = "also replay rows of these earlier states: an id, or a name in current.json"
    parser.add_argument("--replay", action="append", default=[], metavar="STATES", help=about)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments)
