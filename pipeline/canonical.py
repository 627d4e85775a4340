"""One served request, whatever log it came from, as the one form that every later stage reads."""

import json
import re
from dataclasses import dataclass
from typing import Any

from pipeline import sampling
from pipeline.errors import Rejected
from pipeline.slices import collected_slices


@dataclass(frozen=True)
class CanonicalRequest:
    """What the target saw and how its answer was drawn. Nested values are JSON strings.

    Messages and tools keep the order of the request's own keys: templates write tools out as they come.
    """

    messages: str
    tools: str | None
    template_args: str
    temperature: float | None
    """None, as top-p's: the request named none, and the target's server took its own."""
    top_p: float | None
    max_tokens: int | None
    sampling: str
    """Its other sampling settings (pipeline/sampling.py)."""
    slice: str
    slices: str
    """Every group it is in, as canonical JSON: dimension → value."""
    subject: str
    """Who or what conversation it belongs to: decides the split, so all turns of one share it."""

    @property
    def prompt(self) -> str:
        """What makes two requests the same prompt: all that the chat template renders, and what the reply must fit."""
        tools = None if self.tools is None else canonical_json(json.loads(self.tools))
        what = [canonical_json(json.loads(self.messages)), tools, self.template_args]
        structured = json.loads(self.sampling).get("structured_outputs")
        return canonical_json(what if structured is None else [*what, exact_json(structured)])


# How proxies mark what they cut: "... (truncated 800 chars) ...", "[base64 image/png truncated]", "...[truncated]".
_TRUNCATED = re.compile(
    r"(?:\.\.\.|…)\s*[(\[](?:\w*truncated\w*)(?: skipped)? [\d,]+ (?:chars|characters|bytes)\b[^)\]]{0,200}[)\]]"
    r"|\[base64\b[^\]\n]{0,200}\btruncated\b[^\]\n]{0,80}\]"
    r"|(?:\.\.\.|…)\s*[(\[<]truncated[)\]>]\s*$",
    re.IGNORECASE,
)


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces. Raises: ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def exact_json(value: Any) -> str:
    """The JSON text of a value in its own order, without spaces. Raises: ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def canonical_request(body: dict[str, Any]) -> CanonicalRequest:
    """The canonical form of a tap record, an OpenAI-style log record or a line of a prompt file.

    Sampling settings are read from ``params`` where there is one, else from the record itself. The logged
    reply is never read: the target answers again.

    A record is one request, and its answer is the turn that is missing at its end. In a tap's log every turn of a
    conversation is a request of its own, with the prompt that the server really saw then; a line of a prompt file
    asks for its last turn alone. Earlier turns aren't asked again from the middle of a record: a template that drops
    old reasoning would render prompts that no server ever saw.

    Raises: Rejected with the reason.
    """
    params = body["params"] if isinstance(body.get("params"), dict) else body
    _require_supported(body, params)
    messages, template_args = _messages(body), _template_args(params)
    route = str(body.get("slice") or body.get("route") or "default")
    slices = collected_slices(body, route=route, messages=messages, template_args=template_args)
    try:
        request = CanonicalRequest(
            messages=exact_json(messages),
            tools=_tools(body.get("tools", params.get("tools"))),
            template_args=canonical_json(template_args),
            temperature=sampling.number(params, "temperature", low=0.0, high=2.0),
            top_p=sampling.number(params, "top_p", low=0.0, high=1.0),
            max_tokens=_max_tokens(params),
            sampling=sampling.as_text(sampling.settings_of(params)),
            slice=route,
            slices=canonical_json(slices),
            subject=_subject(body, messages),
        )
        (request.prompt + request.slices + request.subject).encode()
    except UnicodeEncodeError:
        raise Rejected("not_unicode")
    except ValueError:
        raise Rejected("not_canonical_json")
    if body.get("truncated") is True or any(map(_TRUNCATED.search, _texts(messages))):
        raise Rejected("truncated_at_source")
    return request


def _require_supported(body: dict[str, Any], params: dict[str, Any]) -> None:
    """Raises: Rejected for what the target could not be asked again in the same way."""
    route = str(body.get("route") or "")
    if "messages" not in body and route.endswith("completions") and "chat" not in route:
        raise Rejected("unsupported_raw_prompt")
    if any(body.get(name) or params.get(name) for name in ("lora_name", "adapter")):
        raise Rejected("unsupported_adapter")


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns up to the last one that asks for an answer: a user's, or a tool's result."""
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
    return [_message(message) for message in messages[: asks[-1] + 1]]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The turn without null fields; an assistant's missing content is empty text, never the word None."""
    turn = {
        key: value for key, value in message.items() if value is not None and not (key == "tool_calls" and value == [])
    }
    if "content" not in turn and turn["role"] == "assistant":
        turn["content"] = ""
    content = turn.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise Rejected("malformed_messages")
        if any(part.get("type", "text") != "text" for part in content):
            raise Rejected("unsupported_content")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise Rejected("malformed_messages")
    elif not isinstance(content, str):
        raise Rejected("malformed_messages")
    if not isinstance(turn.get("tool_calls", []), list):
        raise Rejected("malformed_messages")
    return turn


def _tools(tools: Any) -> str | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Rejected("malformed_tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("malformed_tools")
    return exact_json(tools)


def _template_args(params: dict[str, Any]) -> dict[str, Any]:
    arguments = params.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise Rejected("malformed_template_args")
    if effort := params.get("reasoning_effort"):
        # As vLLM's chat route: the effort is an argument of the template, and switches thinking on or off.
        return {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
    return arguments


def _max_tokens(params: dict[str, Any]) -> int | None:
    """The request's own limit, or None where it set none."""
    value = params.get("max_completion_tokens") or params.get("max_tokens")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise Rejected("malformed_max_tokens")
    return value


def _subject(body: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The recorded subject, else the conversation, else how the conversation began, which its later turns repeat."""
    for name in ("subject", "conversation", "conversation_id"):
        if body.get(name):
            return f"{name}:{body[name]}"
    first_user = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return f"opening:{canonical_json(messages[: first_user + 1])}"


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    contents = [message["content"] for message in messages]
    parts = [part["text"] for content in contents if isinstance(content, list) for part in content]
    return [content for content in contents if isinstance(content, str)] + parts
