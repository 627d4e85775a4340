"""The served reply that a record holds by its exact ids, which may stand for an answer of the target.

Text is never encoded again, so a record without ids, as most logs are, has no such reply. A client gets ids by asking
for them (``return_token_ids``), and the tap then writes them down with the target's fingerprint id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Rejected


@dataclass(frozen=True)
class ServedReply:
    """One served exchange, as ids."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str
    """stop or length."""
    target: str
    """Fingerprint id of the target that served it (pipeline/fingerprint.py)."""


def served_reply(body: Mapping[str, Any]) -> ServedReply | None:
    """The reply on record; None where anything of it is absent, malformed or ambiguous.

    As many ids must be there as the server counted: a stream may leave some out, and carries the count only where the
    client asked for usage.

    One that ran into its limit while it was still thinking said nothing, and is no answer, whatever its ids.

    A reply that was read as tool calls ended at its end token like any other ("tool_calls" is what the route makes of
    that), and its ids are checked for it before they are used (pipeline/plan.py).
    """
    response = body.get("response")
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        return None
    prompt_ids, ids = _token_ids(response.get("prompt_token_ids")), _token_ids(choices[0].get("token_ids"))
    reason = choices[0].get("finish_reason")
    reason = "stop" if reason == "tool_calls" else reason
    target, usage = body.get("target"), response.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    whole = prompt_ids and ids and counted == len(ids)
    if reason == "length" and _only_thought(choices[0]):
        return None
    if not whole or reason not in ("stop", "length") or not isinstance(target, str) or not target:
        return None
    return ServedReply(prompt_ids, ids, reason, target)


def _only_thought(choice: Mapping[str, Any]) -> bool:
    message = choice.get("message")
    said = message if isinstance(message, Mapping) else choice  # the chat route's form, or the tap's
    thoughts = said.get("reasoning") or said.get("reasoning_content")
    return bool(thoughts) and not (said.get("content") or said.get("text") or said.get("tool_calls"))


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        return None
    return tuple(value)


def inclusion_probability(body: Mapping[str, Any]) -> float:
    """The tap's own probability of writing a record; a log that samples otherwise writes none. Raises: Rejected."""
    value = body.get("inclusion_probability")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise Rejected("malformed_inclusion_probability")
    return float(value)
