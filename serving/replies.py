"""Read an OpenAI-style answer, whole or streamed, into one shape."""

import json
from typing import Any


def read_reply(body: bytes, *, stream: bool) -> dict[str, Any]:
    """``{"text", "finish_reason", "usage", "choices"}`` of an answer; text and reason are the first choice's.

    ``prompt_token_ids``, and each choice's ``token_ids``, are there where the client asked for ids.

    Raises: ValueError when the body is an error, was cut short, or has no choices.
    """
    events = _events(body) if stream else [json.loads(body)]
    choices: dict[int, dict[str, Any]] = {}
    usage = prompt_token_ids = None
    for event in events:
        if "error" in event:
            raise ValueError("the answer is an error")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            _add(choices, choice, choice.get("delta") or choice.get("message") or {})
            prompt_token_ids = choice.get("prompt_token_ids") or prompt_token_ids  # the completions route
        prompt_token_ids = event.get("prompt_token_ids") or prompt_token_ids  # the chat route
    if not choices:
        raise ValueError("the answer has no choices")
    ordered = [choices[index] for index in sorted(choices)]
    return {
        "text": ordered[0]["text"],
        "finish_reason": ordered[0]["finish_reason"],
        "usage": usage,
        "choices": ordered,
        **({"prompt_token_ids": prompt_token_ids} if prompt_token_ids else {}),
    }


def _events(body: bytes) -> list[dict[str, Any]]:
    events = []
    for line in body.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return events
        events.append(json.loads(payload))
    raise ValueError("the stream was cut short")


def _add(choices: dict[int, dict[str, Any]], choice: dict[str, Any], part: dict[str, Any]) -> None:
    index = choice.get("index", 0)
    kept = choices.setdefault(index, {"index": index, "text": "", "finish_reason": None})
    kept["text"] += choice.get("text") or part.get("content") or ""
    kept["finish_reason"] = choice.get("finish_reason") or kept["finish_reason"]
    for name in ("reasoning", "reasoning_content"):
        if part.get(name):
            kept["reasoning"] = kept.get("reasoning", "") + part[name]
    if part.get("tool_calls"):
        kept["tool_calls"] = kept.get("tool_calls", []) + part["tool_calls"]
    if choice.get("token_ids"):
        kept["token_ids"] = kept.get("token_ids", []) + choice["token_ids"]
