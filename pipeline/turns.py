"""The turns of a request: what the target's chat template reads of them, and nothing else."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.errors import Rejected

# What vLLM hands to a template (pipeline/render.py). Whatever else a log holds beside it was never part of a prompt.
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_TEXT_PARTS = ("text", "input_text", "output_text")  # the same to vLLM's chat route
_MEDIA = {  # how the kinds of a part that is no text begin
    "image": "unsupported_image",
    "input_image": "unsupported_image",
    "audio": "unsupported_audio",
    "input_audio": "unsupported_audio",
    "video": "unsupported_video",
    "input_video": "unsupported_video",
    "file": "unsupported_file",
    "input_file": "unsupported_file",
    "document": "unsupported_file",
}


def turns_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns up to the last one that asks for an answer: a user's, or a tool's result.

    A served request that ends in an assistant's turn is rejected: what it was asked to say after that is not told apart
    from what it said.

    Raises: Rejected with the reason.
    """
    messages = body.get("messages")
    if messages is None and isinstance(body.get("prompt"), str):
        messages = [{"role": "user", "content": body["prompt"]}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise Rejected("malformed_messages")
    asks = [i for i, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if not any(message["role"] == "user" for message in messages):
        raise Rejected("no_user_turn")
    if asks[-1] + 1 < len(messages) and isinstance(body.get("params"), dict):
        raise Rejected("ends_with_reply")
    return [_turn(message) for message in messages[: asks[-1] + 1]]


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a request, which a log may hold as text; None where there are none. Raises: Rejected."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Rejected("malformed_tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("malformed_tools")
    return tools


def texts_of(value: Any) -> list[str]:
    """Every text in a nested value, keys left out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in texts_of(item)] if isinstance(value, list) else []


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """The turn without absent fields; an assistant's missing content is empty text, never the word None."""
    if message.get("function_call") or message["role"] == "function":
        raise Rejected("unsupported_function_call")  # vLLM's chat route never read them: its prompts were without
    if message["role"] == "developer" and message.get("tools"):
        raise Rejected("unsupported_developer_tools")
    turn = {name: value for name, value in message.items() if name in _FIELDS and value is not None}
    if "content" not in turn and turn["role"] == "assistant":
        turn["content"] = ""
    content = turn.get("content")
    if isinstance(content, list):
        turn["content"] = [_part(part) for part in content]
    elif not isinstance(content, str):
        raise Rejected("malformed_messages")
    calls = turn.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise Rejected("malformed_messages")
    if calls:
        turn["tool_calls"] = [_call(call) for call in calls]
    return turn


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise Rejected("malformed_messages")
    kind = str(part.get("type") or "text")
    if kind not in _TEXT_PARTS:
        raise Rejected(next((_MEDIA[name] for name in _MEDIA if kind.startswith(name)), "unsupported_content"))
    if not isinstance(part.get("text"), str):
        raise Rejected("malformed_messages")
    return {"type": "text", "text": part["text"]}


def _call(call: Any) -> dict[str, Any]:
    """A tool call, its arguments as one JSON text whether the log had text or an object.

    Text that is no object is kept: vLLM renders it as an empty one, and so does pipeline/render.py.
    """
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise Rejected("malformed_tool_call")
    function = call["function"]
    if not isinstance(function.get("name"), str):
        raise Rejected("malformed_tool_call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
    else:
        parsed = {} if arguments is None else arguments
    if isinstance(parsed, dict):
        arguments = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    elif not isinstance(arguments, str):
        raise Rejected("malformed_tool_call")
    own = {name: call[name] for name in ("id", "type") if call.get(name) is not None}
    return {**own, "function": {"name": function["name"], "arguments": arguments}}
