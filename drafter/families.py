"""Which targets are known, and what each family means for a drafter.

A family is here when transformers' source was read for its names, norm and logits, and vLLM 0.32 hands out the states
of its layers: by its own class, or (Gemma 2 and 3) by ``--model-impl transformers``.

vLLM gives a drafter the rows of the target's ``embed_tokens`` as they are stored: factors that the target applies
behind it (Gemma's root of the width, Granite's embedding_multiplier) are left out, so they play no part here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

_PREFIXES = ("model.", "model.language_model.", "language_model.model.")  # text alone; nested, new and old names
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class Family:
    """What one model_type of config.json stands for."""

    is_tied: bool = False
    """What an absent tie_word_embeddings means."""
    norm_adds_one: bool = False
    """The final norm's gain is 1 + what is stored."""
    soft_cap: float | None = None
    """What an absent final_logit_softcapping means."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "ministral3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "qwen3_next": Family(norm_adds_one=True),
    "qwen3_5_text": Family(norm_adds_one=True),
    "qwen3_5_moe_text": Family(norm_adds_one=True),
    "gemma2": Family(norm_adds_one=True, is_tied=True, soft_cap=30.0),
    "gemma3_text": Family(norm_adds_one=True, is_tied=True),
    "gemma4_text": Family(is_tied=True),
    "gpt_oss": Family(),
    "granite": Family(),
    "phi3": Family(),
}
"""model_type of the text part → family."""

_NESTING = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
"""model_type of a multimodal model → that of its text_config."""


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target's config.json."""

    raw: dict[str, Any]
    """The text part."""
    is_tied: bool
    """The head is the embedding."""

    @property
    def family(self) -> Family:
        """What its model_type stands for."""
        return FAMILIES[self.raw["model_type"]]

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return self.raw["num_hidden_layers"]

    @property
    def logit_scale(self) -> float:
        """What the head's logits are multiplied with."""
        if self.raw["model_type"] == "granite":
            return 1.0 / self.raw.get("logits_scaling", 1.0)
        return 1.0

    @property
    def logit_soft_cap(self) -> float | None:
        """c of ``c * tanh(logits / c)``, or None where logits are as they come."""
        return self.raw.get("final_logit_softcapping", self.family.soft_cap)

    @property
    def rope_theta(self) -> float | None:
        """Base of the layers that see everything, None where config.json says none."""
        parameters = self.raw.get("rope_parameters") or {}
        parameters = parameters.get("full_attention", parameters)
        theta = self.raw.get("rope_theta", parameters.get("rope_theta"))
        return None if theta is None else float(theta)


def read_target_shape(model: Path) -> TargetShape:
    """The target's shape. Raises: ConfigError when config.json is missing or is not of a known family."""
    path = Path(model) / "config.json"
    if not path.exists():
        raise ConfigError(f"{path}: missing; target.model must be a Hugging Face model folder")
    whole = json.loads(path.read_text())
    kind = whole.get("model_type")
    text = _text_part(whole, kind)
    if text.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type {kind!r} is not supported; supported: {', '.join(sorted({*FAMILIES, *_NESTING}))}"
        )
    tied = text.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
    return TargetShape(text, FAMILIES[text["model_type"]].is_tied if tied is None else bool(tied))


def _text_part(whole: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    nested = whole.get("text_config")
    if kind in _NESTING and isinstance(nested, Mapping):
        return {"model_type": _NESTING[kind], **nested}
    return dict(whole)


def embedding_names() -> tuple[str, ...]:
    """Names that the token embedding may have in the target's files, the likeliest first."""
    return tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)


def head_names() -> tuple[str, ...]:
    """Names that the output head may have."""
    return _HEADS


def norm_names() -> tuple[str, ...]:
    """Names that the gain of the final norm may have."""
    return tuple(f"{prefix}norm.weight" for prefix in _PREFIXES)
