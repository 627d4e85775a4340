"""One request and its answer while they pass by, and the form in which they are passed on to be written."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.engine.exact_replies import Generation
from serving.tap.policy import Verdict

MAX_BYTES = 8 * 1024 * 1024
_ID_BYTES = 36  # a small int's object and its place in a list


class Budget:
    """Bytes held by all exchanges of a process. One thread takes and gives back, another releases: no lock."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        """Written by the event loop's thread alone."""
        self.released = 0
        """Written by the feeder's thread alone."""

    @property
    def full(self) -> bool:
        """Whether no more may be held."""
        return self.taken - self.released > self.limit


@dataclass(slots=True)
class Exchange:
    """Bodies are kept as the pieces that came, by reference."""

    route: str
    verdict: Verdict
    probability: float
    """That of being taken, before the reply is known."""
    drafter_version: str | None
    budget: Budget
    started: float = field(default_factory=time.time)
    request: list[bytes] = field(default_factory=list)
    response: list[bytes] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    size: int = 0
    status: int = 0
    content_type: str = ""
    content_encoding: str = ""
    finished: bool = False
    hung_up: bool = False
    lost: str | None = None
    """Why it can't be written any more."""

    def keep(self, part: list[bytes], body: bytes) -> None:
        """Remember a piece of a body; forget all of it where that would be too much."""
        if self.lost:
            return
        self.size += len(body)
        self.budget.taken += len(body)
        if self.size > MAX_BYTES:
            self.forget("too_large")
        elif self.budget.full:
            self.forget("dropped_memory")
        else:
            part.append(body)

    def count_ids(self) -> None:
        """Have the exact ids counted among the bytes held, once they are all there."""
        ids = sum(
            len(one.prompt_ids or ()) + sum(len(choice.ids) for choice in one.choices.values())
            for one in self.generations
        )
        self.size += ids * _ID_BYTES
        self.budget.taken += ids * _ID_BYTES

    def forget(self, why: str) -> None:
        """Let go of everything held."""
        self.lost = why
        self.budget.taken -= self.size
        self.size = 0
        for held in (self.request, self.response, self.generations):
            held.clear()

    @property
    def outcome(self) -> str | None:
        """Why an exchange that has ended isn't to be written; None where it is."""
        if not self.status or (200 <= self.status < 300 and not self.finished):
            return "hung_up" if self.hung_up else "cut_short"
        if not 200 <= self.status < 300:
            return "not_2xx"
        return "encoded" if self.content_encoding not in ("", "identity") else self.lost


@dataclass(frozen=True)
class Taken:
    """An exchange as the writer's process gets it."""

    route: str
    verdict: Verdict
    probability: float
    drafter_version: str | None
    started: float
    request: bytes
    response: bytes
    stream: bool
    generations: tuple["ExactReply", ...]


@dataclass(frozen=True)
class ExactReply:
    """One prompt and its choices as the engine gave them, in the order of their indices."""

    request_id: str
    prompt_ids: array
    choices: tuple[tuple[array, str | None, dict[str, int] | None], ...]
    """Ids, finish reason and acceptance counts of each."""


def taken(exchange: Exchange) -> Taken:
    """The exchange to pass on."""
    return Taken(
        exchange.route,
        exchange.verdict,
        exchange.probability,
        exchange.drafter_version,
        exchange.started,
        b"".join(exchange.request),
        b"".join(exchange.response),
        "text/event-stream" in exchange.content_type,
        tuple(exact for one in exchange.generations if (exact := _exact(one)) is not None),
    )


def _exact(generation: Generation) -> ExactReply | None:
    indices = sorted(generation.choices)
    if generation.broken or not generation.prompt_ids or indices != list(range(len(indices))):
        return None
    choices = [generation.choices[index] for index in indices]
    return ExactReply(
        generation.request_id,
        _packed(generation.prompt_ids),
        tuple((_packed(choice.ids), choice.finish_reason, choice.acceptance) for choice in choices),
    )


def _packed(ids: Sequence[int]) -> Any:
    return array("I", ids)
