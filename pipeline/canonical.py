"""One served request, whatever log it came from, as the one form that every later stage reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import sampling
from pipeline.cut_marks import is_cut
from pipeline.errors import Rejected
from pipeline.slices import collected_slices
from pipeline.turns import texts_of, tools_of, turns_of


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


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_EXACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces. Raises: ValueError for NaN and infinities."""
    return _CANONICAL.encode(value)


def exact_json(value: Any) -> str:
    """The JSON text of a value in its own order, without spaces. Raises: ValueError for NaN and infinities."""
    return _EXACT.encode(value)


def canonical_request(body: Mapping[str, Any]) -> CanonicalRequest:
    """The canonical form of a record (pipeline/sources/formats) or a line of a prompt file.

    Sampling settings are read from ``params`` where there is one, else from the record itself. The logged
    reply is never read: the target answers again.

    A record is one request, and its answer is the turn that is missing at its end. In a log every turn of a
    conversation is a request of its own, with the prompt that the server really saw then; a line of a prompt file
    asks for its last turn alone. Earlier turns aren't asked again from the middle of a record: a template that drops
    old reasoning would render prompts that no server ever saw.

    Raises: Rejected with the reason.
    """
    try:
        return _request(body)
    except UnicodeEncodeError:
        raise Rejected("not_unicode")
    except ValueError:
        raise Rejected("not_canonical_json")
    except RecursionError:
        raise Rejected("nested_too_deeply")


def _request(body: Mapping[str, Any]) -> CanonicalRequest:
    params = body["params"] if isinstance(body.get("params"), dict) else body
    _require_supported(body, params)
    messages, template_args = turns_of(body), _template_args(params)
    tools = tools_of(body.get("tools", params.get("tools")))
    if body.get("truncated") is True or is_cut(texts_of([messages, tools])):
        raise Rejected("truncated_at_source")
    route = str(body.get("slice") or body.get("route") or "default")
    slices = collected_slices(body, route=route, messages=messages, template_args=template_args)
    request = CanonicalRequest(
        messages=exact_json(messages),
        tools=None if tools is None else exact_json(tools),
        template_args=canonical_json(template_args),
        temperature=sampling.number(params, "temperature", low=0.0, high=2.0),
        top_p=sampling.number(params, "top_p", low=0.0, high=1.0),
        max_tokens=_max_tokens(params),
        sampling=sampling.as_text(sampling.settings_of(params)),
        slice=route,
        slices=canonical_json(slices),
        subject=_subject(body, messages),
    )
    said = (request.messages, request.tools, request.template_args, request.sampling, request.slices, request.subject)
    "".join(text or "" for text in said).encode()
    return request


def _require_supported(body: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Raises: Rejected for what the target could not be asked again in the same way."""
    if body.get("unsupported"):  # the tap's mark on a request that has no chat form; it wrote no content
        raise Rejected("unsupported_responses_request")
    route = str(body.get("route") or "")
    if route.endswith("completions") and "chat" not in route:
        raise Rejected("unsupported_raw_prompt")
    if any(body.get(name) or params.get(name) for name in ("lora_name", "adapter")):
        raise Rejected("unsupported_adapter")
    if params.get("functions") or params.get("function_call") not in (None, "none", "auto"):
        raise Rejected("unsupported_functions")  # vLLM's chat route never read them


def _template_args(params: Mapping[str, Any]) -> dict[str, Any]:
    arguments = params.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise Rejected("malformed_template_args")
    if effort := params.get("reasoning_effort"):
        # As vLLM's chat route: the effort is an argument of the template, and switches thinking on or off.
        return {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
    return arguments


def _max_tokens(params: Mapping[str, Any]) -> int | None:
    """The request's own limit, or None where it set none."""
    value = params.get("max_completion_tokens") or params.get("max_tokens")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise Rejected("malformed_max_tokens")
    return value


def named_subject(body: Mapping[str, Any]) -> str | None:
    """The subject that a record names, else its conversation; None where it names neither."""
    names = ("subject", "conversation", "conversation_id")
    return next((f"{name}:{body[name]}" for name in names if body.get(name)), None)


def _subject(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> str:
    """What the record names, else how the conversation began, which its later turns repeat."""
    if (named := named_subject(body)) is not None:
        return named
    first_user = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return f"opening:{canonical_json(messages[: first_user + 1])}"
