"""Which target, and measured how: the fingerprints that stop what cannot be compared from meeting."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts import TargetFingerprint
from pipeline.errors import ConfigError, FingerprintError

# Settings of a config.json that name a place or a release, not a model.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_SAMPLE_BYTES = 1 << 20


def target_fingerprint(model: Path, *, dtype: str, target_layer_ids: Sequence[int]) -> TargetFingerprint:
    """The fingerprint of a target folder as it would be served.

    The weights' identity hashes every safetensors header and the first, middle and last MiB of every
    file: seconds for any size, and another revision or fine-tune changes it.

    Raises: ConfigError when the folder is not a Hugging Face model folder with safetensors.
    """
    model = Path(model)
    config = model / "config.json"
    weights = sorted(model.glob("*.safetensors"))
    if not config.exists() or not weights:
        raise ConfigError(f"{model}: expected config.json and *.safetensors of the target; set target.model to it")
    settings = {k: v for k, v in json.loads(config.read_text()).items() if k not in _NOT_IDENTITY}
    return TargetFingerprint(
        config=_short(json.dumps(settings, sort_keys=True).encode()),
        tokenizer=_short(*(p.read_bytes() for p in _existing(model, "tokenizer.json", "tokenizer.model"))),
        chat_template=_short(_chat_template(model).encode()),
        weights=_short(*(part for path in weights for part in _weights_sample(path))),
        dtype=dtype,
        target_layer_ids=tuple(target_layer_ids),
    )


def fingerprint_id(fingerprint: TargetFingerprint) -> str:
    """The one name of a target as it is served, whatever layers are read of it: `slipstream status` prints it."""
    identity = fingerprint.model_dump(mode="json", exclude={"target_layer_ids"})
    return _short(json.dumps(identity, sort_keys=True).encode())


def require_present_target(made_for: TargetFingerprint | None, model: Path, *, dtype: str, where: str) -> None:
    """Raises: FingerprintError when something was made for another target than this one is now, whatever layers are
    read of it; what was made by hand carries no fingerprint, and passes."""
    if made_for is None:
        return
    layers = made_for.target_layer_ids
    present = target_fingerprint(model, dtype=dtype, target_layer_ids=layers)
    if fingerprint_id(present) != fingerprint_id(made_for):
        different = [name for name in type(present).model_fields if getattr(present, name) != getattr(made_for, name)]
        raise FingerprintError(
            f"{where}: made for another target than {model} is now ({', '.join(different)}: "
            f"{fingerprint_id(made_for)} != {fingerprint_id(present)}). Point target.model at the one it was made for; "
            "or, where the fleet serves the new one, `slipstream retire`, then `slipstream init-drafter` or `adopt`"
        )


def require_same_settings(first: Mapping[str, Any], second: Mapping[str, Any], *, where: str) -> None:
    """Raises: FingerprintError naming every setting that differs between two measurements, with both values."""
    different = [
        f"{name}: {first.get(name)!r} != {second.get(name)!r}"
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]
    if different:
        raise FingerprintError(
            f"{where}: measured with other settings ({'; '.join(different)}), so the two cannot be compared. "
            "Measure both again on one server."
        )


def _chat_template(model: Path) -> str:
    if (file := model / "chat_template.jinja").exists():
        return file.read_text()
    if (file := model / "tokenizer_config.json").exists():
        return json.dumps(json.loads(file.read_text()).get("chat_template"))
    return ""


def _weights_sample(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        samples = [path.name.encode(), str(size).encode(), file.read(min(header_bytes, size))]
        for start in (8 + header_bytes, size // 2, size - _SAMPLE_BYTES):
            file.seek(max(0, start))
            samples.append(file.read(_SAMPLE_BYTES))
    return samples


def _existing(folder: Path, *names: str) -> list[Path]:
    return [folder / name for name in names if (folder / name).exists()]


def _short(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
