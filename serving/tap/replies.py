"""Read an OpenAI-style answer, whole or streamed, into one shape."""

import json
from typing import Any


def read_reply(body: bytes, *, stream: bool) -> dict[str, Any]:
    """``{"id", "text", "finish_reason", "usage", "choices"}`` of an answer; text and reason are the first choice's.

    ``prompt_token_ids``, and each choice's ``token_ids``, are there where the client asked for ids; ``acceptance`` of
    a single choice where the server was told to answer with it.

    Raises: ValueError when the body is an error, was cut short, or has no choices.
    """
    events = read_events(body) if stream else [json.loads(body)]
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"id": None, "usage": None, "prompt_token_ids": None, "metrics": None}
    for event in events:
        if "error" in event:
            raise ValueError("the answer is an error")
        for choice in event.get("choices") or []:
            _add(choices, choice, choice.get("delta") or choice.get("message") or {})
            # the completions route
            whole["prompt_token_ids"] = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
        for name in whole:
            whole[name] = event.get(name) or whole[name]
    if not choices:
        raise ValueError("the answer has no choices")
    ordered = [choices[index] for index in sorted(choices)]
    for choice in ordered:
        if calls := choice.pop("calls", None):
            choice["tool_calls"] = [calls[index] for index in sorted(calls)]
    if len(ordered) == 1 and (acceptance := acceptance_of(whole["metrics"])):
        ordered[0]["acceptance"] = acceptance
    return {
        "id": whole["id"],
        "text": ordered[0]["text"],
        "finish_reason": ordered[0]["finish_reason"],
        "usage": whole["usage"],
        "choices": ordered,
        **({"prompt_token_ids": whole["prompt_token_ids"]} if whole["prompt_token_ids"] else {}),
    }


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream that ends in [DONE]. Raises: ValueError where it doesn't."""
    events = []
    for line in body.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return events
        events.append(json.loads(payload))
    raise ValueError("the stream was cut short")


def acceptance_of(metrics: Any) -> dict[str, int] | None:
    """The counts in an answer's ``metrics``, by the names that records have."""
    spec = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(spec, dict):
        return None
    names = {
        "num_drafts": "num_spec_steps",
        "num_draft_tokens": "num_draft_tokens",
        "num_accepted_tokens": "num_accepted_draft_tokens",
    }
    counts = {ours: spec.get(theirs) for ours, theirs in names.items()}
    return counts if all(type(count) is int for count in counts.values()) else None


def _add(choices: dict[int, dict[str, Any]], choice: dict[str, Any], part: dict[str, Any]) -> None:
    index = choice.get("index", 0)
    kept = choices.setdefault(index, {"index": index, "text": "", "finish_reason": None})
    kept["text"] += choice.get("text") or part.get("content") or ""
    kept["finish_reason"] = choice.get("finish_reason") or kept["finish_reason"]
    reasoning = part.get("reasoning") or part.get("reasoning_content")  # the same under two names
    if reasoning:
        kept["reasoning"] = kept.get("reasoning", "") + reasoning
    for position, call in enumerate(part.get("tool_calls") or ()):
        _add_call(kept.setdefault("calls", {}), call.get("index", position), call)
    if choice.get("token_ids"):
        kept["token_ids"] = kept.get("token_ids", []) + choice["token_ids"]


def _add_call(calls: dict[int, dict[str, Any]], index: int, call: dict[str, Any]) -> None:
    """Put a call, or the piece of one that an event carries, to what is there of it."""
    kept = calls.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    function = call.get("function") or {}
    kept["id"] = call.get("id") or kept["id"]
    kept["type"] = call.get("type") or kept["type"]
    kept["function"]["name"] += function.get("name") or ""
    kept["function"]["arguments"] += function.get("arguments") or ""
