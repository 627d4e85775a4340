"""How the traffic drew its replies, beyond temperature and top-p: what a request may ask of the target again.

The settings of a request are one JSON text, by vLLM's names, in a fixed order. A setting that the request did not make
is absent, so "{}" is a plain request. One that it did make stays even where it says what vLLM does anyway: the target's
generation_config.json may say otherwise, and the request overrode that.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import Rejected

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of structured output: one at a time
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_GUIDED = {  # how vLLM called them before it had structured_outputs
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
# What changes a reply or its prompt and cannot be asked of the target again here: a forced tool call, for one, is a
# grammar that vLLM's chat route makes of the tools, and an engine that gets ids knows no tools.
_UNSUPPORTED = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "repetition_detection",
    "thinking_token_budget",
    "vllm_xargs",
    "truncate_prompt_tokens",
    "documents",
    "chat_template",
    "continue_final_message",
    "echo",
)
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("auto", "none"),
    "add_generation_prompt": (True,),
}


def settings_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The further settings that a request made, checked, in the order of vLLM's names below.

    Raises: Rejected with ``unsupported_NAME`` or ``malformed_NAME``.
    """
    for name in _UNSUPPORTED:
        if params.get(name):
            raise Rejected(f"unsupported_{name}")
    for name, allowed in _ONLY.items():
        if params.get(name) is not None and params[name] not in allowed:
            raise Rejected(f"unsupported_{name}")
    found = {name: check(name, params[name]) for name, check in _CHECKS.items() if params.get(name) is not None}
    structured = _structured_outputs(params)
    plain = {"stop": [], "stop_token_ids": [], "ignore_eos": False, "min_tokens": 0}  # no server has other defaults
    kept = {name: value for name, value in found.items() if name not in plain or value != plain[name]}
    return kept | ({"structured_outputs": structured} if structured else {})


def as_text(settings: Mapping[str, Any]) -> str:
    """The settings as the JSON text of schemas.PROMPTS. A schema's own order stays: it is the order of the output."""
    return json.dumps(settings, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def within(sampling: str | None, *, max_tokens: int) -> str:
    """The settings for a reply of at most so many tokens: vLLM refuses a min_tokens above the budget."""
    settings = json.loads(sampling or "{}")
    if settings.get("min_tokens", 0) > max_tokens:
        settings["min_tokens"] = max_tokens
    return as_text(settings)


def measured(sampling: str | None, *, temperature: float | None, max_tokens: int) -> str:
    """The settings of a held-out prompt, the same where the target answers it, where it is served and where it is
    walked.

    Without stop strings: a reply that ends at one has no acceptance counts in vLLM. Greedily also without top_k and
    min_p, which then do nothing.
    """
    left_out = ("stop",) if temperature != 0 else ("stop", "top_k", "min_p")
    settings = json.loads(within(sampling, max_tokens=max_tokens))
    return as_text({name: value for name, value in settings.items() if name not in left_out})


def number(params: Mapping[str, Any], name: str, *, low: float, high: float) -> float | None:
    """A number setting within its bounds, None where the request did not make it. Raises: Rejected."""
    value = params.get(name)
    return None if value is None else _number(low, high)(name, value)


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Rejected(f"malformed_{name}")
        if above and value == low:
            raise Rejected(f"malformed_{name}")
        return float(value)

    return check


def _integer(low: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise Rejected(f"malformed_{name}")
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Rejected(f"malformed_{name}")
    return value


def _strings(name: str, value: Any) -> list[str]:
    value = [value] if isinstance(value, str) and value else value
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise Rejected(f"malformed_{name}")
    return value


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise Rejected(f"malformed_{name}")
    return [_integer(0)(name, token) for token in value]


# Ranges as vLLM's SamplingParams has them.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "top_k": _integer(-1),
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(0.0, float(2**31), above=True),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "min_tokens": _integer(0),
}


def _structured_outputs(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """The constraint of the reply as vLLM's StructuredOutputsParams takes it, whatever it was called."""
    given = params.get("structured_outputs") or {}
    if not isinstance(given, dict):
        raise Rejected("malformed_structured_outputs")
    guided = {ours: params[theirs] for theirs, ours in _GUIDED.items() if params.get(theirs) is not None}
    found = {**guided, **given, **_response_format(params.get("response_format"))}
    found = {name: value for name, value in found.items() if value not in (None, False)}
    kinds = [name for name in _KINDS if name in found]
    if not found:
        return None
    if len(kinds) != 1 or not set(found) <= {*_KINDS, *_OPTIONS}:
        raise Rejected("malformed_structured_outputs")
    (kind,) = kinds
    options = {name: found[name] for name in _OPTIONS if name in found}
    return {kind: _constraint(kind, found[kind]), **options}


def _response_format(value: Any) -> dict[str, Any]:
    """OpenAI's form of the same."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Rejected("malformed_response_format")
    match value.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
                raise Rejected("malformed_response_format")
            return {"json": described["schema"]}
        case _:
            raise Rejected("unsupported_response_format")


def _constraint(kind: str, value: Any) -> Any:
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Rejected("malformed_structured_outputs")
    sound = {
        "json": isinstance(value, dict),
        "json_object": value is True,
        "choice": isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value),
    }.get(kind, isinstance(value, str) and bool(value))
    if not sound:
        raise Rejected("malformed_structured_outputs")
    return value
