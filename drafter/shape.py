"""A drafter's shape: what config.json of the z-lab layout says, and nothing this code cannot run.

Layers are counted as in the checkpoint: ``target_layer_ids`` L means "the output of 0-based decoder
layer L", Hugging Face's ``hidden_states[L + 1]``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.rope import Rope
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


class LayerAttention(Frozen):
    """What the slots of a block see in one layer.

    A slot at position p sees a context state at j < anchor where p - j < window, and a slot of its own block at s
    where s <= p (causal) or everywhere (not causal), within the window too; the rule is vLLM's.
    """

    window: int | None = None
    """Positions that a slot sees, its own counted; None: all."""
    is_causal: bool = False


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


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target's config.json."""

    raw: dict[str, Any]

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return self.raw["num_hidden_layers"]


def read_target_shape(model: Path) -> TargetShape:
    """The target's shape. Raises: ConfigError when config.json is missing or is not a supported family."""
    path = Path(model) / "config.json"
    if not path.exists():
        raise ConfigError(f"{path}: missing; target.model must be a Hugging Face model folder")
    raw = json.loads(path.read_text())
    supported = ("llama", "qwen2", "qwen3", "mistral")
    if raw.get("model_type") not in supported:
        raise ConfigError(f"{path}: model_type {raw.get('model_type')!r} is not supported; supported: {supported}")
    return TargetShape(raw)


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
) -> DrafterShape:
    """The shape of a new drafter for this target: its width, heads and rope, fewer layers.

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
    heads = raw["num_attention_heads"]
    return DrafterShape(
        hidden_size=raw["hidden_size"],
        intermediate_size=intermediate_size or raw["intermediate_size"],
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope=Rope(theta=_rope_theta(raw), rotary_dim=raw.get("head_dim") or raw["hidden_size"] // heads),
        layers=(LayerAttention(),) * num_layers,
        max_position_embeddings=raw["max_position_embeddings"],
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        num_target_layers=target.num_layers,
        target_hidden_size=raw["hidden_size"],
    )


def shape_of(config: dict[str, Any], *, where: str) -> DrafterShape:
    """The shape that a z-lab config.json describes.

    Raises: ConfigError for anything this trainer would run differently from vLLM: another architecture,
    sliding or causal layers, scaled or partial rope, quantisation, another block layout.
    """
    _refuse_unsupported(config, where)
    dflash = config["dflash_config"]
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=Rope(
            theta=_rope_theta(config),
            rotary_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        ),
        layers=(LayerAttention(),) * config["num_hidden_layers"],
        max_position_embeddings=config["max_position_embeddings"],
        block_size=config["block_size"],
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
    )


def config_of(shape: DrafterShape) -> dict[str, Any]:
    """The config.json of a new drafter, every key that changes its meaning written out."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "causal": False,
            "predicts_from_slot0": False,
        },
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_target_layers": shape.num_target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope.theta},
        "rope_theta": shape.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def _rope_theta(config: dict[str, Any]) -> float:
    theta, nested = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None and nested is not None and float(theta) != float(nested):
        raise ConfigError(f"config.json: rope_theta = {theta}, but rope_parameters.rope_theta = {nested}; keep one")
    theta = theta or nested
    if theta is None:
        raise ConfigError("config.json has neither rope_theta nor rope_parameters.rope_theta: write it out")
    return float(theta)


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    dflash = config.get("dflash_config") or {}
    layer_ids = list(dflash.get("target_layer_ids") or [])
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    absent = [name for name in _NEEDED if config.get(name) is None]
    found = {
        f"architectures = {config.get('architectures')}": config.get("architectures") != [ARCHITECTURE],
        f"no {', '.join(absent)}": bool(absent),
        "no dflash_config.target_layer_ids": not layer_ids,
        # vLLM sorts the layers that it captures, so fc would read permuted states
        f"unsorted or repeated target_layer_ids {layer_ids}": layer_ids != sorted(set(layer_ids)),
        "no dflash_config.mask_token_id": dflash.get("mask_token_id") is None,
        "no block_size": not config.get("block_size"),
        "sliding or mixed layers": set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}
        or bool(dflash.get("use_swa")),
        "causal blocks": bool(dflash.get("causal")) or bool(config.get("is_causal")),
        "attention biases": bool(config.get("attention_bias")),
        f"rope {rope}": rope.get("rope_type", rope.get("type", "default")) != "default"
        or float(config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0
        or config.get("is_neox_style") is False,
        "quantisation": config.get("quantization_config") is not None,
        "a block layout that predicts from slot 0": bool(dflash.get("predicts_from_slot0")),
        "its own vocabulary": config.get("draft_vocab_size") not in (None, config.get("vocab_size")),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
    }
    wrong = [reason for reason, is_wrong in found.items() if is_wrong]
    if wrong:
        raise ConfigError(f"{where}: this trainer does not run {', '.join(wrong)}; train it where it was made")
