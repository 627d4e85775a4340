"""What a drafter's config.json says about positions and what its slots see, checked as vLLM reads it.

vLLM takes the first rope base that it finds, forgets a window that config.json does not switch on, and reads past the
end of a table of angles; this part of preflight refuses them by name.
"""

import os
from collections.abc import Mapping
from typing import Any

from serving.engine.versions import is_cpu_build
from serving.errors import PreflightError, VersionError
from serving.layout import rope_theta

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = ("default", "linear", "ntk", "dynamic", "yarn", "telechat3-yarn", "llama3", "proportional")


def check_attention(config: Mapping[str, Any]) -> None:
    """Raises: PreflightError on heads, a rope or windows that vLLM's DFlash would not run as they were trained."""
    _check_heads(config)
    _check_rope(config)
    _check_layers(config)


def _check_heads(config: Mapping[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    explicit = config.get("head_dim")
    is_count = isinstance(explicit, int) and not isinstance(explicit, bool) and explicit > 0
    if (explicit is None and config["hidden_size"] % heads) or (explicit is not None and not is_count):
        raise PreflightError(
            "head_dim", f"head_dim {explicit!r} with hidden size {config['hidden_size']}, {heads} heads"
        )
    if heads % kv_heads:
        raise PreflightError("head_dim", f"{heads} heads cannot share {kv_heads} key-value heads")


def _check_rope(config: Mapping[str, Any]) -> None:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    top, nested = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if top is None and (nested is None or config.get("rope_scaling")):  # beside which rope_parameters is not read
        raise PreflightError("rope_theta", "no rope_theta: an engine would take its own default; write the trained one")
    if None not in (top, nested) and float(top) != float(nested):
        raise PreflightError("rope_theta", f"rope_theta is {top} and, in rope_parameters, {nested}; keep one")
    if not rope_theta(config) > 0:
        raise PreflightError("rope_theta", f"rope_theta is {rope_theta(config)}; expected a positive number")
    if not isinstance(config.get("is_neox_style", True), bool):
        raise PreflightError("rope_style", f"is_neox_style is {config['is_neox_style']!r}; expected true or false")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPES or given.get("mrope_section") or given.get("use_fope"):
        raise PreflightError(
            "rope_kind", f"rope {given}: vLLM's DFlash runs {', '.join(_ROPES)}, of text positions; train it with one"
        )
    if kind == "linear" and not isinstance(given.get("factor"), float):
        raise PreflightError("rope_kind", f"rope 'linear' with factor {given.get('factor')!r}; vLLM wants one like 4.0")
    if "yarn" in kind or kind == "llama3":
        _check_original_length(kind, given, config)


def _check_original_length(kind: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Of the kinds that know a length before scaling. transformers looks for that at the top level first."""
    name, longest = "original_max_position_embeddings", config["max_position_embeddings"]
    original, factor = config.get(name, given.get(name, longest)), given.get("factor")
    needed = {name: original, "factor": factor}
    if kind == "llama3":
        needed |= {key: given.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    if not all(map(_is_positive, needed.values())):
        raise PreflightError(
            "rope_kind", f"rope {kind!r} with {needed}: expected positive numbers; write those that it was trained with"
        )
    if kind != "llama3" and original * factor < longest:
        raise PreflightError(
            "rope_length",
            f"rope {needed} ends before max_position_embeddings {longest}: vLLM reads past it; lower that",
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _check_layers(config: Mapping[str, Any]) -> None:
    dflash, types = config["dflash_config"], config.get("layer_types")
    if types is not None and len(types) != config["num_hidden_layers"]:
        raise PreflightError("layer_types", f"{len(types)} layer_types for {config['num_hidden_layers']} layers")
    if types is not None and (odd := set(types) - {_FULL, _SLIDING}):
        raise PreflightError("layer_types", f"{sorted(odd)}: vLLM's DFlash takes them for full attention")
    slides = [kind == _SLIDING for kind in types or _filled_in(config)]
    window = dflash.get("swa_window_size", config.get("sliding_window") if config.get("use_sliding_window") else None)
    if (any(slides) or dflash.get("use_swa")) and not (isinstance(window, int) and window > 0):
        raise PreflightError(
            "sliding_window",
            f"sliding layers with a window of {window!r}; write sliding_window and use_sliding_window = true, "
            "or dflash_config.swa_window_size",
        )
    if any(slides) and not all(slides) and _has_v1_runner_alone():
        raise PreflightError(
            "mixed_layers",
            "sliding and full layers in one drafter: vLLM serves them on its V2 model runner alone, which needs a GPU "
            "and VLLM_USE_V2_MODEL_RUNNER=1; train one kind of layer to serve it here",
        )


def _filled_in(config: Mapping[str, Any]) -> list[str]:
    """The layer_types that transformers' Qwen3Config makes where there are none."""
    slides = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    first = config.get("max_window_layers", 28)
    return [_SLIDING if slides and i >= first else _FULL for i in range(config["num_hidden_layers"])]


def _has_v1_runner_alone() -> bool:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return True
    try:
        return is_cpu_build()
    except VersionError:  # no vLLM here
        return False
