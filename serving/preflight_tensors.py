"""The weights of a drafter, against the tensors that its config.json asks for; a part of serving/preflight.py."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from serving.errors import PreflightError

FLOAT_DTYPES = ("F32", "BF16", "F16")


def check_tensors(path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises: PreflightError unless the file holds these tensors, finite, of one float kind, and nothing else."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            _check_names(names, expected)
            dtypes = {name: file.get_slice(name).get_dtype() for name in names}
            if odd := {n: d for n, d in dtypes.items() if d not in FLOAT_DTYPES}:
                raise PreflightError("quantized", f"{path}: {odd}; expected {', '.join(FLOAT_DTYPES)}")
            if len(set(dtypes.values())) > 1:
                raise PreflightError("mixed_dtypes", f"{path}: {sorted(set(dtypes.values()))}; expected one dtype")
            for name, shape in expected.items():
                _check_tensor(name, file.get_tensor(name), shape)
    except (SafetensorError, OSError) as error:
        raise PreflightError(
            "weights_unreadable", f"{path}: not a whole safetensors file ({error}); it may be half-written"
        )


def _check_names(names: set[str], expected: Mapping[str, tuple[int, ...]]) -> None:
    if shared := sorted(n for n in names if "embed_tokens" in n or "lm_head" in n):
        raise PreflightError("owns_embedding", f"{shared} would overwrite the target's; write the drafter without them")
    if missing := sorted(set(expected) - names):
        raise PreflightError("missing_tensors", f"{missing}: vLLM would leave them uninitialised; write it again")
    if extra := sorted(names - set(expected)):
        raise PreflightError("extra_tensors", f"{extra}: not in the layout that config.json describes")


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise PreflightError("wrong_shape", f"{name} is {list(tensor.shape)}, config.json asks for {list(shape)}")
    if not torch.isfinite(tensor).all():
        raise PreflightError("not_finite", f"{name} has NaN or infinite values; keep an earlier checkpoint")
    if not name.endswith(".bias") and not tensor.any():
        raise PreflightError("zero_tensor", f"{name} is all zeros; it was never initialised or was lost on the way")
