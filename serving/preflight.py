"""Everything about a drafter that vLLM does not check, checked before any engine gets it.

vLLM serves a drafter with missing tensors (they stay uninitialised), a wrong block size, unsorted layer
ids or another rope base without a word: answers stay right, and nothing is accepted. Each check here has
its own code.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import PreflightError
from serving.layout import expected_tensors, has_sinks, rope_theta, text_config
from serving.preflight_attention import check_attention
from serving.preflight_tensors import check_tensors

ARCHITECTURES = ("DFlashDraftModel",)
WEIGHTS = "model.safetensors"
MAX_CONFIG_BYTES, MAX_FILES, MAX_LAYERS = 2**20, 1000, 1000
_SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
# Settings that name a place, a release or our own bookkeeping: an engine reads none of them.
_NOT_SERVED = ("_name_or_path", "transformers_version", "auto_map", "use_cache", "slipstream")


@dataclass(frozen=True)
class DrafterInfo:
    """A drafter that passed."""

    folder: Path
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    sha256: str
    config: dict[str, Any]


def check_drafter(
    folder: Path,
    *,
    target_config: Mapping[str, Any],
    num_speculative_tokens: int | None = None,
    serving_config: Mapping[str, Any] | None = None,
) -> DrafterInfo:
    """What a drafter folder holds, once everything about it has been checked against the target.

    ``num_speculative_tokens`` is the running engine's, ``serving_config`` the config.json of the drafter
    it started with: an engine keeps the first one, so a later one may differ in weights alone.

    Raises: PreflightError with a code a check.
    """
    folder = Path(folder)
    _check_files(folder)
    config = read_config(folder)
    target = text_config(target_config)
    try:
        _check_config(config, target, num_speculative_tokens, serving_config)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PreflightError("config_value", f"a setting is of no kind that one is ({type(error).__name__}: {error})")
    check_tensors(folder / WEIGHTS, expected_tensors(config, target_hidden_size=target["hidden_size"]))
    return DrafterInfo(
        folder=folder,
        block_size=config["block_size"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        mask_token_id=config["dflash_config"]["mask_token_id"],
        sha256=sha256_file(folder / WEIGHTS),
        config=config,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """A drafter's config.json. Raises: PreflightError when it is missing or no JSON object."""
    path = Path(folder) / "config.json"
    if path.exists() and not (path.is_file() and path.stat().st_size <= MAX_CONFIG_BYTES):
        raise PreflightError("config_unreadable", f"{path}: no file of at most {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise PreflightError("config_missing", f"{path}: not there; a drafter folder needs config.json and {WEIGHTS}")
    except (ValueError, OSError, RecursionError) as error:
        raise PreflightError("config_unreadable", f"{path}: not readable JSON ({error}); write the checkpoint again")
    if not isinstance(config, dict):
        raise PreflightError("config_unreadable", f"{path}: holds a {type(config).__name__}, expected an object")
    return config


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def same_served_config(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Setting → its two values, for every setting an engine reads that differs."""
    left, right = _served(a), _served(b)
    return {k: (left.get(k), right.get(k)) for k in sorted({*left, *right}) if left.get(k) != right.get(k)}


def _served(config: Mapping[str, Any]) -> dict[str, Any]:
    served = {k: v for k, v in config.items() if k not in _NOT_SERVED and not k.startswith("slipstream_")}
    parameters = dict(served.pop("rope_parameters", None) or {})
    parameters.pop("rope_theta", None)
    parameters.pop("rope_type", None) if parameters.get("rope_type") == "default" else None
    served["dtype"] = str(served.pop("torch_dtype", served.get("dtype"))).removeprefix("torch.")
    served["rope_theta"], served["rope_parameters"] = rope_theta(config), parameters
    return served


def _check_files(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        found = "a symbolic link" if folder.is_symlink() else "no folder"
        raise PreflightError("folder", f"{folder}: is {found}; expected a real folder with config.json and {WEIGHTS}")
    if not (folder / WEIGHTS).is_file():
        raise PreflightError("weights_missing", f"{folder / WEIGHTS}: not there; write the checkpoint again")
    root = folder.resolve()
    found = list(itertools.islice(folder.rglob("*"), MAX_FILES + 1))
    if len(found) > MAX_FILES:
        raise PreflightError("folder", f"{folder}: over {MAX_FILES} files; expected a drafter's own folder")
    for path in sorted(found):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise PreflightError("symlink", f"{path}: links out of the folder to {path.resolve()}; copy the file in")
        if path.name == "mask_embedding.pt":
            raise PreflightError(
                "mask_embedding",
                f"{path}: vLLM would read it, but a version's hashes and a swap know config.json and {WEIGHTS} alone; "
                "serve this drafter by hand, or train one that takes the target's embedding of its mask token",
            )
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"):
            raise PreflightError("pickle", f"{path}: can run code when loaded; only safetensors are served, remove it")
        if path.suffix == ".safetensors" and path.name != WEIGHTS:
            raise PreflightError("extra_weights", f"{path}: vLLM would load it too; expected {WEIGHTS} alone")


def _check_config(
    config: Mapping[str, Any],
    target: Mapping[str, Any],
    num_speculative_tokens: int | None,
    serving_config: Mapping[str, Any] | None,
) -> None:
    _check_architecture(config)
    _check_block(config, num_speculative_tokens)
    _check_against_target(config, target)
    check_attention(config)
    if serving_config is not None:
        _check_same_config(config, serving_config)
        if has_sinks(config):  # attention objects stay, and theirs with them
            raise PreflightError("sinks", "a swap would keep the old drafter's attention sinks; restart with this one")


def _check_architecture(config: Mapping[str, Any]) -> None:
    architectures = tuple(config.get("architectures") or ())
    if architectures != ARCHITECTURES or config.get("model_type") != "qwen3":
        raise PreflightError(
            "architecture",
            f"architectures {list(architectures)}, model_type {config.get('model_type')!r}; "
            f"expected {list(ARCHITECTURES)} and 'qwen3'",
        )
    if config.get("quantization_config") or config.get("quantization"):
        raise PreflightError("quantized", "config.json has a quantisation; serve the drafter in bf16, fp16 or fp32")
    for key in _SHAPE_KEYS:
        if not _is_count(config.get(key)):
            raise PreflightError("config_value", f"{key} is {config.get(key)!r}; expected a positive whole number")
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise PreflightError(
            "config_value", f"num_hidden_layers is {config['num_hidden_layers']}; expected a drafter's"
        )
    dflash = config.get("dflash_config")
    if not isinstance(dflash, Mapping):
        raise PreflightError("config_value", f"dflash_config is {dflash!r}; expected mask_token_id, target_layer_ids")
    for holder in (config, dflash):
        if holder.get("predicts_from_slot0") or holder.get("sample_from_anchor"):
            raise PreflightError("slot0", "the drafter predicts from the anchor's slot; vLLM reads slots 1 onwards")
        if holder.get("use_aux_hidden_state") is False:
            raise PreflightError("no_target_states", "use_aux_hidden_state is false; DFlash reads the target's states")


def _check_block(config: Mapping[str, Any], num_speculative_tokens: int | None) -> None:
    block_size = config.get("block_size")
    if not _is_count(block_size) or block_size < 2:
        raise PreflightError("block_size", f"block_size is {block_size!r}; expected 2 or more, the anchor counted")
    # Fewer than a block is a choice that can be faster; more are slots that were never trained.
    if num_speculative_tokens is not None and not 1 <= num_speculative_tokens <= block_size - 1:
        raise PreflightError(
            "num_speculative_tokens",
            f"the engine drafts {num_speculative_tokens} tokens, a block of {block_size} holds {block_size - 1}; "
            "restart it with that number or fewer, or train for its block",
        )


def _check_against_target(config: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    # The embedding and the head are the target's own, so these two must agree; heads and rope are the drafter's.
    for key in ("hidden_size", "vocab_size"):
        if config[key] != target[key]:
            raise PreflightError(key, f"drafter {config[key]}, target {target[key]}; they share embedding and head")
    if config.get("draft_vocab_size") not in (None, target["vocab_size"]):
        raise PreflightError("vocab_size", f"draft_vocab_size {config['draft_vocab_size']} is a reduced vocabulary")
    if config.get("target_hidden_size") not in (None, target["hidden_size"]):
        raise PreflightError(
            "target_hidden_size", f"drafter says {config['target_hidden_size']}, the target has {target['hidden_size']}"
        )
    depth = target["num_hidden_layers"]
    if config.get("num_target_layers") not in (None, depth):
        raise PreflightError(
            "num_target_layers", f"trained on {config['num_target_layers']} layers, target has {depth}"
        )
    ids = config["dflash_config"].get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(_is_index(i) for i in ids):
        raise PreflightError("target_layer_ids", f"target_layer_ids is {ids!r}; expected 0-based decoder layers")
    if sorted(set(ids)) != ids:
        raise PreflightError(
            "target_layer_order", f"target_layer_ids {ids} repeat or are unsorted: vLLM sorts them and fc reads others"
        )
    if ids[-1] >= depth:
        raise PreflightError("target_layer_range", f"target_layer_ids {ids}, the target has layers 0 to {depth - 1}")
    mask = config["dflash_config"].get("mask_token_id")
    if not _is_index(mask) or mask >= target["vocab_size"]:
        raise PreflightError("mask_token_id", f"mask_token_id {mask!r}, expected an id under {target['vocab_size']}")


def _check_same_config(config: Mapping[str, Any], serving: Mapping[str, Any]) -> None:
    if different := same_served_config(config, serving):
        listed = "; ".join(f"{key}: {new!r}, serving {old!r}" for key, (new, old) in different.items())
        raise PreflightError(
            "config_differs", f"{listed}. A swap changes weights alone: train from the champion, or restart with this"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
