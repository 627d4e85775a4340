"""A drafter's shape: what config.json of the z-lab layout says, and nothing this code cannot run.

Layers are counted as in the checkpoint: ``target_layer_ids`` L means "the output of 0-based decoder
layer L", Hugging Face's ``hidden_states[L + 1]``.
"""

from collections.abc import Sequence
from typing import Any

from drafter.families import TargetShape
from drafter.layer_config import LayerAttention, layer_settings, layers_of
from drafter.rope import Rope
from drafter.rope_config import rope_of, rope_settings, scaling_of_target
from pipeline.artifacts import Frozen
from pipeline.errors import ConfigError

ARCHITECTURE = "DFlashDraftModel"
_NEEDED = (
    "block_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "rms_norm_eps",
    "vocab_size",
)


class DrafterShape(Frozen):
    """The numbers that a drafter is built from."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    rope: Rope
    layers: tuple[LayerAttention, ...]
    """One a layer."""
    has_attention_bias: bool = False
    """On q, k, v and o."""
    has_attention_sinks: bool = False
    """A learned logit a head that takes part in the softmax and has no value."""
    value_scale: float | None = None
    """What values are multiplied with."""
    logit_scale: float = 1.0
    """What the head's logits are multiplied with."""
    has_mask_embedding: bool = False
    """Its own embedding of the masked slots, instead of the target's of ``mask_token_id``."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens a block predicts: slot 0 is the known anchor."""
        return self.block_size - 1

    @property
    def context_size(self) -> int:
        """Width of the concatenated target states that ``fc`` reads."""
        return len(self.target_layer_ids) * self.target_hidden_size


def spread_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spread 0-based layer ids, the second and the third last among them (as released drafters do).

    Raises: ConfigError when the target has too few layers for distinct ids.
    """
    first, last = 1, num_layers - 3
    if last < first:
        raise ConfigError(f"a target of {num_layers} layers: set drafter.target_layer_ids, too few to spread")
    count = min(count, last - first + 1)
    ids = {round(first + i * (last - first) / max(1, count - 1)) for i in range(count)}
    return tuple(sorted(ids))


def cold_shape(
    target: TargetShape,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] = (),
    intermediate_size: int | None = None,
    keeps_rope_scaling: bool = True,
) -> DrafterShape:
    """The shape of a new drafter for this target: its width, heads, theta and rope scaling, fewer layers, all full.

    Partial rotation, windows, biases and sinks are the target's own affair. ``keeps_rope_scaling`` false takes theta
    alone: for a drafter that will be served no further than the target's length before scaling.

    Raises: ConfigError on layer ids that the target does not have, or that are not increasing.
    """
    raw = target.raw
    ids = tuple(target_layer_ids) or spread_layers(target.num_layers)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= target.num_layers:
        raise ConfigError(
            f"drafter.target_layer_ids = {list(ids)}: expected increasing 0-based ids below {target.num_layers}"
        )
    if not 0 <= mask_token_id < raw["vocab_size"]:
        raise ConfigError(f"drafter.mask_token_id = {mask_token_id} is outside the vocabulary of {raw['vocab_size']}")
    width = intermediate_size or raw.get("intermediate_size")
    if width is None:
        raise ConfigError("the target's config.json has no intermediate_size: set drafter.intermediate_size")
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    return DrafterShape(
        hidden_size=raw["hidden_size"],
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope=_cold_rope(target, head_dim, keeps_rope_scaling),
        layers=(LayerAttention(),) * num_layers,
        max_position_embeddings=raw["max_position_embeddings"],
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        num_target_layers=target.num_layers,
        target_hidden_size=raw["hidden_size"],
        logit_scale=target.logit_scale,
    )


def _cold_rope(target: TargetShape, head_dim: int, keeps_scaling: bool) -> Rope:
    config = {
        "rope_theta": target.rope_theta,
        "rope_parameters": scaling_of_target(target.raw) if keeps_scaling else {},
        "max_position_embeddings": target.raw["max_position_embeddings"],
    }
    return rope_of(config, head_dim=head_dim, where="the target's config.json")


def shape_of(config: dict[str, Any], *, where: str, has_mask_embedding: bool = False) -> DrafterShape:
    """The shape that a z-lab config.json describes; mask_embedding.pt beside it is no part of that.

    Raises: ConfigError for anything that vLLM would not run, or that this trainer would run differently from it.
    """
    _refuse_unsupported(config, where)
    dflash = config["dflash_config"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=rope_of(config, head_dim=head_dim, where=where),
        layers=layers_of(config, where=where),
        max_position_embeddings=config["max_position_embeddings"],
        block_size=config["block_size"],
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        has_attention_bias=bool(config.get("attention_bias")),
        has_attention_sinks=bool(dflash.get("attention_sink_bias", config.get("add_swa_attention_sink_bias", False))),
        value_scale=dflash.get("attention_value_scale"),
        logit_scale=float(config.get("logit_scale", 1.0)),
        has_mask_embedding=has_mask_embedding,
    )


def config_of(shape: DrafterShape) -> dict[str, Any]:
    """The config.json of a new drafter, every key that changes its meaning written out; bf16, nothing quantised.

    Raises: ConfigError on layers that no config.json can describe.
    """
    layers, dflash = layer_settings(shape.layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": shape.has_attention_bias,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "attention_sink_bias": shape.has_attention_sinks,
            "predicts_from_slot0": False,
            **dflash,
            **({} if shape.value_scale is None else {"attention_value_scale": shape.value_scale}),
        },
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "logit_scale": shape.logit_scale,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_target_layers": shape.num_target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "target_hidden_size": shape.target_hidden_size,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        **layers,
        **rope_settings(shape.rope, head_dim=shape.head_dim),
    }


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    dflash = config.get("dflash_config") or {}
    layer_ids = list(dflash.get("target_layer_ids") or [])
    absent = [name for name in _NEEDED if config.get(name) is None]
    found = {
        f"architectures = {config.get('architectures')}": config.get("architectures") != [ARCHITECTURE],
        f"no {', '.join(absent)}": bool(absent),
        "no dflash_config.target_layer_ids": not layer_ids,
        # vLLM sorts the layers that it captures, so fc would read permuted states
        f"unsorted or repeated target_layer_ids {layer_ids}": layer_ids != sorted(set(layer_ids)),
        "no dflash_config.mask_token_id": dflash.get("mask_token_id") is None,
        "a drafter that reads no target states": any(
            holder.get("use_aux_hidden_state") is False for holder in (config, dflash)
        ),
        "an eagle_config beside dflash_config": bool(config.get("eagle_config")),
        "quantisation (export the drafter in bf16)": bool(
            config.get("quantization_config") or config.get("compression_config")
        ),
        "a block layout that predicts from slot 0": bool(
            dflash.get("predicts_from_slot0") or dflash.get("sample_from_anchor") or config.get("sample_from_anchor")
        ),
        "its own vocabulary (its head would be its own, too, and the target's is what is trained against)": config.get(
            "draft_vocab_size"
        )
        not in (None, config.get("vocab_size")),
        "its own head (export it without, so that vLLM shares the target's)": bool(config.get("has_own_lm_head")),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        "a logit_scale that is not positive": not config.get("logit_scale", 1.0) > 0,
    }
    wrong = [reason for reason, is_wrong in found.items() if is_wrong]
    if wrong:
        raise ConfigError(f"{where}: this trainer does not run {', '.join(wrong)}; train it where it was made")
