"""Hidden states and a starting drafter → DrafterCheckpoint: from a cache, or as the states are captured (a stream)."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from drafter import resume
from drafter.anchors import legal_anchors
from drafter.checkpoint import CONFIG, WEIGHTS, cold_start, load_drafter, save_drafter
from drafter.dataset import CachedRow, read_rows
from drafter.feed import CachedFeed
from drafter.frozen import FrozenTarget, read_frozen
from drafter.loop import train_loop
from drafter.model import Drafter
from drafter.processes import rank_and_world
from drafter.shape import cold_shape, read_target_shape
from drafter.stream import StreamFeed, queue_of, remove_queue
from drafter.stream_plan import plan_stream
from pipeline.artifacts import (
    DrafterCheckpoint,
    HiddenStateCache,
    ResponseSet,
    describe_file,
    package_versions,
    write_durably,
)
from pipeline.config import Config
from pipeline.errors import ConfigError, FingerprintError, StageError
from pipeline.shards import REJECTS
from pipeline.stages import Artifact, complete

logger = logging.getLogger("slipstream")

STAGE_VERSION = 1
# What a training run means; the rest of the table is how it is executed.
_EXECUTION = {"num_workers", "control"}
# The order of a streamed run is that of its windows.
_STREAM = {"max_bytes", "states_format"}
_TRAINED = "trained.json"


def run(
    config: Config,
    states: Artifact[HiddenStateCache],
    *,
    start: Artifact[DrafterCheckpoint] | None,
    role: str,
    responses: Artifact[ResponseSet] | None = None,
    execute: Callable[[Path], None] | None = None,
) -> Artifact[DrafterCheckpoint]:
    """The checkpoint with the best walk acceptance on the validation rows; cold where ``start`` is None.

    With ``responses`` the run is streamed: it trains on their train rows as somebody puts them into its queue, and
    ``states`` holds the others. ``execute(folder)`` runs ``train_in`` on that folder, in as many processes as it likes;
    None runs it here.

    Raises: StageError when no row can be trained on, or a gradient is not finite; FingerprintError when the
    cache and the starting drafter were made for different targets.
    """
    if start is not None and start.manifest.fingerprint and states.manifest.fingerprint:
        start.manifest.fingerprint.require_same(states.manifest.fingerprint, where=f"{start.folder}, {states.folder}")
    parents = {"states": states.id, **({"start": start.id} if start else {})}
    # Replies that were removed and made anew under the same id are others to learn from.
    replies = responses.manifest.content_id if responses else states.manifest.responses
    meaning = {**config.train.model_dump(mode="json", exclude=_EXECUTION), "role": role, "replies": replies}
    if start is None:
        meaning["drafter"] = config.drafter.model_dump(mode="json")
    stream = {}
    if responses is not None:
        parents["responses"] = responses.id
        stream = {"stream": config.capture.model_dump(mode="json", include=_STREAM)}

    def build(folder: Path, derivation: str) -> DrafterCheckpoint:
        if not (folder / _TRAINED).exists():
            (execute or (lambda folder: train_in(folder, config, states, start, responses)))(folder)
        trained = json.loads((folder / _TRAINED).read_text())
        resume.remove(folder)
        remove_queue(config, folder)
        return DrafterCheckpoint(
            derivation_id=derivation,
            parents=parents,
            fingerprint=states.manifest.fingerprint,
            shards=tuple(describe_file(folder / name) for name in (CONFIG, WEIGHTS)),
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


def train_in(
    folder: Path,
    config: Config,
    states: Artifact[HiddenStateCache],
    start: Artifact[DrafterCheckpoint] | None,
    responses: Artifact[ResponseSet] | None = None,
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
    feed = _feed(folder, config, states, responses, block_size=drafter.shape.block_size)
    validation = read_rows(states, "validation", staging_bytes=config.capture.staging_bytes)[: config.train.walk_rows]
    if not validation:
        raise StageError(f"{states.folder}: no validation rows; raise collect.validation_share or collect more traffic")
    progress = train_loop(drafter, frozen, feed, validation, config.train, folder)
    if rank_and_world()[0] == 0:
        resume.load_best(folder, drafter)
        save_drafter(folder, drafter, raw)
        num_rows, rejects = feed.outcome()
        trained = {
            "block_size": drafter.shape.block_size,
            "mask_token_id": drafter.shape.mask_token_id,
            "walk": progress.best,
            "curve": progress.curve,
            "counts": {"train_rows": num_rows, "validation_rows": len(validation), "steps": progress.step},
            "rejects": dict(Counter(str(reject["reason"]) for reject in rejects)),
        }
        if rejects:
            lines = "".join(json.dumps(reject, sort_keys=True) + "\n" for reject in rejects)
            write_durably(folder / REJECTS, lines.encode())
        write_durably(folder / _TRAINED, json.dumps(trained).encode())


def _feed(
    folder: Path,
    config: Config,
    states: Artifact[HiddenStateCache],
    responses: Artifact[ResponseSet] | None,
    *,
    block_size: int,
) -> CachedFeed | StreamFeed:
    if responses is not None:
        plan = plan_stream(config, responses, states, block_size=block_size)
        return StreamFeed(config, plan, queue_of(config, folder, plan), responses, block_size=block_size)
    if "train" not in states.manifest.splits:
        raise StageError(
            f"{states.folder}: holds the states of {', '.join(states.manifest.splits)} rows alone, as a streamed run "
            "leaves them; train on their responses with slipstream stream, or run slipstream capture first"
        )
    rows = trainable_rows(read_rows(states, "train", staging_bytes=config.capture.staging_bytes), block_size)
    if not rows:
        raise StageError(
            f"{states.folder}: no train row has room for a block of {block_size} in its reply; collect more traffic "
            "or use a smaller drafter.block_size"
        )
    return CachedFeed(rows, config.train, block_size=block_size)


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
