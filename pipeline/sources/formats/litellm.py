"""LiteLLM's standard logging payload, as its file, S3 and callback loggers write it, and rows of its spend-log table.

Tenant is the team of the key that was used, subject the end user, else the user of the key: the proxy itself wrote
both down, though an end user is who the key's holder said it was. A key's holder is no subject by itself: behind one
key may be a whole service. Of a reply from the proxy's cache, and of a call that failed, the fleet saw nothing.

Source: docs.litellm.ai, "StandardLoggingPayload Specification" and "Spend logs".
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import Rejected
from pipeline.sources.formats import responses

_CHAT = ("completion", "acompletion")
_COMPLETIONS = ("text_completion", "atext_completion")
_RESPONSES = ("responses", "aresponses")
_REDACTED = "redacted-by-litellm"
_NOBODY = (None, "", "default_user_id")
_OBJECT = "standard_logging_object"


def fits(body: dict[str, Any]) -> bool:
    """A payload, or what a callback wraps it in."""
    payload = body.get(_OBJECT, body)
    return isinstance(payload, dict) and "call_type" in payload and ("startTime" in payload or "messages" in payload)


def records(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The one request of the payload."""
    payload = body.get(_OBJECT, body)
    call_type = payload["call_type"]
    if call_type not in (*_CHAT, *_COMPLETIONS, *_RESPONSES):
        raise Rejected("other_call_type")
    if payload.get("status") == "failure":
        raise Rejected("failed_request")
    if payload.get("cache_hit") in (True, "True", "true"):
        raise Rejected("cache_hit")
    request = _object(payload.get("proxy_server_request"))  # the table's rows keep the whole request there
    params = {**request, **_params(payload)}
    asked = _asked(payload.get("messages"), request)
    response = _decoded(payload.get("response"))
    record = {**_said(payload), **({"response": response} if isinstance(response, dict) else {})}
    if call_type in _RESPONSES:
        yield {**record, "route": "responses", **responses.as_chat({**params, "input": asked})}
        return
    route, turns = ("chat", "messages") if call_type in _CHAT else ("completions", "prompt")
    params = {name: value for name, value in params.items() if name not in ("messages", "prompt", "input")}
    tools = params.pop("tools", None)
    yield {**record, "route": route, turns: asked, "params": params, **({} if tools is None else {"tools": tools})}


def _said(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What the proxy says of the request."""
    metadata = _object(payload.get("metadata"))
    team = _first(metadata.get("user_api_key_team_id"), payload.get("team_id"), metadata.get("user_api_key_org_id"))
    users = (payload.get("end_user"), metadata.get("user_api_key_end_user_id"))
    key_users = (metadata.get("user_api_key_user_id"), payload.get("user"))
    return {
        "id": _first(payload.get("id"), payload.get("request_id")),
        "ts": payload.get("startTime"),
        "model": payload.get("model"),
        "tenant": team,
        "subject": _first(*users, *key_users),
        "conversation": _first(payload.get("session_id")),
    }


def _params(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The request's settings; those that are the server's own stand in ``extra_body``."""
    params = _object(payload.get("model_parameters"))
    extra = _object(params.get("extra_body"))
    return {**extra, **{name: value for name, value in params.items() if name != "extra_body"}}


def _asked(messages: Any, request: Mapping[str, Any]) -> Any:
    """The messages, or the input of another route. Raises: Rejected where the proxy kept none."""
    messages = _decoded(messages)
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if not messages:
        messages = next((request[name] for name in ("messages", "input", "prompt") if request.get(name)), None)
    if not messages:
        raise Rejected("prompt_not_recorded")
    turns = messages if isinstance(messages, list) else [{"content": messages}]
    if any(isinstance(turn, dict) and turn.get("content") == _REDACTED for turn in turns):
        raise Rejected("redacted_at_source")
    return messages


def _decoded(value: Any) -> Any:
    """A value that the table's export may have written as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _object(value: Any) -> dict[str, Any]:
    value = _decoded(value)
    return value if isinstance(value, dict) else {}


def _first(*values: Any) -> Any:
    return next((value for value in values if value not in _NOBODY), None)
