"""The training loop: steps, measurements and checkpoints, alone or in several processes."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter.dataset import CachedRow
from drafter.feed import Feed
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.optim import Optimizer, learning_rate_scale
from drafter.processes import rank_and_world, sum_gradients
from drafter.resume import Progress, resume, save, save_best
from drafter.step import backward, slot_weights_of
from drafter.vocabulary import Vocabulary
from drafter.walk import walk
from pipeline.config import TrainConfig
from pipeline.errors import StageError

logger = logging.getLogger("slipstream")


def train_loop(
    drafter: Drafter,
    frozen: FrozenTarget,
    feed: Feed,
    validation: Sequence[CachedRow],
    config: TrainConfig,
    folder: Path,
) -> Progress:
    """Train through the feed's steps, from ``folder``'s last checkpoint if there is one; best.pt holds the best step.

    Under torch.distributed each process takes its share of every step's rows; all see the same step count,
    since a process without a block still adds its zero gradient.

    Raises: StageError when a gradient is not finite.
    """
    rank, world = rank_and_world()
    optimizer = Optimizer(drafter.named_parameters(), kind=config.optimizer, learning_rate=config.learning_rate)
    slot_weights = slot_weights_of(config, drafter.shape.block_size)
    vocabulary = Vocabulary(
        frozen.head, num_sampled=config.sampled_vocabulary, occurring=feed.replies(), seed=config.seed
    )
    progress = resume(folder, drafter, optimizer)
    feed.covered(progress.step)
    if progress.best is None:
        _measure(progress, drafter, frozen, validation, folder, {"step": 0.0})
    started, first_step = time.monotonic(), progress.step
    while progress.step < feed.num_steps:
        rows = [(row, anchors) for row, anchors in feed.rows_of(progress.step) if len(anchors)]
        num_blocks = sum(len(anchors) for _, anchors in rows)
        candidates = vocabulary.at(progress.step)
        share = rows[rank::world]
        loss, hits = backward(drafter, frozen, share, slot_weights, normalizer=num_blocks, candidates=candidates)
        del rows, share  # a feed may give up their states at the checkpoint below
        loss, *hits = sum_gradients(drafter.parameters(), torch.tensor([loss, *hits.tolist()])).tolist()
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.grad_clip)
        if not torch.isfinite(norm):
            raise StageError(f"step {progress.step}: the gradient is not finite; lower train.learning_rate")
        scale = learning_rate_scale(progress.step, feed.num_steps, config.warmup_share)
        optimizer.step(scale)
        progress.step += 1
        is_measured = progress.step % config.checkpoint_every == 0 or progress.step == feed.num_steps
        if is_measured:
            per_step = (time.monotonic() - started) / (progress.step - first_step)
            point = {
                "step": float(progress.step),
                "loss": loss,
                "slot1_accuracy": hits[0] / max(1, num_blocks),
                "learning_rate": config.learning_rate * scale,
                "blocks_per_s": num_blocks / per_step,
                "remaining_s": per_step * (feed.num_steps - progress.step),
            }
            _measure(progress, drafter, frozen, validation, folder, point | feed.figures())
        if is_measured or feed.wants_checkpoint(progress.step):
            if rank == 0:
                save(folder, drafter, optimizer, progress)
            feed.covered(progress.step)
    return progress


def _measure(
    progress: Progress,
    drafter: Drafter,
    frozen: FrozenTarget,
    validation: Sequence[CachedRow],
    folder: Path,
    point: dict[str, float],
) -> None:
    """Walk the validation rows; the best weights so far are kept."""
    counts, _ = walk(drafter, frozen, validation)
    point = {**point, "walk_acceptance_length": counts.acceptance_length}
    progress.curve.append(point)
    is_best = progress.best is None or counts.acceptance_length > progress.best["acceptance_length"]
    if is_best:
        progress.best = {**counts.as_dict(), "step": progress.step}
    if rank_and_world()[0] != 0:
        return
    if is_best:
        save_best(folder, drafter)
    logger.info(
        "train: step %d  loss %s  walk acceptance %.3f  %.0f blocks/s  %.0f s left",
        progress.step,
        f"{point['loss']:.3f}" if "loss" in point else "-",
        counts.acceptance_length,
        point.get("blocks_per_s", 0),
        point.get("remaining_s", 0),
    )
