"""What each drafter layer sees ↔ what config.json says about it, as transformers' Qwen3Config and vLLM read it.

Source: vLLM 0.32, model_executor/models/qwen3_dflash.py (``_resolve_layer_attention``, ``_dflash_layer_causal``);
a window that is not causal is symmetric there: v1/attention/backends/flash_attn.py, ``_maybe_symmetrize_window``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifacts import Frozen
from pipeline.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


class LayerAttention(Frozen):
    """What the slots of a block see in one layer.

    A slot at position p sees position j where |p - j| < window: states of the context, before the anchor, and slots
    of its own block, those after it only where the layer is not causal.
    """

    window: int | None = None
    """Positions that a slot sees to a side, its own counted; None: all."""
    is_causal: bool = False


def layers_of(config: Mapping[str, Any], *, where: str) -> tuple[LayerAttention, ...]:
    """The layers that a drafter's config.json describes.

    Raises: ConfigError on a kind of layer that vLLM would take for a full one, and on a window without a size.
    """
    dflash, kinds = config["dflash_config"], _kinds(config)
    if len(kinds) != config["num_hidden_layers"] or (odd := set(kinds) - {FULL, SLIDING}):
        found = f"{len(kinds)} layer_types" if len(kinds) != config["num_hidden_layers"] else f"layer_types {odd}"
        raise ConfigError(
            f"{where}: {found} for {config['num_hidden_layers']} layers; expected {FULL} or {SLIDING} for each"
        )
    all_slide = bool(dflash.get("use_swa")) and SLIDING not in kinds
    slides = [all_slide or kind == SLIDING for kind in kinds]
    # Qwen3Config forgets sliding_window unless use_sliding_window is true; dflash_config's own survives.
    window = dflash.get("swa_window_size", config.get("sliding_window") if config.get("use_sliding_window") else None)
    if any(slides) and not (isinstance(window, int) and window > 0):
        raise ConfigError(
            f"{where}: sliding layers without a window: write sliding_window and use_sliding_window = true, or "
            f"dflash_config.swa_window_size (found {window!r})"
        )
    stated = config.get("is_causal")
    stated = dflash.get("causal") if stated is None else stated
    return tuple(
        LayerAttention(window=window if slide else None, is_causal=kind == SLIDING if stated is None else bool(stated))
        for kind, slide in zip(kinds, slides, strict=True)
    )


def layer_settings(layers: Sequence[LayerAttention]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of config.json, and those of its dflash_config, that describe these layers.

    Raises: ConfigError on layers that no config.json can describe: windows of two sizes; causal and other layers where
    the causal ones are not the sliding ones.
    """
    windows = {layer.window for layer in layers} - {None}
    if len(windows) > 1:
        raise ConfigError(f"layers with windows of {sorted(windows)}: vLLM's DFlash reads one size for all; use one")
    top = {
        "layer_types": [FULL if layer.window is None else SLIDING for layer in layers],
        "sliding_window": min(windows, default=None),
        "use_sliding_window": bool(windows),
    }
    causal = {layer.is_causal for layer in layers}
    if len(causal) == 1:
        return top, {"causal": causal.pop()}
    if any(layer.is_causal != (layer.window is not None) for layer in layers):
        raise ConfigError(
            "some layers are causal, and they are not the sliding ones: vLLM's DFlash reads one setting for all, or "
            "causal from sliding; make all alike, or the sliding ones causal"
        )
    return top, {}  # from layer_types: the sliding ones are causal


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """layer_types, as Qwen3Config fills them in."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    slides = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    first = config.get("max_window_layers", 28)
    return [SLIDING if slides and i >= first else FULL for i in range(config["num_hidden_layers"])]
