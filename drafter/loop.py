"""The training loop: steps, measurements and checkpoints, alone or in several processes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter.deal import Deal
from drafter.feed import Feed
from drafter.frozen import FrozenTarget
from drafter.loss import SlotWeights
from drafter.measurement import Pace, Validation, Walks, has_stalled, measure
from drafter.model import Drafter
from drafter.optim import Optimizer, learning_rate_scale
from drafter.precision import product_dtype
from drafter.processes import clip, prepare, rank_and_world, sum_gradients
from drafter.resume import Progress, resume, save
from drafter.step import backward, passes_of, slot_weights_of
from drafter.vocabulary import Candidates, Vocabulary
from pipeline.config import TrainConfig
from pipeline.errors import DivergedError

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Learned:
    """What a step's blocks taught, of all processes."""

    loss: float  # the weighted mean over blocks
    hits: list[float]  # [K], the share of blocks whose slot was right
    accepted: list[Tensor]  # for each deal int64 [m]


def train_loop(
    drafter: Drafter,
    frozen: FrozenTarget,
    feed: Feed,
    validation: Validation,
    config: TrainConfig,
    folder: Path,
    *,
    check_start: Callable[[Walks], None] = lambda walks: None,
) -> Progress:
    """Train through the feed's steps, from ``folder``'s last checkpoint if there is one; its best weights lie beside.

    Under torch.distributed each process takes its share of every step's rows; all see the same step count, since a
    process without a block still adds its zero gradient, and a step without any block is skipped by all of them.
    ``check_start`` sees the walks of step 0, and stops a run that must not begin.

    Raises: DivergedError when a gradient is not finite; what ``check_start`` raises.
    """
    rank, _ = rank_and_world()
    drafter = prepare(drafter, config)
    optimizer = Optimizer(
        drafter.named_parameters(),
        kind=config.optimizer,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        muon_turns=config.muon_turns,
        compute=product_dtype(frozen.head.dtype, frozen.head.device),
    )
    slot_weights = slot_weights_of(config, drafter.shape.block_size)
    vocabulary = Vocabulary(
        frozen.head, num_sampled=config.sampled_vocabulary, occurring=feed.replies(), seed=config.seed
    )
    progress = resume(folder, drafter, optimizer)
    feed.restore(progress.fed)
    feed.covered(progress.step)
    if progress.best is None:
        check_start(measure(progress, drafter, frozen, validation, folder, {"step": 0.0}))
    pace = Pace(progress.step, feed.num_steps)
    while progress.step < feed.num_steps and not has_stalled(progress, config.patience):
        deals = feed.rows_of(progress.step)
        pace.add(deals)
        scale = learning_rate_scale(progress.step, feed.num_steps, config.warmup_share)
        point = {"learning_rate": config.learning_rate * scale}
        if deals:
            learned = _learn(drafter, frozen, deals, slot_weights, vocabulary.at(progress.step), config)
            norm = clip(drafter.parameters(), config.grad_clip)
            if not torch.isfinite(norm):
                raise DivergedError(f"step {progress.step}: the gradient is not finite; lower train.learning_rate")
            optimizer.step(scale, progress.step)
            feed.learn(learned.accepted)
            accuracies = {f"slot{k + 1}_accuracy": hits for k, hits in enumerate(learned.hits)}
            point |= {"loss": learned.loss, **accuracies, "gradient_norm": float(norm)}
        else:
            progress.num_empty += 1
        del deals  # a feed may give up their states at the checkpoint below
        progress.step += 1
        is_measured = progress.step % config.checkpoint_every == 0 or progress.step == feed.num_steps
        if is_measured:
            point |= {"step": float(progress.step), **pace.figures(progress.step), **feed.figures()}
            measure(progress, drafter, frozen, validation, folder, point)
        if is_measured or feed.wants_checkpoint(progress.step):
            progress.fed = feed.state()
            save(folder, drafter, optimizer, progress)
            feed.covered(progress.step)
        if is_measured:
            pace.go_on()
    if rank == 0 and progress.step < feed.num_steps:
        logger.info(
            "train: stopped at step %d of %d: %d measurements did not raise the walk acceptance of step %d",
            progress.step, feed.num_steps, config.patience, progress.best["step"],
        )  # fmt: skip
    return progress


def _learn(
    drafter: Drafter,
    frozen: FrozenTarget,
    deals: Sequence[Deal],
    slot_weights: SlotWeights,
    candidates: Candidates,
    config: TrainConfig,
) -> Learned:
    """The whole step's gradient in every process, from each one's share of the deals."""
    rank, world = rank_and_world()
    result = backward(
        drafter,
        frozen,
        deals[rank::world],
        slot_weights,
        normalizer=sum(deal.total_weight for deal in deals),
        candidates=candidates,
        tokens_per_pass=config.tokens_per_pass,
        num_passes=_num_passes(deals, world, config),
    )
    accepted = [torch.zeros(len(deal.anchors)) for deal in deals]
    accepted[rank::world] = [found.float().cpu() for found in result.accepted]
    K, sizes = len(result.hits), [len(found) for found in accepted]
    measured = torch.cat([torch.tensor([result.loss]), result.hits.float().cpu(), *accepted])
    loss, hits, found = sum_gradients(drafter.parameters(), measured).cpu().split([1, K, sum(sizes)])
    return Learned(float(loss), (hits / sum(sizes)).tolist(), [one.round().long() for one in found.split(sizes)])


def _num_passes(deals: Sequence[Deal], world: int, config: TrainConfig) -> int | None:
    """How often each process goes forward and backward; None where that is its own affair."""
    if config.parallel != "fsdp" or world == 1:
        return None
    return max(len(passes_of(deals[rank::world], config.tokens_per_pass)) for rank in range(world))
