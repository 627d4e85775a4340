"""The target's embedding and head, read tensor by tensor: the target itself is never loaded."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.errors import ConfigError

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"


@dataclass(frozen=True)
class FrozenTarget:
    """What the drafter borrows."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H], the same tensor where they are tied
    final_norm: Tensor  # [H]
    logit_soft_cap: float | None = None
    """The target's logits are cap * tanh(logits / cap)."""


def read_frozen(model: Path, *, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    """Embedding, head and final norm of a target folder, sharded or not.

    Raises: ConfigError when a tensor is missing.
    """
    model = Path(model)
    embedding = _read(model, _EMBEDDING).to(dtype)
    tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings", False)
    head = embedding if tied else _read(model, _HEAD).to(dtype)
    return FrozenTarget(embedding, head, _read(model, _NORM).to(dtype))


def _read(model: Path, name: str) -> Tensor:
    index = model / "model.safetensors.index.json"
    files = (
        [model / json.loads(index.read_text())["weight_map"].get(name, "")]
        if index.exists()
        else sorted(model.glob("*.safetensors"))
    )
    for path in files:
        if path.is_file():
            with safe_open(path, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - not a dict
                    return tensors.get_tensor(name)
    raise ConfigError(f"{model}: no tensor {name} in its safetensors; is this a decoder in the Hugging Face layout?")
