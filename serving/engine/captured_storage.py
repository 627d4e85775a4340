"""A loaded drafter's values written into the storage of the one that serves, for engines with CUDA graphs.

A captured graph reads and writes fixed addresses: a module that was replaced would be loaded, verified and never
used. So the new drafter is loaded beside the old one, compared with its file, and then copied over it, tensor by
tensor, the buffers that are derived after loading included. What was there is kept until the copy has been verified.

Source: vllm/model_executor/models/qwen3_dflash.py (_build_fused_kv_buffers), vLLM 0.32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from serving.errors import ServingError

# Built after loading, outside the module's registered parameters and buffers.
_DERIVED = ("_hidden_norm_weight", "_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights", "_rope_cos_sin_cache")


class CapturedStorage:
    """The tensors of a serving drafter; ``write`` changes their values, never their addresses."""

    def __init__(self, model: Any):
        self._tensors = dict(stored_tensors(model))
        self._before: dict[str, Tensor] = {}

    def write(self, new: Any) -> None:
        """Copy another drafter's values in.

        Raises: ServingError, before anything is written, where the two are not laid out alike, or where the engine
        repacks its weights, as a CPU's does, so that there is no storage to write into.
        """
        values = dict(stored_tensors(new))
        if set(values) != set(self._tensors):
            odd = sorted(set(values) ^ set(self._tensors))
            raise ServingError(f"the drafters hold other tensors: {odd[:4]}; restart the replica with the new one")
        for name, old in self._tensors.items():
            if _layout(values[name]) != _layout(old):
                raise ServingError(f"{name} is laid out as {_layout(values[name])}, serving {_layout(old)}; restart")
            if not old.numel():
                raise ServingError(f"{name} was repacked after loading: there is nothing to write into; restart")
        # Shared with the target, embedding and head: the same storage on both sides, and not ours to write.
        own = {name: old for name, old in self._tensors.items() if values[name].data_ptr() != old.data_ptr()}
        self._before = {name: old.clone() for name, old in own.items()}
        with torch.no_grad():
            for name, old in own.items():
                old.copy_(values[name])

    def put_back(self) -> None:
        """Make every value what it was before ``write``."""
        with torch.no_grad():
            for name, value in self._before.items():
                self._tensors[name].copy_(value)


def stored_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything that a drafter computes with, each storage once."""
    seen: set[int] = set()
    registered = [*model.named_parameters(), *model.named_buffers()]
    derived = [(name, getattr(model.model, name, None)) for name in _DERIVED]
    for name, tensor in [*registered, *derived]:
        if tensor is None or (tensor.numel() and tensor.data_ptr() in seen):
            continue
        seen.add(tensor.data_ptr())
        yield name, tensor.data


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)
