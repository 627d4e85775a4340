"""Drafters on disk, in the z-lab layout that stock vLLM loads.

Training is in float32. On disk a new drafter is bf16, and one that was loaded keeps the dtype of each tensor and its
config.json to the byte, so that a checkpoint that was only read and written again is the same file.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.frozen import INDEX, FrozenTarget
from drafter.model import Drafter
from drafter.shape import DrafterShape, config_of, shape_of
from pipeline.artifacts import publish, write_durably
from pipeline.errors import ConfigError, SchemaError

CONFIG, WEIGHTS, MASK_EMBEDDING = "config.json", "model.safetensors", "mask_embedding.pt"
_MASK = "mask_embedding"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kept:
    """What a checkpoint says that training does not change."""

    config_text: str
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Of its tensors; bf16 where a tensor is not named."""
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    """Of model.safetensors."""
    mask_embedding: Any = None
    """mask_embedding.pt as it was: a tensor, or a dict with one."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return json.loads(self.config_text)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Kept":
        """A bf16 checkpoint with this config.json."""
        return cls(json.dumps(config, indent=2, sort_keys=True) + "\n")


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


def load_drafter(folder: Path) -> tuple[Drafter, Kept]:
    """A drafter in float32, and what to write it back with.

    Raises: SchemaError on a cut file, missing, extra, misshapen, quantised or non-finite tensors; ConfigError on a
    shape that this trainer does not run.
    """
    folder = Path(folder)
    text = _read_text(folder / CONFIG)
    given = _read_mask_embedding(folder / MASK_EMBEDDING)
    config = _parse(text, folder / CONFIG)
    drafter = Drafter(shape_of(config, where=str(folder / CONFIG), has_mask_embedding=given is not None))
    tensors, metadata = _read_tensors(folder)
    if given is not None:
        tensors[_MASK] = _embedding_in(given, drafter.shape.mask_token_id, folder / MASK_EMBEDDING)
    _check(drafter, tensors, folder)
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return drafter, Kept(text, {name: tensor.dtype for name, tensor in tensors.items()}, metadata, given)


def save_drafter(folder: Path, drafter: Drafter, kept: Kept | None = None) -> tuple[Path, ...]:
    """Paths of the files written: config.json, model.safetensors and, if it has one, mask_embedding.pt.

    Raises: ConfigError when the kept config.json describes another shape than the one that was trained: a rope,
    windows or a mask that serving would compute differently.
    """
    kept = kept or Kept.of(config_of(drafter.shape))
    described = shape_of(kept.config, where=CONFIG, has_mask_embedding=drafter.shape.has_mask_embedding)
    if described != drafter.shape:
        theirs, ours = described.model_dump(), drafter.shape.model_dump()
        different = "; ".join(f"{k}: {theirs[k]!r}, trained {ours[k]!r}" for k in ours if theirs[k] != ours[k])
        raise ConfigError(f"{folder / CONFIG} would not describe the drafter that was trained: {different}")
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / CONFIG, kept.config_text.encode())
    tensors = {
        name: p.detach().to("cpu", kept.dtypes.get(name, torch.bfloat16)).contiguous()
        for name, p in drafter.named_parameters()
    }
    mask = tensors.pop(_MASK, None)
    _publish(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata=dict(kept.metadata) or None))
    if mask is not None:
        _publish(folder / MASK_EMBEDDING, lambda path: torch.save(_with_embedding(kept.mask_embedding, mask), path))
    return tuple(folder / name for name in files_of(folder))


def files_of(folder: Path) -> tuple[str, ...]:
    """Names of the files that make up the drafter in a folder that ``save_drafter`` wrote."""
    return tuple(name for name in (CONFIG, WEIGHTS, MASK_EMBEDDING) if (Path(folder) / name).exists())


def _check(drafter: Drafter, tensors: Mapping[str, Tensor], folder: Path) -> None:
    expected = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if own := sorted(name for name in found.keys() - expected.keys() if _is_the_targets(name)):
        raise SchemaError(
            f"{folder / WEIGHTS}: holds {own}, an embedding, a head or a vocabulary of its own. Training borrows the "
            "target's, and a swap refuses others: export the drafter without them, or train it where it was made"
        )
    if found != expected:
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [f"{n} {found[n]} instead of {expected[n]}" for n in found.keys() & expected if found[n] != expected[n]]
        raise SchemaError(f"{folder / WEIGHTS}: missing {missing}, unexpected {extra}, misshapen {wrong}")
    if odd := {name: str(tensor.dtype) for name, tensor in tensors.items() if tensor.dtype not in _FLOATS}:
        raise SchemaError(f"{folder / WEIGHTS}: {odd} look quantised; start from the bf16 release of this drafter")
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise SchemaError(f"{folder / WEIGHTS}: not finite: {bad}; this checkpoint must not be used")


def _is_the_targets(name: str) -> bool:
    return any(part in name for part in ("embed_tokens", "lm_head", "d2t", "t2d"))


def _embedding_in(given: Any, mask_token_id: int, path: Path) -> Tensor:  # [H]
    """The embedding that vLLM takes out of mask_embedding.pt."""
    if isinstance(given, dict):
        if given.get("mask_token_id", mask_token_id) != mask_token_id:
            raise SchemaError(
                f"{path}: of token {given['mask_token_id']}, dflash_config.mask_token_id is {mask_token_id}"
            )
        given = given.get("embedding")
    if not isinstance(given, Tensor):
        raise SchemaError(f"{path}: holds a {type(given).__name__}; expected a tensor, or a dict with an 'embedding'")
    return given.reshape(-1)


def _with_embedding(given: Any, mask: Tensor) -> Any:
    if isinstance(given, dict):
        return {**given, "embedding": mask.view_as(given["embedding"])}
    return mask if given is None else mask.view_as(given)


def _publish(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    write(temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    publish(temporary, path)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path}: not a readable drafter config ({error})")


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SchemaError(f"{path}: not a readable drafter config ({error})")


def _read_mask_embedding(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds on a cut or unsafe file
        raise SchemaError(f"{path}: not a tensor that can be read safely ({error})")


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and the file's metadata, of one file or of the shards that an index names."""
    index = folder / INDEX
    names = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and index.exists():
        names = set(_parse(_read_text(index), index)["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in sorted(folder / name for name in names):
        if not path.exists():
            raise SchemaError(f"{path}: missing; a drafter folder holds {CONFIG} and {WEIGHTS}")
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                metadata |= file.metadata() or {}
        except (SafetensorError, OSError, ValueError) as error:
            raise SchemaError(f"{path}: not a whole safetensors file ({error})")
    return tensors, metadata
