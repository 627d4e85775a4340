"""The drafter's context keys in vLLM's CPU builds, repaired where an engine of ours runs.

vLLM normalises the context's keys of all drafter layers in one call, a row of gains a layer. Its CPU kernel takes the
first layer's gains for every layer, so that a drafter of two layers or more is served with other keys than it was
trained with: answers stay right, and fewer drafts are accepted. A GPU's kernel reads the row of each layer.

Source: vllm/model_executor/models/qwen3_dflash.py (_normalize_context_k), vLLM 0.32; the same in XPU's kernel was
reported in vllm-project/vllm-xpu-kernels issue 573.
"""

from typing import Any

import torch
from torch import Tensor

from serving.engine.versions import SUPPORTED, installed_vllm


def repair_cpu_context_norm() -> bool:
    """Whether this process's drafters needed it to normalise their context as trained: on a CPU, whatever its package.

    A version that is not supported stays as it is: the swap and the capture refuse it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or installed_vllm()[1].partition("+")[0] not in SUPPORTED:
        return False
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = normalize_context_k
    return True


def normalize_context_k(model: Any, keys: Tensor) -> Tensor:  # [layers, n, key heads, E] -> the same
    """Every layer's keys by its own gains, with the kernel that vLLM uses."""
    from vllm import _custom_ops as ops

    normalized = torch.empty_like(keys)
    for out, layer, gain in zip(normalized, keys, model._k_norm_weights, strict=True):
        ops.rms_norm(out, layer, gain, model._rms_norm_eps)
    return normalized
