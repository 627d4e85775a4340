"""Is a warm start wired as its drafter was when it was trained? Its loss and its walk at step 0 tell."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drafter.anchors import anchor_seed, draw_anchors
from drafter.dataset import CachedRow, read_rows
from drafter.deal import Deal
from drafter.frozen import FrozenTarget
from drafter.measurement import Walks
from drafter.model import Drafter
from drafter.processes import rank_and_world
from drafter.step import backward
from drafter.walk import WalkCounts, is_walked
from pipeline.artifacts import HiddenStateCache, artifact_dir, find
from pipeline.config import Config, TrainConfig
from pipeline.errors import SlipstreamError, StageError
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")

_ROWS, _ANCHORS = 16, 8

CAUSES = (
    "Something is wired otherwise than when this drafter was trained: look at the target layers and their order, the "
    "positions of the states, the rope settings in config.json, and whether this is the file that was measured"
)


def doubt_of(
    drafter: Drafter, frozen: FrozenTarget, rows: Sequence[CachedRow], config: TrainConfig, *, where: str
) -> str | None:
    """What to say when the mean cross-entropy over these rows is not below that of a uniform guess, ln V; else None.

    A doubt only: a drafter that is sure of itself may be above it on text of another kind.
    """
    num_slots = drafter.shape.num_draft_tokens
    deals = [
        Deal(row, anchors, 1.0)
        for number, row in enumerate(rows[:_ROWS])
        if len(anchors := draw_anchors(
            row.num_prompt_tokens, row.num_tokens, drafter.shape.block_size, _ANCHORS, anchor_seed(0, 0, number)
        ))
    ]  # fmt: skip
    if not deals:
        return None

    def even(cross_entropy: Tensor) -> Tensor:
        return torch.full_like(cross_entropy, 1 / num_slots)

    num_blocks = sum(len(deal.anchors) for deal in deals)
    result = backward(drafter, frozen, deals, even, normalizer=num_blocks, tokens_per_pass=config.tokens_per_pass)
    drafter.zero_grad(set_to_none=True)
    uniform = math.log(frozen.head.shape[0])
    if rank_and_world()[0] == 0:
        logger.info("train: cross-entropy at step 0 is %.3f nats a token (a uniform guess: %.3f)", result.loss, uniform)
    if result.loss < uniform:
        return None
    return (
        f"{where}: at step 0 the cross-entropy is {result.loss:.3f} nats a token, and a drafter that knew nothing "
        f"would have {uniform:.3f} (ln {frozen.head.shape[0]}). {CAUSES}"
    )


def recorded_walk_check(
    recorded: Mapping[str, Mapping[str, Any]],
    own: str,
    config: TrainConfig,
    *,
    where: str,
    doubt: str | None = None,
    elsewhere: Callable[[], Mapping[str, WalkCounts]] = dict,
) -> Callable[[Walks], None]:
    """What compares the walks of step 0 with those on record for the starting drafter: cache id → counts.

    ``own`` is the id of the run's own cache. The check raises StageError when accepted drafts a step differ by more
    than ``_allowed``. Where no cache is common it asks for walks ``elsewhere``; where none of these is on record
    either, it raises what ``doubt_of`` said, if anything.
    """

    def is_compared(found: Mapping[str, WalkCounts]) -> bool:
        common = {name: one for name, one in found.items() if name in recorded and _same_rows(recorded[name], one)}
        for name, one in common.items():
            _require_near(recorded[name], one, config, where=f"{where}: over the validation rows of states {name} it")
            if rank_and_world()[0] == 0:
                now = _accepted_per_step(one.as_dict())
                logger.info("train: step 0 reproduces the recorded walk on %s: %.4f accepted drafts a step", name, now)
        return bool(common)

    def check(walks: Walks) -> None:
        if is_compared({own: walks.own} | dict(walks.replayed)) or is_compared(elsewhere()):
            return
        if doubt is not None:
            raise StageError(doubt)
        if rank_and_world()[0] == 0:
            logger.warning("train: %s has no walk on record over rows that are at hand; step 0 is not compared", where)

    return check


def walk_again(
    config: Config, recorded: Mapping[str, Mapping[str, Any]], walk_over: Callable[[Sequence[CachedRow]], WalkCounts]
) -> dict[str, WalkCounts]:
    """Cache id → the walk over the rows that one on record was over, of the first cache that can still be read.

    A cache that cannot is told of and passed over: a run does without it, too.
    """
    for name, counts in recorded.items():
        folder = artifact_dir(config.root, HiddenStateCache, name)
        try:
            if (manifest := find(folder, HiddenStateCache)) is None:
                continue
            rows = read_rows(Artifact(folder, manifest), "validation", staging_bytes=config.capture.staging_bytes)
            return {name: walk_over([row for row in rows if is_walked(row)][: counts["num_replies"]])}
        except SlipstreamError as error:
            logger.warning("train: step 0 is not compared on %s: %s", name, error)
    return {}


def _require_near(expected: Mapping[str, Any], found: WalkCounts, config: TrainConfig, *, where: str) -> None:
    before, now = _accepted_per_step(expected), _accepted_per_step(found.as_dict())
    if abs(now - before) <= _allowed(expected, config.warm_start_tolerance) / max(1, expected["num_drafts"]):
        return
    raise StageError(
        f"{where} has {now:.4f} accepted drafts a step here, computed in {config.compute}, and {before:.4f} on record, "
        f"computed in {expected['compute']}: {found.num_accepted_tokens} drafts of {found.num_drafts} steps and "
        f"{expected['num_accepted_tokens']} of {expected['num_drafts']}, more apart than near-ties and "
        f"train.warm_start_tolerance = {config.warm_start_tolerance} allow. Where train.compute or the hardware is "
        f"another, it may be that: set the one that is on record, or raise the tolerance. {CAUSES}"
    )


def _allowed(expected: Mapping[str, Any], tolerance: float) -> float:
    """Accepted drafts by which a walk may differ that is wired alike: other precision decides near-ties otherwise.

    Each accepted draft may with probability ``tolerance``: their mean, three standard deviations and, for the walks
    with next to none, the drafts of one whole step.
    """
    mean = tolerance * expected["num_accepted_tokens"]
    return mean + 3 * math.sqrt(mean) + len(expected["num_accepted_tokens_per_pos"])


def _same_rows(expected: Mapping[str, Any], found: WalkCounts) -> bool:
    return (expected["num_replies"], expected["num_tokens"]) == (found.num_replies, found.num_tokens)


def _accepted_per_step(counts: Mapping[str, Any]) -> float:
    return counts["num_accepted_tokens"] / max(1, counts["num_drafts"])
