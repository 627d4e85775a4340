"""One training run in its folder: what it is fed with, what it begins with, and the files that it ends with."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drafter import resume
from drafter.anchors import num_legal_anchors
from drafter.checkpoint import Kept, load_drafter, save_drafter
from drafter.dataset import CachedRow, read_rows
from drafter.feed import CachedFeed, Feed, rows_per_step
from drafter.frozen import FrozenTarget, read_frozen
from drafter.loop import train_loop
from drafter.measurement import Validation, Walks
from drafter.mixed_feed import MixedFeed, replayable
from drafter.model import Drafter
from drafter.precision import compute_dtype
from drafter.processes import agreed, meet, rank_and_world
from drafter.shape import DrafterShape
from drafter.start import starting_drafter
from drafter.start_check import doubt_of, recorded_walk_check, walk_again
from drafter.stream import StreamFeed, queue_of
from drafter.stream_plan import plan_stream
from drafter.walk import WalkCounts, walk
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet, write_durably
from pipeline.config import Config, TrainConfig
from pipeline.errors import StageError
from pipeline.shards import REJECTS
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")

TRAINED = "trained.json"
# Of accepted drafts a step: what rounding the best weights to bf16 may change, and what a few near-ties may.
_EXPORT_TOLERANCE, _EXPORT_DRAFTS = 0.1, 5

Caches = Sequence[Artifact[HiddenStateCache]]


def train_in(
    folder: Path,
    config: Config,
    states: Artifact[HiddenStateCache],
    start: Artifact[DrafterCheckpoint] | None,
    responses: Artifact[ResponseSet] | None = None,
    replay: Caches = (),
) -> None:
    """Train in a folder, going on from what an interrupted try left there; the drafter ends up beside trained.json.

    ``config`` is ``resolved``. Raises: as ``run``.
    """
    device, settings = device_here(), config.train
    frozen = _on(device, read_frozen(config.target.model, dtype=compute_dtype(settings.compute, device)))
    drafter, kept = starting_drafter(config, frozen, states, start.folder if start else None)
    drafter = drafter.to(device)
    replay = replayable(replay, block_size=drafter.shape.block_size)
    feed, num_short = _feed(folder, config, states, responses, replay, block_size=drafter.shape.block_size)
    validation = _validation(config, states, replay)
    check_start: Callable[[Walks], None] = lambda walks: None  # noqa: E731 - a cold start has nothing to compare with
    if start is not None and not agreed(resume.saved_step(folder)):
        check_start = _start_check(config, states, start, drafter, frozen, validation)
    _warn(settings)
    progress = train_loop(drafter, frozen, feed, validation, settings, folder, check_start=check_start)
    if rank_and_world()[0] == 0:
        walked = _export(folder, kept, drafter.shape, progress, frozen, validation, states.id)
        num_rows, rejects = feed.outcome(progress.step)
        trained = {
            "block_size": drafter.shape.block_size,
            "mask_token_id": drafter.shape.mask_token_id,
            "walk": progress.best,
            "walks": {name: counts | {"compute": settings.compute} for name, counts in walked.items()},
            "curve": progress.curve,
            "counts": {
                "train_rows": num_rows,
                "validation_rows": len(validation.own),
                "steps": progress.step,
                "empty_steps": progress.num_empty,
                "too_short": num_short,
                "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
            },
            "rejects": dict(Counter(str(reject["reason"]) for reject in rejects)),
        }
        _write(folder, trained, rejects)
    meet()


def _start_check(
    config: Config,
    states: Artifact[HiddenStateCache],
    start: Artifact[DrafterCheckpoint],
    drafter: Drafter,
    frozen: FrozenTarget,
    validation: Validation,
) -> Callable[[Walks], None]:
    """What stops a run whose starting drafter is not what it was when it was measured."""
    where, recorded = f"drafter {start.id} ({start.folder})", start.manifest.walks

    def walk_over(rows: Sequence[CachedRow]) -> WalkCounts:
        whole = load_drafter(start.folder)[0].to(frozen.head.device)  # the run's own may be sharded by now
        return walk(whole, frozen, rows)[0]

    def elsewhere() -> dict[str, WalkCounts]:
        # By the first process alone: the others may not see the same caches, or fail where it doesn't.
        return agreed(walk_again(config, recorded, walk_over) if rank_and_world()[0] == 0 else {})

    doubt = agreed(doubt_of(drafter, frozen, validation.own, config.train, where=where))
    return recorded_walk_check(recorded, states.id, config.train, where=where, doubt=doubt, elsewhere=elsewhere)


def _warn(settings: TrainConfig) -> None:
    """Say where workers have nothing to do."""
    rank, world = rank_and_world()
    if rank == 0 and world > (num_rows := rows_per_step(settings)):
        logger.warning(
            "train: %d workers share %d rows a step, so some never have one: raise train.blocks_per_step to %d or more",
            world, num_rows, world * settings.anchors_per_row,
        )  # fmt: skip


def _write(folder: Path, trained: Mapping[str, Any], rejects: Sequence[Mapping[str, Any]]) -> None:
    """The records of rejected rows, and last what the manifest is made from."""
    if rejects:
        lines = "".join(json.dumps(reject, sort_keys=True) + "\n" for reject in rejects)
        write_durably(folder / REJECTS, lines.encode())
    write_durably(folder / TRAINED, json.dumps(trained).encode())


def trainable_rows(rows: Sequence[CachedRow], block_size: int) -> list[CachedRow]:
    """The rows that have at least one legal anchor; logs how many do not."""
    usable = [row for row in rows if num_legal_anchors(row.num_tokens - row.num_prompt_tokens, block_size) > 0]
    if len(usable) < len(rows):
        logger.info("train: %d of %d rows are too short for a block, left out", len(rows) - len(usable), len(rows))
    return usable


def _feed(
    folder: Path,
    config: Config,
    states: Artifact[HiddenStateCache],
    responses: Artifact[ResponseSet] | None,
    replay: Caches,
    *,
    block_size: int,
) -> tuple[Feed, int]:
    """The run's feed, and how many of its own rows are too short for a block."""
    num_short, settings = 0, config.train
    caches = {cache.id: _train_rows(cache, config, block_size)[0] for cache in replay}
    if responses is not None:
        share = settings.replay_share if caches else 0.0
        plan = plan_stream(config, responses, states, block_size=block_size, replay_share=share)
        num_short = plan.num_short
        own: Feed = StreamFeed(config, plan, queue_of(config, folder, plan), responses, block_size=block_size)
        if settings.anchors == "on_policy":
            logger.info("train: no row of a stream is seen again, so its anchors are drawn uniformly")
    else:
        rows, num_short = _train_rows(states, config, block_size)
        own = CachedFeed(rows, settings, block_size=block_size, leaves_room=bool(caches))
    if not caches:
        return own, num_short
    logger.info(
        "train: %.0f%% of each step's rows are replayed, from %s",
        100 * settings.replay_share,
        ", ".join(f"{len(rows)} rows of {name}" for name, rows in caches.items()),
    )
    return MixedFeed(own, list(caches.values()), settings, block_size=block_size), num_short


def _train_rows(states: Artifact[HiddenStateCache], config: Config, block_size: int) -> tuple[list[CachedRow], int]:
    if "train" not in states.manifest.splits:
        raise StageError(
            f"{states.folder}: holds the states of {', '.join(states.manifest.splits)} rows alone, as a streamed run "
            "leaves them; train on their responses with slipstream stream, or run slipstream capture first"
        )
    rows = read_rows(states, "train", staging_bytes=config.capture.staging_bytes)
    usable = trainable_rows(rows, block_size)
    if not usable:
        raise StageError(
            f"{states.folder}: no train row has room for a block of {block_size} in its reply; collect more traffic "
            "or use a smaller drafter.block_size"
        )
    return usable, len(rows) - len(usable)


def _validation(config: Config, states: Artifact[HiddenStateCache], replay: Caches) -> Validation:
    """The first ``train.walk_rows`` validation rows of each cache, in stored order."""

    def rows_of(cache: Artifact[HiddenStateCache]) -> list[CachedRow]:
        rows = read_rows(cache, "validation", staging_bytes=config.capture.staging_bytes)
        return rows[: config.train.walk_rows]

    own = rows_of(states)
    if not own:
        raise StageError(f"{states.folder}: no validation rows; raise collect.validation_share or collect more traffic")
    return Validation(own, {cache.id: rows for cache in replay if (rows := rows_of(cache))})


def _export(
    folder: Path,
    kept: Kept | None,
    shape: DrafterShape,
    progress: resume.Progress,
    frozen: FrozenTarget,
    validation: Validation,
    own: str,
) -> dict[str, dict[str, Any]]:
    """Write the best weights as a drafter's files; cache id → the walk of what is on disk then.

    Raises: StageError when that is not the drafter that was measured.
    """
    best = Drafter(shape)
    resume.load_best(folder, best, progress)
    save_drafter(folder, best, kept)
    exported = load_drafter(folder)[0].to(frozen.head.device)
    walks = validation.walk(exported, frozen)
    measured, found = progress.best, walks.own
    before = measured["num_accepted_tokens"] / max(1, measured["num_drafts"])
    now = found.num_accepted_tokens / max(1, found.num_drafts)
    if abs(now - before) > _EXPORT_TOLERANCE * before + _EXPORT_DRAFTS / max(1, found.num_drafts):
        raise StageError(
            f"{folder}: as it is on disk the drafter has {now:.4f} accepted drafts a step on validation, and the "
            f"weights of step {measured['step']} that were written have {before:.4f}; report this, and don't serve it"
        )
    return {own: found.as_dict(), **{name: counts.as_dict() for name, counts in walks.replayed.items()}}


def device_here() -> torch.device:
    """What this process trains on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _on(device: torch.device, frozen: FrozenTarget) -> FrozenTarget:
    embedding = frozen.embedding.to(device)
    head = embedding if frozen.head is frozen.embedding else frozen.head.to(device)
    return replace(frozen, embedding=embedding, head=head, final_norm=frozen.final_norm.to(device))
