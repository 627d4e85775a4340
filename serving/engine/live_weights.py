"""What the drafter in the engine computes with, against the tensors of a file.

CPU linears repack their weights and empty the parameter, so nothing there can be read back. One-hot rows
pushed through a live linear return its columns, bit for bit, whatever the storage: that is the test, and
the hash of those columns is the fingerprint of what serves.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MAX_COLUMNS = 256
_EXACT = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 2.0**-20}


def live_fingerprint(model: Any) -> str:
    """16 hex digits that name the weights a live drafter computes with, equal on every like worker."""
    digest = hashlib.sha256()
    for name, value in live_values(model):
        digest.update(f"{name} {list(value.shape)}".encode())
        digest.update((value + 0.0).contiguous().numpy().tobytes())  # + 0.0: a negative zero is a zero
    return digest.hexdigest()[:16]


def mismatches(model: Any, weights: Path) -> list[str]:
    """The live parts that differ from the file's tensors, with the largest difference; empty when it serves them."""
    expected = dict(_expected_values(model, load_file(weights)))
    found = []
    for name, value in live_values(model):
        want = expected.pop(name)
        tolerance = _EXACT[_dtype(model)] * want.abs().max() + 1e-30  # AMX flushes denormals to zero
        worst = (value - want).abs().max() if value.shape == want.shape else torch.tensor(float("inf"))
        if not bool(worst <= tolerance):  # not: NaN must count as different
            found.append(f"{name} is off by {float(worst):.3g}")
    return found + [f"{name} has no live counterpart" for name in expected]


def live_values(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name → float32 values on the host, of every linear, norm and fused buffer that drafting uses."""
    inner = model.model
    yield "fc", _columns(inner.fc)
    yield "hidden_norm", _host(inner.hidden_norm.weight)
    yield "norm", _host(inner.norm.weight)
    for i, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, linear in (
            ("qkv_proj", attention.qkv_proj),
            ("o_proj", attention.o_proj),
            ("gate_up_proj", mlp.gate_up_proj),
            ("down_proj", mlp.down_proj),
        ):
            yield f"layers.{i}.{name}", _columns(linear)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"layers.{i}.{name}", _host(getattr(layer, name).weight)
        yield f"layers.{i}.q_norm", _host(attention.q_norm.weight)
        yield f"layers.{i}.k_norm", _host(attention.k_norm.weight)
    # The path that writes context keys and values has its own copies, built once after loading.
    yield "fused_kv_weight", _host(inner._fused_kv_weight)
    yield "fused_k_norms", _host(inner._k_norm_weights)
    yield "fused_hidden_norm", _host(inner._hidden_norm_weight)


def rope_problem(model: Any) -> str | None:
    """Why the drafter's rope cache cannot be right, or None. In-place reloads leave it on the meta device."""
    caches = [layer.self_attn.rotary_emb.cos_sin_cache for layer in model.model.layers]
    caches.append(model.model._rope_cos_sin_cache)
    if any(cache.is_meta for cache in caches):
        return "a rope cache is on the meta device"
    first = _host(caches[0][:2])
    half = first.shape[1] // 2
    unit = bool(((first[:, :half] ** 2 + first[:, half:] ** 2) - 1).abs().max() < 0.02)
    scaled = getattr(model.model.layers[0].self_attn.rotary_emb, "mscale", None) is not None
    return None if unit or scaled else "the rope cache holds no rotations"


def _expected_values(model: Any, file: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    dtype = _dtype(model)

    def host(name: str) -> torch.Tensor:
        return file[name].to(dtype).float()

    def columns(*names: str) -> torch.Tensor:
        weight = torch.cat([host(name) for name in names])
        return weight[:, _probe_columns(weight.shape[1])].T

    yield "fc", columns("fc.weight")
    yield "hidden_norm", host("hidden_norm.weight")
    yield "norm", host("norm.weight")
    kv_weights, k_norms = [], []
    for i in range(len(model.model.layers)):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        yield f"layers.{i}.qkv_proj", columns(*(f"{attention}.{part}_proj.weight" for part in "qkv"))
        yield f"layers.{i}.o_proj", columns(f"{attention}.o_proj.weight")
        yield f"layers.{i}.gate_up_proj", columns(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        yield f"layers.{i}.down_proj", columns(f"{mlp}.down_proj.weight")
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"layers.{i}.{name}", host(f"layers.{i}.{name}.weight")
        yield f"layers.{i}.q_norm", host(f"{attention}.q_norm.weight")
        yield f"layers.{i}.k_norm", host(f"{attention}.k_norm.weight")
        kv_weights += [host(f"{attention}.k_proj.weight"), host(f"{attention}.v_proj.weight")]
        k_norms.append(host(f"{attention}.k_norm.weight"))
    yield "fused_kv_weight", torch.cat(kv_weights)
    yield "fused_k_norms", torch.stack(k_norms)
    yield "fused_hidden_norm", host("hidden_norm.weight")


def _columns(linear: Any) -> torch.Tensor:
    """[columns, output]: what a live linear makes of one-hot rows."""
    width = linear.input_size_per_partition if hasattr(linear, "input_size_per_partition") else linear.input_size
    chosen = _probe_columns(width)
    rows = torch.zeros(len(chosen), width, dtype=linear.params_dtype, device=linear.weight.device)
    rows[torch.arange(len(chosen)), chosen] = 1
    with torch.inference_mode():
        return _host(linear.quant_method.apply(linear, rows, None))


def _probe_columns(width: int) -> torch.Tensor:
    return torch.linspace(0, width - 1, min(width, MAX_COLUMNS)).round().long()


def _dtype(model: Any) -> torch.dtype:
    return model.model.fc.params_dtype


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32)
