"""A request of the responses route as the chat messages that vLLM's server makes of it.

Source: vLLM 0.32, entrypoints/openai/responses/utils.py (construct_input_messages).
"""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.errors import Rejected

TURNS = ("input", "instructions", "tools")
_ON_THE_SERVER = ("previous_response_id", "previous_input_messages", "prompt")  # history that the request only names


def as_chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """``messages``, ``tools`` where there are any, and ``params`` by the chat route's names.

    Raises: Rejected for what the messages cannot be made of, or the chat route has no words for.
    """
    for name in _ON_THE_SERVER:
        if request.get(name):
            raise Rejected(f"unsupported_{name}")
    tools = _tools(request.get("tools"))
    return {"messages": _messages(request), **({"tools": tools} if tools else {}), "params": _params(request)}


def _messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions := request.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    asked = request.get("input")
    if isinstance(asked, str):
        return [*messages, {"role": "user", "content": asked}]
    if not isinstance(asked, list) or not all(isinstance(item, dict) for item in asked):
        raise Rejected("malformed_messages")
    for item in asked:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """One item: a turn of its own, or a part of the assistant turn before it."""
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            _add_to_assistant(messages, "content", _first_text(item.get("content")))
        case "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call]})
        case "function_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        case "reasoning":
            if item.get("encrypted_content"):
                raise Rejected("unsupported_encrypted_reasoning")
            thoughts = item.get("content") or item.get("summary")
            _add_to_assistant(messages, "reasoning", _first_text(thoughts) if thoughts else "")
        case _:
            raise Rejected("unsupported_item")


def _add_to_assistant(messages: list[dict[str, Any]], name: str, text: str) -> None:
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(name) is None:
        messages[-1][name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _first_text(content: Any) -> str:
    """The text of the first part: the server reads no other one of an assistant's."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    if not isinstance(content, str):
        raise Rejected("malformed_messages")
    return content


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Rejected("malformed_tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("malformed_tools")
    if any(tool.get("type", "function") != "function" for tool in tools):
        raise Rejected("unsupported_builtin_tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(tool.get("function"), dict):
        return dict(tool)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _params(request: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: value for name, value in request.items() if name not in (*TURNS, "text", "reasoning")}
    if (limit := params.pop("max_output_tokens", None)) is not None:
        params["max_tokens"] = limit
    reasoning = request.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        params["reasoning_effort"] = reasoning["effort"]
    text = request.get("text")
    if isinstance(text, dict) and text.get("format") is not None:
        params["response_format"] = _format(text["format"])
    if params.pop("truncation", None) == "auto":
        params["truncate_prompt_tokens"] = -1
    return params


def _format(wanted: Any) -> Any:
    """The chat route's response_format: it has a schema one level deeper."""
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema" and "json_schema" not in wanted:
        return {"type": "json_schema", "json_schema": {name: v for name, v in wanted.items() if name != "type"}}
    return wanted
