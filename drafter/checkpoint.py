"""Drafters on disk, in the z-lab layout that stock vLLM loads."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.shape import DrafterShape, config_of, shape_of
from pipeline.artifacts import publish, write_durably
from pipeline.errors import SchemaError

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def cold_start(shape: DrafterShape, frozen: FrozenTarget, *, seed: int) -> Drafter:
    """A new drafter: small random matrices, outputs of residual branches near zero, the target's final gain.

    With the target's own gain before the target's own head, the first guesses are already plausible tokens.
    """
    drafter = Drafter(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                std = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= (2 * shape.num_hidden_layers) ** -0.5
                parameter.normal_(0.0, std, generator=generator)
        drafter.norm.weight.copy_(frozen.final_norm)
    return drafter


def load_drafter(folder: Path) -> tuple[Drafter, dict[str, Any]]:
    """A drafter in float32 and its config.json as it stands.

    Raises: SchemaError on a cut file, missing, extra, misshapen or non-finite tensors; ConfigError on a shape that this
    trainer does not run.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    drafter = Drafter(shape_of(config, where=str(folder / CONFIG)))
    tensors = _read_tensors(folder / WEIGHTS)
    expected = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if found != expected:
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [f"{n} {found[n]} instead of {expected[n]}" for n in found.keys() & expected if found[n] != expected[n]]
        raise SchemaError(f"{folder / WEIGHTS}: missing {missing}, unexpected {extra}, misshapen {wrong}")
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise SchemaError(f"{folder / WEIGHTS}: not finite: {bad}; this checkpoint must not be used")
    drafter.load_state_dict(tensors)
    return drafter, config


def save_drafter(folder: Path, drafter: Drafter, config: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """Paths of config.json and the bf16 model.safetensors; a warm-started drafter keeps its config as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config or config_of(drafter.shape), indent=2, sort_keys=True) + "\n"
    write_durably(folder / CONFIG, text.encode())
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in drafter.named_parameters()}
    temporary = folder / f".{WEIGHTS}.{os.getpid()}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    publish(temporary, folder / WEIGHTS)
    return folder / CONFIG, folder / WEIGHTS


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path}: not a readable drafter config ({error})")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise SchemaError(f"{path}: missing; a drafter folder holds {CONFIG} and {WEIGHTS}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - not a dict
    except Exception as error:  # safetensors raises its own, untyped error on a cut file
        raise SchemaError(f"{path}: not a whole safetensors file ({error})")
