"""HiddenStateCache and a starting drafter → DrafterCheckpoint."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drafter.anchors import legal_anchors
from drafter.checkpoint import CONFIG, WEIGHTS, cold_start, load_drafter, save_drafter
from drafter.dataset import CachedRow, collate, read_rows
from drafter.frozen import FrozenTarget, read_frozen
from drafter.loss import SlotWeights, block_loss, decay_weights, dpace_weights
from drafter.model import Drafter
from drafter.optim import Optimizer, learning_rate_scale
from drafter.order import Order
from drafter.shape import cold_shape, read_target_shape
from drafter.vocabulary import Candidates, Vocabulary
from drafter.walk import walk
from pipeline.artifacts import (
    DrafterCheckpoint,
    HiddenStateCache,
    describe_file,
    package_versions,
    publish,
    write_durably,
)
from pipeline.config import Config, TrainConfig
from pipeline.errors import ConfigError, FingerprintError, StageError
from pipeline.shards import fsync_file
from pipeline.stages import Artifact, complete

logger = logging.getLogger("slipstream")

STAGE_VERSION = 1
# What a training run means; the rest of the table is how it is executed.
_EXECUTION = {"num_workers", "control"}
_RESUME = "resume.pt"
_BEST = "best.pt"
_TRAINED = "trained.json"


@dataclass
class Progress:
    """What a resumed run goes on from, besides weights and optimiser."""

    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    """Walk of the best step so far: its counts, and "step"."""


def run(
    config: Config,
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    role: str,
    execute: Callable[[Path], None] | None = None,
) -> Artifact[DrafterCheckpoint]:
    """The checkpoint with the best walk acceptance on the validation rows; cold where ``start`` is None.

    ``execute(folder)`` runs ``train_in`` on that folder, in as many processes as it likes; None runs it here.

    Raises: StageError when no row can be trained on, or a gradient is not finite; FingerprintError when the
    cache and the starting drafter were made for different targets.
    """
    if start is not None and start.manifest.fingerprint and states.manifest.fingerprint:
        start.manifest.fingerprint.require_same(states.manifest.fingerprint, where=f"{start.folder}, {states.folder}")
    parents = {"states": states.id, **({"start": start.id} if start else {})}
    meaning = {**config.train.model_dump(mode="json", exclude=_EXECUTION), "role": role}
    if start is None:
        meaning["drafter"] = config.drafter.model_dump(mode="json")

    def build(folder: Path, derivation: str) -> DrafterCheckpoint:
        if not (folder / _TRAINED).exists():
            (execute or (lambda folder: train_in(folder, config, states, start)))(folder)
        trained = json.loads((folder / _TRAINED).read_text())
        for name in (_BEST, _RESUME):
            (folder / name).unlink(missing_ok=True)
        return DrafterCheckpoint(
            derivation_id=derivation,
            parents=parents,
            fingerprint=states.manifest.fingerprint,
            shards=tuple(describe_file(folder / name) for name in (CONFIG, WEIGHTS)),
            config=config.train.model_dump(mode="json"),
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
        meaning=meaning,
        build=build,
    )


def train_in(
    folder: Path,
    config: Config,
    states: Artifact[HiddenStateCache],
    start: Artifact[DrafterCheckpoint] | None,
) -> None:
    """Train in a folder, going on from what an interrupted try left there; the drafter ends up beside trained.json."""
    frozen = read_frozen(config.target.model)
    drafter, raw = load_drafter(start.folder) if start else (new_drafter(config, frozen), None)
    layer_ids = states.manifest.fingerprint.target_layer_ids if states.manifest.fingerprint else ()
    if layer_ids != drafter.shape.target_layer_ids:
        raise FingerprintError(
            f"{states.folder}: captured layers {list(layer_ids)}, the drafter reads "
            f"{list(drafter.shape.target_layer_ids)}; capture again with the drafter's layers"
        )
    rows = trainable_rows(read_rows(states, "train"), drafter.shape.block_size)
    if not rows:
        raise StageError(
            f"{states.folder}: no train row has room for a block of {drafter.shape.block_size} in its reply; "
            "collect more traffic or use a smaller drafter.block_size"
        )
    validation = read_rows(states, "validation")[: config.train.walk_rows]
    if not validation:
        raise StageError(f"{states.folder}: no validation rows; raise collect.validation_share or collect more traffic")
    progress = train_loop(drafter, frozen, rows, validation, config.train, folder)
    if rank_and_world()[0] == 0:
        drafter.load_state_dict(torch.load(folder / _BEST, weights_only=True))
        save_drafter(folder, drafter, raw)
        trained = {
            "block_size": drafter.shape.block_size,
            "mask_token_id": drafter.shape.mask_token_id,
            "walk": progress.best,
            "curve": progress.curve,
            "counts": {"train_rows": len(rows), "validation_rows": len(validation), "steps": progress.step},
        }
        write_durably(folder / _TRAINED, json.dumps(trained).encode())


def rank_and_world() -> tuple[int, int]:
    """This process's place among those that train together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def new_drafter(config: Config, frozen: FrozenTarget) -> Drafter:
    """A cold-started drafter of the configured shape. Raises: ConfigError when no mask token is known."""
    shape = cold_shape(
        read_target_shape(config.target.model),
        num_layers=config.drafter.num_layers,
        block_size=config.drafter.block_size,
        mask_token_id=resolve_mask_token(config),
        target_layer_ids=config.drafter.target_layer_ids,
        intermediate_size=config.drafter.intermediate_size,
    )
    return cold_start(shape, frozen, seed=config.train.seed)


def resolve_mask_token(config: Config) -> int:
    """The mask token id of a new drafter: the configured one, else the tokenizer's own mask token.

    Padding is never taken for it: pad is often the end-of-text token, which must keep its meaning.

    Raises: ConfigError that says how to set it.
    """
    if config.drafter.mask_token_id is not None:
        logger.info("mask token %d from drafter.mask_token_id", config.drafter.mask_token_id)
        return config.drafter.mask_token_id
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.target.model)
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            f"{config.target.model}: the tokenizer has no mask token; set drafter.mask_token_id to a token that never "
            f"occurs in text, for instance a reserved special token (there are {len(tokenizer)} tokens)"
        )
    logger.info("mask token %d from the tokenizer", tokenizer.mask_token_id)
    return tokenizer.mask_token_id


def trainable_rows(rows: Sequence[CachedRow], block_size: int) -> list[CachedRow]:
    """The rows that have at least one legal anchor; logs how many do not."""
    usable = [
        row for row in rows if len(legal_anchors(torch.arange(row.num_tokens) >= row.num_prompt_tokens, block_size)) > 0
    ]
    if len(usable) < len(rows):
        logger.info("train: %d of %d rows are too short for a block, left out", len(rows) - len(usable), len(rows))
    return usable


def train_loop(
    drafter: Drafter,
    frozen: FrozenTarget,
    rows: Sequence[CachedRow],
    validation: Sequence[CachedRow],
    config: TrainConfig,
    folder: Path,
) -> Progress:
    """Train to ``config.steps``, from ``folder``'s last checkpoint where there is one; best.pt holds the best step.

    Under torch.distributed each process takes its share of every step's rows; all see the same step count,
    since a process without a block still adds its zero gradient.
    """
    rank, world = rank_and_world()
    order = Order(len(rows), max(1, config.blocks_per_step // config.anchors_per_row), config.seed)
    optimizer = Optimizer(drafter.named_parameters(), kind=config.optimizer, learning_rate=config.learning_rate)
    slot_weights = slot_weights_of(config, drafter.shape.block_size)
    vocabulary = Vocabulary(
        frozen.head,
        num_sampled=config.sampled_vocabulary,
        occurring=(row.ids[row.num_prompt_tokens :] for row in rows),
        seed=config.seed,
    )
    progress = _resume(folder, drafter, optimizer)
    if progress.best is None:
        _measure(progress, drafter, frozen, validation, folder, rank, {"step": 0.0})
    started, first_step = time.monotonic(), progress.step
    while progress.step < config.steps:
        picks = order.rows_of(progress.step)
        anchors = order.anchors_of(rows, picks, limit=config.anchors_per_row, block_size=drafter.shape.block_size)
        num_blocks = sum(len(a) for a in anchors)
        share = [(rows[row], drawn) for (_, row), drawn in zip(picks, anchors, strict=True) if len(drawn)][rank::world]
        loss, hits = backward(
            drafter, frozen, share, slot_weights, normalizer=num_blocks, candidates=vocabulary.at(progress.step)
        )
        loss, hits = _sum_over_processes(drafter, world, loss, hits)
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.grad_clip)
        if not torch.isfinite(norm):
            raise StageError(f"step {progress.step}: the gradient is not finite; lower train.learning_rate")
        scale = learning_rate_scale(progress.step, config.steps, config.warmup_share)
        optimizer.step(scale)
        progress.step += 1
        if progress.step % config.checkpoint_every == 0 or progress.step == config.steps:
            elapsed = time.monotonic() - started
            per_step = elapsed / (progress.step - first_step)
            point = {
                "step": float(progress.step),
                "loss": loss,
                "slot1_accuracy": float(hits[0]) / max(1, num_blocks),
                "learning_rate": config.learning_rate * scale,
                "blocks_per_s": num_blocks / per_step,
                "remaining_s": per_step * (config.steps - progress.step),
            }
            _measure(progress, drafter, frozen, validation, folder, rank, point)
            if rank == 0:
                _save(folder, drafter, optimizer, progress)
    return progress


def backward(
    drafter: Drafter,
    frozen: FrozenTarget,
    share: Sequence[tuple[CachedRow, Tensor]],
    slot_weights: SlotWeights,
    *,
    normalizer: float,
    candidates: Candidates | None = None,
) -> tuple[float, Tensor]:
    """Add the gradient of these rows and their anchors; returns their loss and the number of hits per slot, [K]."""
    if not share:
        return 0.0, torch.zeros(drafter.shape.num_draft_tokens)
    rows, anchors = zip(*share, strict=True)
    batch = collate(rows, anchors, drafter.shape.block_size, frozen.head.dtype)
    hidden = drafter(
        batch.states,
        batch.anchors,
        frozen.embedding[batch.anchor_ids],
        frozen.embedding[drafter.shape.mask_token_id],
    )
    real = batch.is_real
    candidates = candidates or Candidates(frozen.head, None, None)
    loss, parts = block_loss(
        hidden[real],
        candidates.head,
        candidates.labels(batch.labels[real]),
        slot_weights,
        normalizer=normalizer,
        logit_offset=candidates.logit_offset,
    )
    loss.backward()
    return float(loss.detach()), parts[1].sum(dim=0)


def slot_weights_of(config: TrainConfig, block_size: int) -> SlotWeights:
    """The configured weighting of a block's slots."""
    if config.loss == "dpace":
        return dpace_weights(config.dpace_alpha)
    return decay_weights(block_size, config.decay_gamma)


def _sum_over_processes(drafter: Drafter, world: int, loss: float, hits: Tensor) -> tuple[float, Tensor]:
    """Make every process's gradients those of the whole step; returns the loss and the hits of the whole step."""
    if world == 1:
        return loss, hits
    # A process without a block adds zeros. One collective a step: its cost is the waiting, not the bytes.
    parameters = list(drafter.parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    measured = torch.cat([torch.tensor([loss]), hits.cpu()]).to(parameters[0])
    flat = torch.cat([*(g.flatten() for g in gradients), measured])
    dist.all_reduce(flat)
    *summed, totals = flat.split([*(p.numel() for p in parameters), len(measured)])
    for parameter, gradient in zip(parameters, summed, strict=True):
        parameter.grad = gradient.view_as(parameter)
    return float(totals[0]), totals[1:]


def _measure(
    progress: Progress,
    drafter: Drafter,
    frozen: FrozenTarget,
    validation: Sequence[CachedRow],
    folder: Path,
    rank: int,
    point: dict[str, float],
) -> None:
    counts, _ = walk(drafter, frozen, validation)
    point = {**point, "walk_acceptance_length": counts.acceptance_length}
    progress.curve.append(point)
    if progress.best is None or counts.acceptance_length > progress.best["acceptance_length"]:
        progress.best = {**counts.as_dict(), "step": progress.step}
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _save_torch(folder / _BEST, drafter.state_dict())
    if rank == 0:
        logger.info(
            "train: step %d  loss %s  walk acceptance %.3f  %.0f blocks/s  %.0f s left",
            progress.step,
            f"{point['loss']:.3f}" if "loss" in point else "-",
            counts.acceptance_length,
            point.get("blocks_per_s", 0),
            point.get("remaining_s", 0),
        )


def _save(folder: Path, drafter: Drafter, optimizer: Optimizer, progress: Progress) -> None:
    state = {
        "drafter": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {"step": progress.step, "curve": progress.curve, "best": progress.best},
    }
    _save_torch(folder / _RESUME, state)


def _resume(folder: Path, drafter: Drafter, optimizer: Optimizer) -> Progress:
    path = folder / _RESUME
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    drafter.load_state_dict(state["drafter"])
    optimizer.load_state_dict(state["optimizer"])
    progress = Progress(**state["progress"])
    logger.info("train: resumed at step %d", progress.step)
    return progress


def _save_torch(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(value, temporary)
    fsync_file(temporary)
    publish(temporary, path)
