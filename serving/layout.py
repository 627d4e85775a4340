"""The z-lab drafter layout: which tensors a config.json asks for, and how to read its settings."""

from collections.abc import Mapping
from typing import Any


def expected_tensors(config: Mapping[str, Any], *, target_hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape, everything model.safetensors must hold and nothing else."""
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], head_dim(config)
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    num_states = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_states * target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        attention = {
            "q_proj.weight": (query, hidden),
            "k_proj.weight": (kv, hidden),
            "v_proj.weight": (kv, hidden),
            "o_proj.weight": (hidden, query),
            "q_norm.weight": (head,),
            "k_norm.weight": (head,),
        }
        if config.get("attention_bias"):
            attention |= {"q_proj.bias": (query,), "k_proj.bias": (kv,), "v_proj.bias": (kv,), "o_proj.bias": (hidden,)}
        if has_sinks(config):
            attention["attention_sink_bias"] = (config["num_attention_heads"],)
        mlp = {"gate_proj.weight": (wide, hidden), "up_proj.weight": (wide, hidden), "down_proj.weight": (hidden, wide)}
        shapes |= {f"layers.{i}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"layers.{i}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def has_sinks(config: Mapping[str, Any]) -> bool:
    """Whether each head has a learned attention sink."""
    return bool(config["dflash_config"].get("attention_sink_bias", config.get("add_swa_attention_sink_bias", False)))


def head_dim(config: Mapping[str, Any]) -> int:
    """The drafter's head size, as vLLM takes it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """The rope base that the config spells out, or None where an engine would fall back to its default."""
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return None if theta is None else float(theta)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a target's config.json, which multimodal targets nest."""
    return config.get("text_config") or config
