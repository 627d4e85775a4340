"""Generated traffic: seeded requests, written for this project, that stand in for a fleet's own."""

from typing import TypedDict


class Request(TypedDict):
    """One chat request as a client sends it, with the conversation and the slice that the tap records."""

    conversation: str
    slice: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
