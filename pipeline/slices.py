"""Which groups a request is in, dimension by dimension: what is reported apart, and may not get worse unseen.

What only the request says (its route, tenant, language, thinking) is written down when it is collected; what depends
on how it is rendered and sampled (length, temperature) is added when it is served.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN = "unknown"

_MIN_LETTERS = 20  # of shorter texts a language detector only guesses
_MAX_CHARS = 200  # enough to tell 97 languages apart, and most of what collecting a record costs
_THINKING = ("enable_thinking", "thinking")  # how templates call the switch
_LENGTHS = (128, 512, 2048, 8192)  # prompt tokens: upper ends of the buckets
_TEMPERATURES = (0.0, 0.5, 1.0)


def collected_slices(
    body: Mapping[str, Any], *, route: str, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
) -> dict[str, str]:
    """Dimension → value of a served request: its own ``slices``, and route, tenant, language and thinking."""
    own = body.get("slices") if isinstance(body.get("slices"), dict) else {}
    thinking = next((template_args[name] for name in _THINKING if name in template_args), None)
    found = {
        "route": route,
        "tenant": body.get("tenant"),
        "language": language(messages),
        "thinking": None if thinking is None else "on" if thinking else "off",
        **own,
    }
    return {str(dimension): str(value) for dimension, value in found.items() if value not in (None, "")}


def language(messages: Sequence[Mapping[str, Any]]) -> str:
    """The language code of the last user's words; "unknown" where they are too few to tell.

    Source: py3langid (langid.py's model, 97 languages).
    """
    words = next((text_of(message) for message in reversed(messages) if message["role"] == "user"), "")
    if sum(character.isalpha() for character in words) < _MIN_LETTERS:
        return UNKNOWN
    import py3langid

    return str(py3langid.classify(words[:_MAX_CHARS])[0])


def served_slices(collected: str | None, *, num_prompt_tokens: int, temperature: float | None) -> str:
    """The slices of a request that is served, as canonical JSON: those collected, its length and its temperature.

    Without a temperature of its own it is drawn at the server's.
    """
    own: dict[str, Any] = json.loads(collected) if collected else {}
    warmth = "server's" if temperature is None else _bucket(temperature, _TEMPERATURES)
    derived = {"length": length_of(num_prompt_tokens), "temperature": warmth}
    return json.dumps({**own, **derived}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def length_of(num_prompt_tokens: int) -> str:
    """The value of the dimension length."""
    return _bucket(num_prompt_tokens, _LENGTHS)


def names(slices: str) -> list[str]:
    """``dimension=value`` for every slice that a request is in."""
    found: Mapping[str, Any] = json.loads(slices)
    return [f"{dimension}={found[dimension]}" for dimension in sorted(found)]


def _bucket(value: float, ends: tuple[float, ...]) -> str:
    """The bucket of a value, by its upper end: small or equal, or above the last."""
    return next((f"≤{end:g}" for end in ends if value <= end), f">{ends[-1]:g}")


def text_of(message: Mapping[str, Any]) -> str:
    """The words of a message, its parts one after the other."""
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
