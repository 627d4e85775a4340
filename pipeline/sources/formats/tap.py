"""The tap's own log (serving/tap.py): what clients asked, beside what the server knew of it."""

from collections.abc import Iterator
from typing import Any

from pipeline.sources.formats import responses


def fits(body: dict[str, Any]) -> bool:
    """A record with its request's settings apart."""
    return isinstance(body.get("params"), dict) and any(name in body for name in ("messages", "prompt", "input"))


def records(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record as it is; a request of the responses route as the messages that the server made of it."""
    if "input" in body and "messages" not in body:
        request = {**body["params"], **{name: body[name] for name in responses.TURNS if name in body}}
        body = {**body, **responses.as_chat(request), "route": body.get("route") or "responses"}
        for name in responses.TURNS[:2]:
            body.pop(name, None)
    yield body
