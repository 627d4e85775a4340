"""The target's embedding and head, read tensor by tensor: the target itself is never loaded.

Legend: V vocabulary, H width of the target.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafter.families import embedding_names, head_names, norm_names, read_target_shape
from pipeline.errors import ConfigError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class FrozenTarget:
    """What the drafter borrows."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H], the same tensor where they are tied
    final_norm: Tensor  # [H], the gain that is applied, whatever is stored
    logit_soft_cap: float | None = None
    """The target's logits are cap * tanh(logits / cap)."""


def read_frozen(model: Path, *, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    """Embedding, head and final norm of a target folder, sharded or not.

    Raises: ConfigError on an unknown family, and when a tensor is missing or quantised.
    """
    model = Path(model)
    target = read_target_shape(model)
    embedding = _read(model, embedding_names()).to(dtype)
    gain = _read(model, norm_names()).float()
    return FrozenTarget(
        embedding=embedding,
        head=embedding if target.is_tied else _read(model, head_names()).to(dtype),
        final_norm=(gain + 1 if target.family.norm_adds_one else gain).to(dtype),
        logit_soft_cap=target.logit_soft_cap,
    )


def _read(model: Path, names: Sequence[str]) -> Tensor:
    for path in _files(model, names):
        with safe_open(path, framework="pt") as tensors:
            for name in names:
                if name in tensors.keys():  # noqa: SIM118 - not a dict
                    return _floating(tensors.get_tensor(name), name, path)
    raise ConfigError(
        f"{model}: no tensor {' or '.join(names)} in its safetensors; expected a decoder in the Hugging Face layout, "
        "with an embedding and a head that are not quantised"
    )


def _files(model: Path, names: Sequence[str]) -> Iterator[Path]:
    index = model / INDEX
    if not index.exists():
        yield from sorted(model.glob("*.safetensors"))
        return
    where = json.loads(index.read_text())["weight_map"]
    yield from (model / where[name] for name in names if name in where and (model / where[name]).is_file())


def _floating(tensor: Tensor, name: str, path: Path) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(
            f"{path}: {name} is {tensor.dtype}, a quantised tensor; point target.model at weights whose embedding and "
            "head are bf16, fp16 or fp32"
        )
    return tensor
