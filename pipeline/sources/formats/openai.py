"""OpenAI-style JSON lines: a request, a request beside its response, or a line of the batch API.

- ``{"model": ..., "messages": ...}``: a request alone, of the chat, completions or responses route. Its other keys are
  the log's own words, so consent and subject may stand there. Bodies as clients sent them belong into a pair.
- ``{"request": {...}, "response": {...}}``: a pair. What clients sent says nothing of tenant, subject or consent: that
  is read beside the two alone.
- ``{"custom_id": ..., "url": ..., "body": {...}}``: a line of a batch's input. A line of its output holds no prompt.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import Rejected
from pipeline.sources.formats import responses

TIMES = ("ts", "timestamp", "created_at", "time", "created")
_ROUTES = {"chat/completions": "chat", "completions": "completions", "responses": "responses"}
_SAID_BESIDE = (
    "id", "model", "route", "slice", "slices", "tenant", "subject", "conversation", "conversation_id", "consent",
    "consent_source", "target", "drafter_version", "inclusion_probability", "truncated",
)  # fmt: skip


def fits(body: dict[str, Any]) -> bool:
    """A request by its model and its turns, a pair, or a line of the batch API."""
    if "model" in body and any(name in body for name in ("messages", "prompt", "input")):
        return True
    return "custom_id" in body or ("messages" not in body and "prompt" not in body and _is_pair(body))


def records(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The one request of the line, with its response where there is one."""
    if "custom_id" not in body and not _is_pair(body):
        said = {name: value for name, value in body.items() if name not in responses.TURNS}
        yield _record(body, said=said, response=body.get("response"), url=body.get("url"))
        return
    request, url = _request(body), body.get("url")
    if request is None:
        _require_answered(_response(body), body)
        raise Rejected("reply_alone")
    if isinstance(request.get("body"), dict) and "messages" not in request:  # the request with its address
        request, url = request["body"], request.get("url", url)
    said = {name: body[name] for name in _SAID_BESIDE if name in body}
    said = {"id": body.get("custom_id"), "model": request.get("model"), **said}
    if (ts := next((body[name] for name in TIMES if body.get(name) is not None), None)) is not None:
        said["ts"] = ts
    yield _record(request, said=said, response=_response(body), url=url)


def _is_pair(body: Mapping[str, Any]) -> bool:
    return isinstance(body.get("request"), dict | str) or isinstance(body.get("body"), dict)


def _request(body: Mapping[str, Any]) -> dict[str, Any] | None:
    request = body.get("request") or body.get("body")
    if isinstance(request, str):
        try:
            request = json.loads(request)
        except (ValueError, RecursionError):
            raise Rejected("malformed_request")
    if request is not None and not isinstance(request, dict):
        raise Rejected("malformed_request")
    return request


def _response(body: Mapping[str, Any]) -> Any:
    """The response of a pair, out of what a batch or a proxy wraps it in."""
    response = body.get("response")
    if isinstance(response, str):
        try:
            response = json.loads(response)
        except (ValueError, RecursionError):
            return None
    _require_answered(response, body)
    inner = response.get("body") if isinstance(response, dict) and "choices" not in response else None
    return inner if isinstance(inner, dict) else response


def _require_answered(response: Any, body: Mapping[str, Any]) -> None:
    """Raises: Rejected for a request that failed: the target answered nothing."""
    response = response if isinstance(response, dict) else {}
    codes = [said.get(name) for said in (body, response) for name in ("status_code", "status")]
    failed = any(isinstance(code, int) and code >= 400 for code in codes)
    inner = response.get("body")
    if failed or body.get("error") or response.get("error") or (isinstance(inner, dict) and inner.get("error")):
        raise Rejected("failed_request")


def _record(request: Mapping[str, Any], *, said: dict[str, Any], response: Any, url: Any) -> dict[str, Any]:
    """The record of a request by its route; ``said`` is what the log says of it."""
    route = _route(request, url, response)
    record = {**said, "route": said.get("route") or route}
    record.setdefault("ts", next((said[name] for name in TIMES if said.get(name) is not None), _created(response)))
    if response is not None:
        record["response"] = response
    if route == "responses":
        return {**record, **responses.as_chat(request)}
    turns = "messages" if route == "chat" else "prompt"
    params = {name: value for name, value in request.items() if name not in (turns, "tools")}
    record |= {"params": params, turns: request.get(turns)}
    return record | ({"tools": request["tools"]} if request.get("tools") is not None else {})


def _route(request: Mapping[str, Any], url: Any, response: Any) -> str:
    """By the address that was asked, else by what the request holds. Raises: Rejected for other routes."""
    if isinstance(url, str) and url:
        path = url.partition("?")[0].rstrip("/")
        known = next((route for end, route in _ROUTES.items() if path.endswith(f"/{end}")), None)
        if known is None:
            raise Rejected("other_call_type")
        return known
    if "messages" in request:
        return "chat"
    if "input" in request:
        if isinstance(response, dict) and isinstance(response.get("data"), list):
            raise Rejected("other_call_type")  # embeddings
        return "responses"
    return "completions"


def _created(response: Any) -> Any:
    return response.get("created", response.get("created_at")) if isinstance(response, dict) else None
