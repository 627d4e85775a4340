"""A plain file of prompts: {"prompt": "..."} or {"messages": [...]} a line, with sampling settings beside them.

Nobody need have served them. Of a conversation the last turn is asked for.
"""

from collections.abc import Iterator
from typing import Any


def fits(body: dict[str, Any]) -> bool:
    """An object with a prompt or messages."""
    return "messages" in body or "prompt" in body


def records(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The line as it is."""
    yield body
