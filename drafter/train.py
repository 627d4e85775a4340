"""Hidden states and a starting drafter → DrafterCheckpoint: from a cache, or as the states are captured (a stream)."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter import resume
from drafter.checkpoint import files_of
from drafter.mixed_feed import replayable
from drafter.precision import compute_dtype
from drafter.stream import remove_queue
from drafter.trainer import TRAINED, Caches, device_here, train_in
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet, describe_file, package_versions
from pipeline.config import Config
from pipeline.errors import FingerprintError
from pipeline.stages import Artifact, complete

logger = logging.getLogger("slipstream")

STAGE_VERSION = 2
# What a training run means; the rest of the table is how it is executed.
_EXECUTION = {
    "num_workers", "parallel", "compile", "activation_checkpointing", "tokens_per_pass", "control",
    "warm_start_tolerance",
}  # fmt: skip
# A setting's value → the setting that means nothing beside it.
_UNUSED = {"decay": "dpace_alpha", "dpace": "decay_gamma", "uniform": "uniform_share", "adamw": "muon_turns"}
# The order of a streamed run is that of its windows.
_STREAM = {"max_bytes", "states_format"}


def run(
    config: Config,
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    role: str,
    responses: Artifact[ResponseSet] | None = None,
    replay: Caches = (),
    execute: Callable[[Path], None] | None = None,
) -> Artifact[DrafterCheckpoint]:
    """The checkpoint with the best walk acceptance on the validation rows; cold where ``start`` is None.

    With ``responses`` the run is streamed: it trains on their train rows as somebody puts them into its queue, and
    ``states`` holds the others. ``replay`` are earlier caches that ``train.replay_share`` of the rows come from; one
    without a row to train on is left out.
    ``execute(folder)`` runs ``train_in`` on that folder, in as many processes as it likes; None runs it here.

    Raises: StageError when no row can be trained on, or a warm start is not what it was when it was trained;
    DivergedError, which is one, when a gradient is not finite; FingerprintError when the caches and the starting
    drafter were made for different targets.
    """
    _require_one_target(states, start, replay)
    replay = _with_rows(replay, block_size=start.manifest.block_size if start else config.drafter.block_size)
    config = resolved(config, replay, is_streamed=responses is not None)
    parents = {"states": states.id, **({"start": start.id} if start else {})}
    parents |= {f"replay_{n + 1}": cache.id for n, cache in enumerate(replay)}
    # Replies that were removed and made anew under the same id are others to learn from.
    replies = responses.manifest.content_id if responses else states.manifest.responses
    meaning = {**_settings(config), "role": role, "replies": replies}
    if any(cache.manifest.storage for cache in (states, *replay)):  # rows are mixed as far as that disk goes
        meaning["staging_bytes"] = config.capture.staging_bytes
    meaning["replayed"] = [cache.manifest.responses for cache in replay]
    if start is None:
        meaning["drafter"] = config.drafter.model_dump(mode="json")
    else:  # nor is a starting drafter that was trained anew under the same id the same
        meaning["start"] = {shard.path: shard.sha256 for shard in start.manifest.shards}
    stream = {}
    if responses is not None:
        parents["responses"] = responses.id
        stream = {"stream": config.capture.model_dump(mode="json", include=_STREAM)}

    def build(folder: Path, derivation: str) -> DrafterCheckpoint:
        if not (folder / TRAINED).exists():
            (execute or (lambda folder: train_in(folder, config, states, start, responses, replay)))(folder)
        trained = json.loads((folder / TRAINED).read_text())
        resume.remove(folder)
        remove_queue(config, folder)
        return DrafterCheckpoint(
            derivation_id=derivation,
            parents=parents,
            fingerprint=states.manifest.fingerprint,
            shards=tuple(describe_file(folder / name) for name in files_of(folder)),
            config=config.train.model_dump(mode="json") | stream,
            versions=package_versions(),
            role=role,
            **trained,
        )

    return complete(
        config.root,
        DrafterCheckpoint,
        stage="train",
        version=STAGE_VERSION,
        parents=parents,
        meaning=meaning | stream,
        build=build,
    )


def resolved(config: Config, replay: Caches, *, is_streamed: bool = False) -> Config:
    """The configuration of one run: what it computes in (auto: on this device), no share of replay without a cache.

    The anchors of streamed rows are always uniform; on-policy ones are those of replayed rows alone.
    """
    settings = config.train
    dtype = compute_dtype(settings.compute, device_here())
    update = {"compute": str(dtype).removeprefix("torch."), "replay_share": settings.replay_share if replay else 0.0}
    if is_streamed and not replay:
        update["anchors"] = "uniform"
    return config.model_copy(update={"train": settings.model_copy(update=update)})


def _settings(config: Config) -> dict[str, Any]:
    """Those of [train] that change what comes out."""
    settings = config.train
    unused = {_UNUSED.get(value) for value in (settings.loss, settings.anchors, settings.optimizer)} - {None}
    return settings.model_dump(mode="json", exclude=_EXECUTION | unused)


def _with_rows(replay: Caches, *, block_size: int) -> Caches:
    """The caches that can be replayed; warns of the others."""
    kept = replayable(replay, block_size=block_size)
    for cache in replay:
        if cache not in kept:
            logger.warning(
                "train: not replayed: %s holds no train row with room for a block of %d", cache.folder, block_size
            )
    return kept


def _require_one_target(
    states: Artifact[HiddenStateCache], start: Artifact[DrafterCheckpoint] | None, replay: Caches
) -> None:
    hidden_size = states.manifest.hidden_size
    for cache in replay:
        if cache.manifest.hidden_size != hidden_size:
            raise FingerprintError(
                f"{cache.folder}: states of {cache.manifest.hidden_size} channels, and those of {states.folder} have "
                f"{hidden_size}: they are of another target and cannot be replayed"
            )
    if (fingerprint := states.manifest.fingerprint) is None:
        return
    for other in ([start] if start else []) + list(replay):
        if other.manifest.fingerprint:
            other.manifest.fingerprint.require_same(fingerprint, where=f"{other.folder}, {states.folder}")
