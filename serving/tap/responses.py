"""The responses route as chat: the messages that a request means, and the reply of an answer.

Only what vLLM itself makes the same chat messages of is translated; everything else is Inexact, by a word for why.
Source: vllm/entrypoints/openai/responses/utils.py (construct_input_messages, construct_tool_dicts) and protocol.py
(build_chat_params, to_sampling_params), vLLM 0.32.
"""

import json
from collections.abc import Mapping
from typing import Any

from serving.tap.replies import acceptance_of

_SHARED = (  # what this route reads under the chat route's names
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "vllm_xargs", "structured_outputs",
    "chat_template_kwargs",
)  # fmt: skip
_REFUSED = ("previous_response_id", "previous_input_messages", "background", "prompt")
_UNFINISHED = ("in_progress", "incomplete")


class Inexact(Exception):
    """A request without a chat form that is certain; the text is one word of this file."""


def chat_form(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that renders and samples as this one. Raises: Inexact."""
    for name in _REFUSED:
        if request.get(name):
            raise Inexact(name)
    try:
        chat = {name: request[name] for name in _SHARED if name in request}
        chat["messages"] = _messages(request)
        if request.get("tools"):
            chat["tools"] = [_tool(tool) for tool in request["tools"]]
            chat["tool_choice"] = _tool_choice(request.get("tool_choice"))
        chat["max_completion_tokens"] = request.get("max_output_tokens")
        chat["reasoning_effort"] = (request.get("reasoning") or {}).get("effort")
        chat["response_format"] = _response_format((request.get("text") or {}).get("format"))
        if request.get("truncation") not in (None, "disabled"):
            chat["truncate_prompt_tokens"] = -1
        return chat
    except (AttributeError, KeyError, TypeError, IndexError):
        raise Inexact("unknown_shape")


def read_response(body: bytes, *, stream: bool) -> dict[str, Any]:
    """The reply of an answer, as serving/tap/replies.py has it. Raises: ValueError for an error, or without an end."""
    response = _last_event(body) if stream else json.loads(body)
    status = response.get("status")
    if response.get("error") or status not in ("completed", "incomplete"):
        raise ValueError("the answer has no end")
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": None}
    for item in response["output"]:
        if item["type"] == "message":
            choice["text"] += "".join(part.get("text") or "" for part in item["content"])
        elif item["type"] == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            choice["reasoning"] = choice.get("reasoning", "") + "".join(part.get("text") or "" for part in parts)
        elif item["type"] == "function_call":
            choice.setdefault("tool_calls", []).append(_call(item))
    if status == "incomplete" and (response.get("incomplete_details") or {}).get("reason") == "max_output_tokens":
        choice["finish_reason"] = "length"
    elif status == "completed":
        choice["finish_reason"] = "tool_calls" if choice.get("tool_calls") else "stop"
    if acceptance := acceptance_of(response.get("metrics")):
        choice["acceptance"] = acceptance
    return {
        "id": response.get("id"),
        "text": choice["text"],
        "finish_reason": choice["finish_reason"],
        "usage": _usage(response.get("usage")),
        "choices": [choice],
    }


def _last_event(body: bytes) -> dict[str, Any]:
    """The whole answer, which the stream's last event carries."""
    for line in reversed(body.split(b"\n")):
        if line.startswith(b"data:"):
            event = json.loads(line[5:])
            if event.get("type") in ("response.completed", "response.incomplete"):
                return event["response"]
            break
    raise ValueError("the stream was cut short")


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = request["input"]
    messages = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Inexact("unknown_shape")
    if given and given[-1].get("status") in _UNFINISHED:
        raise Inexact("continued_message")
    # Instructions go before, and never merge with an item: their role is another.
    items: list[dict[str, Any]] = []
    for item in given:
        _add_item(items, item)
    return messages + items


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add an item, to the assistant's message before it where that lacks what the item brings."""
    kind = item.get("type") or "message"
    if kind == "message" and item["role"] == "assistant":
        _merge(messages, "content", _assistant_text(item["content"]))
    elif kind == "message":
        messages.append({"role": item["role"], "content": _content(item["content"])})
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise Inexact("encrypted_reasoning")
        parts = item.get("content") or item.get("summary")
        _merge(messages, "reasoning", parts[0]["text"] if parts else "")
    elif kind == "function_call" and not item.get("namespace"):
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        else:
            messages.append({"role": "assistant", "tool_calls": [_call(item)]})
    elif kind == "function_call_output" and isinstance(item["output"], str):
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    else:
        raise Inexact("input_item")


def _merge(messages: list[dict[str, Any]], name: str, text: str) -> None:
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(name) is None:
        messages[-1][name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _assistant_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    (part,) = content if len(content) == 1 else (None,)
    if part is None or part.get("type") != "output_text" or not isinstance(part.get("text"), str):
        raise Inexact("assistant_parts")  # vLLM reads the first part alone
    return part["text"]


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not all(part["type"] in ("input_text", "text") and isinstance(part["text"], str) for part in content):
        raise Inexact("input_content")
    return [{"type": "text", "text": part["text"]} for part in content]


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        raise Inexact("tool_type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not form or form["type"] == "text":
        return None
    if form["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {name: v for name, v in form.items() if name != "type"}}
    return {"type": form["type"]}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Counts by the chat route's names."""
    if not usage:
        return None
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
    return {ours: usage[theirs] for ours, theirs in names.items()}
