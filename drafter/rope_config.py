"""Rope ↔ what config.json says about it, as transformers and vLLM read it.

Transformers: ``rope_scaling`` wins over ``rope_parameters``; what is not in there is taken from the top level.
vLLM (get_rope): the settings of ``_SETTINGS`` alone are looked at.
"""

import math
from collections.abc import Mapping
from typing import Any

from drafter.rope import Rope
from pipeline.errors import ConfigError

# Settings that a kind must have, and those that it may have.
_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ("mixed_b",)),
    "dynamic": (("factor",), ("alpha", "max_trained_positions")),  # factor: transformers', also beside alpha
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "proportional": ((), ()),
}
_NOT_RUN = {
    "longrope": "vLLM's DFlash finds no single table of angles in it",
    "deepseek_yarn": "vLLM's DFlash hands it heads that are not split",
    "deepseek_llama_scaling": "vLLM's DFlash hands it heads that are not split",
    "mrope": "a drafter reads text positions alone",
    "bailing_mrope": "a drafter reads text positions alone",
    "openpangu": "a drafter reads text positions alone",
    "mllama4": "it is of an image encoder",
}
_NOT_RUN_SETTINGS = {
    "mrope_section": "a drafter reads text positions alone",
    "use_fope": "vLLM's DFlash finds no single table of angles in it",
    "dual_chunk_attention_config": "vLLM's DFlash has no dual chunk attention",
}


def rope_of(config: Mapping[str, Any], *, head_dim: int, where: str) -> Rope:
    """The rope that a drafter's config.json describes.

    Raises: ConfigError when theta is missing or said twice, on a kind that vLLM's DFlash does not run, and on settings
    that it would fail or read past its table on.
    """
    given = _given(config, where)
    named = given.get("rope_type", given.get("type", "default"))
    kind = {"su": "longrope", "telechat3-yarn": "yarn"}.get(named, named)
    for name, reason in _NOT_RUN_SETTINGS.items():
        if given.get(name) or config.get(name):
            raise ConfigError(f"{where}: this trainer does not run rope with {name}: {reason}")
    if kind not in _SETTINGS:
        reason = _NOT_RUN.get(kind, f"known kinds: {', '.join(_SETTINGS)}")
        raise ConfigError(f"{where}: this trainer does not run rope {kind!r}: {reason}")
    rotary_dim = _rotary_dim(config, given, head_dim, where)
    parameters = _parameters(kind, given, config, where)
    if named == "telechat3-yarn":  # vLLM's rule
        parameters["attention_factor"] = 0.07 * math.log(parameters["factor"]) + 1.0
    if kind == "proportional":
        parameters, rotary_dim = {"num_turning_pairs": rotary_dim // 2}, head_dim
    return Rope(
        theta=_theta(config, given, where),
        rotary_dim=rotary_dim,
        is_interleaved=config.get("is_neox_style") is False,
        kind=kind,
        parameters=parameters,
    )


def rope_settings(rope: Rope, *, head_dim: int) -> dict[str, Any]:
    """The keys of config.json that describe this rope, every value written out."""
    turned = 2 * rope.parameters["num_turning_pairs"] if rope.kind == "proportional" else rope.rotary_dim
    settings = {name: value for name, value in rope.parameters.items() if name in _readable(rope.kind)}
    partial = {} if turned == head_dim else {"partial_rotary_factor": _share(turned, head_dim)}
    return {
        "is_neox_style": not rope.is_interleaved,
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **partial, **settings},
        "rope_theta": rope.theta,
    }


def scaling_of_target(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a new drafter takes over of its target's rope beside theta: its scaling, where vLLM's DFlash runs it.

    The drafter reads the target's positions. With the target's scaling, slow pairs turn no further over its whole
    length than they did over the original one, so that a drafter trained on short replies has seen those angles.
    Of a target with a rope for each kind of layer it is that of the layers which see everything, as theta is.
    """
    parameters = config.get("rope_parameters") or {}
    given = {**(parameters.get("full_attention", parameters) or {}), **(config.get("rope_scaling") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("linear", "dynamic", "yarn", "llama3") or given.get("mrope_section"):
        return {}
    settings = {name: given[name] for name in _readable(kind) if given.get(name) is not None}
    longest = config["max_position_embeddings"]
    if kind in ("yarn", "llama3"):
        settings["original_max_position_embeddings"] = _original(config, settings)
    if kind == "yarn" and "factor" not in settings:  # transformers' rule
        settings["factor"] = longest / settings["original_max_position_embeddings"]
    return {"rope_type": kind, **settings, "factor": float(settings["factor"])} if "factor" in settings else {}


def _given(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    scaling, parameters = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if scaling and parameters and any(scaling[k] != parameters[k] for k in scaling.keys() & parameters.keys()):
        raise ConfigError(f"{where}: rope_scaling = {scaling}, but rope_parameters = {parameters}; keep one")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError(
            f"{where}: rope_parameters has a rope for each kind of layer; vLLM's DFlash reads one for all"
        )
    if scaling and (lost := parameters.keys() - scaling.keys() - {"rope_theta", "rope_type"}):
        raise ConfigError(f"{where}: rope_parameters' {sorted(lost)} is not read beside rope_scaling; keep one")
    return dict(scaling or parameters)


def _theta(config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> float:
    top, nested = config.get("rope_theta"), given.get("rope_theta")
    if top is not None and nested is not None and float(top) != float(nested):
        raise ConfigError(f"{where}: rope_theta = {top}, but rope_parameters.rope_theta = {nested}; keep one")
    theta = top if nested is None else nested
    if theta is None and config.get("rope_scaling") and (config.get("rope_parameters") or {}).get("rope_theta"):
        raise ConfigError(
            f"{where}: rope_parameters.rope_theta is not read beside rope_scaling, and rope_theta is not there: write "
            "it out beside them"
        )
    if theta is None:
        raise ConfigError(f"{where}: has neither rope_theta nor rope_parameters.rope_theta: write it out")
    return float(theta)


def _rotary_dim(config: Mapping[str, Any], given: Mapping[str, Any], head_dim: int, where: str) -> int:
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else share
    if not 0 < share <= 1:
        raise ConfigError(f"{where}: partial_rotary_factor = {share}; expected more than 0, at most 1")
    size = given.get("rope_dim") or int(head_dim * share)
    if size % 2 or not 0 < size <= head_dim:
        raise ConfigError(f"{where}: rope turns {size} of {head_dim} dimensions of a head; expected an even number")
    return size


def _parameters(kind: str, given: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings = {name: given[name] for name in _readable(kind) if given.get(name) is not None}
    longest = config["max_position_embeddings"]
    if kind in ("yarn", "llama3"):
        settings["original_max_position_embeddings"] = _original(config, settings)
    if kind == "dynamic" and "alpha" in settings:
        settings.pop("max_trained_positions", None)  # vLLM does not look at it then
    elif kind == "dynamic":
        settings = {"max_trained_positions": longest, **settings, "max_position_embeddings": longest}
    if missing := [name for name in _SETTINGS[kind][0] if name not in settings]:
        raise ConfigError(f"{where}: rope {kind!r} has no {', '.join(missing)}; write it out")
    if odd := {name: settings[name] for name in _SETTINGS[kind][0] if not _is_positive(settings[name])}:
        raise ConfigError(f"{where}: rope {kind!r} has {odd}; expected positive numbers")
    if kind == "linear" and not isinstance(settings["factor"], float):
        raise ConfigError(
            f"{where}: rope 'linear' has factor {settings['factor']!r}, vLLM wants {settings['factor']}.0"
        )
    if kind == "yarn" and (table := settings["original_max_position_embeddings"] * settings["factor"]) < longest:
        raise ConfigError(
            f"{where}: rope 'yarn' knows {table:g} positions, max_position_embeddings is {longest}: vLLM would read "
            "past its table; lower max_position_embeddings"
        )
    return settings


def _original(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """The length before scaling, as transformers fills it in."""
    name = "original_max_position_embeddings"
    return config.get(name) or settings.get(name) or config["max_position_embeddings"]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _readable(kind: str) -> tuple[str, ...]:
    needed, optional = _SETTINGS[kind]
    return needed + optional


def _share(turned: int, head_dim: int) -> float:
    """A share of ``head_dim`` that int() makes ``turned`` dimensions of again."""
    share = turned / head_dim
    return share if int(head_dim * share) == turned else (turned + 0.5) / head_dim
