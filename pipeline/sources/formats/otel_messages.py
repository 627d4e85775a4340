"""Messages of OpenTelemetry's GenAI conventions as chat messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import Rejected
from pipeline.sources.formats.otel_values import Attributes, attributes_of, value_of

_ROLES = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_CHOICE = "gen_ai.choice"
EVENTS = (*_ROLES, _CHOICE)


def of_attributes(attributes: Attributes) -> dict[str, Any]:
    """``messages``, ``tools`` and ``response`` of the attributes of one request. Raises: Rejected."""
    messages = []
    if (instructions := _decoded(attributes.get("gen_ai.system_instructions"))) is not None:
        parts = instructions if isinstance(instructions, list) else [instructions]
        messages += _turns({"role": "system", "parts": parts})
    given = _decoded(attributes.get("gen_ai.input.messages"))
    for message in given if isinstance(given, list) else []:
        messages += _turns(message)
    tools, output = tools_of(attributes), _decoded(attributes.get("gen_ai.output.messages"))
    found: dict[str, Any] = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
    if isinstance(output, list):
        found["response"] = _response(output, attributes)
    return found


def tools_of(attributes: Attributes) -> Any:
    """The tools that were defined for a request, as the chat route has them; None where none are on record."""
    tools = _decoded(attributes.get("gen_ai.tool.definitions"))
    if not isinstance(tools, list):
        return tools
    return [_tool(_decoded(tool)) for tool in tools]


def of_events(logs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``messages`` and ``response`` of a request's events, which are in the order of its messages."""
    messages, choices = [], []
    for log in logs:
        attributes = attributes_of(log.get("attributes"))
        name = log.get("eventName") or attributes.get("event.name")
        body = value_of(log.get("body"))
        body = body if isinstance(body, dict) else {key: _decoded(value) for key, value in attributes.items()}
        if name == _CHOICE:
            choices.append({key: body.get(key) for key in ("index", "finish_reason", "message")})
        else:
            messages.append(_event_message(body, _ROLES[name]))
    return {"messages": messages, **({"response": {"choices": choices}} if choices else {})}


def _event_message(body: Mapping[str, Any], role: str) -> dict[str, Any]:
    message = {"role": body.get("role") or role, "content": body.get("content")}
    if body.get("tool_calls"):
        message["tool_calls"] = body["tool_calls"]
    if role == "tool" and body.get("id"):
        message["tool_call_id"] = body["id"]
    return message


def _decoded(value: Any) -> Any:
    """A structured value, which spans may hold as JSON text. Raises: Rejected where that breaks off.

    An exporter's limit on the length of attributes cuts them without a word.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise Rejected("truncated_at_source")
    return value


def _turns(message: Any) -> Iterator[dict[str, Any]]:
    """The chat messages of one message: tool results of one are a message each, before the rest of it."""
    if not isinstance(message, dict) or not isinstance(message.get("parts"), list):
        raise Rejected("malformed_messages")
    texts, calls, reasoning, results = [], [], [], []
    for part in message["parts"]:
        part = {"type": "text", "content": part} if isinstance(part, str) else part
        match part.get("type"):
            case "text":
                texts.append({"type": "text", "text": part.get("content")})
            case "reasoning":
                reasoning.append(part.get("content") or "")
            case "tool_call":
                function = {"name": part.get("name"), "arguments": part.get("arguments")}
                calls.append({"id": part.get("id"), "type": "function", "function": function})
            case "tool_call_response":
                results.append(_result(part))
            case _:
                texts.append({"type": part.get("modality") or part.get("type")})
    yield from results
    if texts or calls or reasoning or not results:
        content = texts[0]["text"] if len(texts) == 1 and texts[0]["type"] == "text" else texts or None
        turn = {"role": message.get("role"), "content": content, "name": message.get("name")}
        turn |= {"tool_calls": calls} if calls else {}
        yield turn | ({"reasoning": "\n".join(reasoning)} if reasoning else {})


def _result(part: Mapping[str, Any]) -> dict[str, Any]:
    result = part.get("response", part.get("result"))
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": part.get("id"), "content": text}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or isinstance(tool.get("function"), dict):
        return tool
    if tool.get("type", "function") != "function":
        raise Rejected("unsupported_builtin_tool")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _response(output: Sequence[Any], attributes: Attributes) -> dict[str, Any]:
    """The reply as the chat route has it, as far as it is on record."""
    choices = [
        {"index": index, "finish_reason": message.get("finish_reason"), "message": turn}
        for index, message in enumerate(output)
        if isinstance(message, dict)
        for turn in _turns(message)
    ]
    tokens = attributes.get("gen_ai.usage.output_tokens")
    return {"choices": choices, **({} if tokens is None else {"usage": {"completion_tokens": tokens}})}
