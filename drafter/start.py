"""Where a run begins: the drafter that it was given, or a new one."""

import logging
from pathlib import Path

from drafter.checkpoint import Kept, cold_start, load_drafter
from drafter.families import read_target_shape
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.shape import cold_shape
from pipeline.artifacts import HiddenStateCache
from pipeline.config import Config
from pipeline.errors import ConfigError, FingerprintError
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")


def starting_drafter(
    config: Config, frozen: FrozenTarget, states: Artifact[HiddenStateCache], folder: Path | None
) -> tuple[Drafter, Kept | None]:
    """The drafter in a folder and what is kept of its files as it stands, or a new one of the configured shape.

    Raises: FingerprintError when these are the states of other layers than it reads.
    """
    drafter, kept = load_drafter(folder) if folder else (new_drafter(config, frozen), None)
    layer_ids = states.manifest.fingerprint.target_layer_ids if states.manifest.fingerprint else ()
    if layer_ids != drafter.shape.target_layer_ids:
        raise FingerprintError(
            f"{states.folder}: captured layers {list(layer_ids)}, the drafter reads "
            f"{list(drafter.shape.target_layer_ids)}; capture again with the drafter's layers"
        )
    return drafter, kept


def new_drafter(config: Config, frozen: FrozenTarget) -> Drafter:
    """A cold-started drafter of the configured shape. Raises: ConfigError when no mask token is known."""
    shape = cold_shape(
        read_target_shape(config.target.model),
        num_layers=config.drafter.num_layers,
        block_size=config.drafter.block_size,
        mask_token_id=resolve_mask_token(config),
        target_layer_ids=config.drafter.target_layer_ids,
        intermediate_size=config.drafter.intermediate_size,
        keeps_rope_scaling=config.drafter.keeps_rope_scaling,
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
