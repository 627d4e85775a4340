"""The sittings of a comparison: one engine, its drafters swapped in turn, in an order that cancels drift.

The prompts are dealt into sittings, and every sitting visits the drafters in the opposite order of the one
before (A B C, C B A), so that a slow change of the machine meets all of them alike. Where a drafter cannot be
swapped in, since it has another shape or there is none, every drafter has one visit and the champion a second one
at the end (A B A): how far that is from the first is the drift.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.artifacts import DrafterCheckpoint
from pipeline.kept_sittings import KeptSittings
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")

ROLES = ("champion", "challenger", "control")

Candidates = Mapping[str, Artifact[DrafterCheckpoint] | None]
"""Role → drafter; None: the target alone."""

Prompts = Sequence[Mapping[str, Any]]
"""Rows with ``prompt_ids``, a token budget ``num_tokens`` and ``sampling``."""


class Reply(Protocol):
    """One answer of a server."""

    token_ids: Sequence[int]
    """What the engine emitted, exactly."""
    finish_reason: str | None
    latency_s: float
    ttft_s: float | None
    itl_s: Sequence[float]
    """Gaps between the arrivals after the first."""
    spec: Mapping[str, Any] | None
    """The reply's ``metrics.speculative_decoding``."""
    error: str | None
    """Why there is no answer."""


class Server(Protocol):
    """One engine that serves the target and can change its drafter."""

    def swaps(self, candidates: Candidates) -> bool:
        """Whether it can change between these without a restart."""

    def planned(self) -> Mapping[str, Any]:
        """What it serves with, as far as that is known before it starts: another engine is another measurement."""

    def use(self, role: str, drafter: Artifact[DrafterCheckpoint] | None) -> None:
        """Serve with this drafter from now on, or with none, its caches empty."""

    def answer(self, requests: Sequence[Mapping[str, Any]], *, concurrency: int) -> Sequence[Reply]:
        """The replies to these completion requests, in order, ``concurrency`` at a time."""

    def settings(self) -> Mapping[str, Any]:
        """What of this engine must be equal for two measurements to be compared: version, flags, dtype."""


@dataclass(frozen=True)
class Sitting:
    """What one drafter answered in one block."""

    prompts: Prompts
    replies: list[Reply]
    wall_s: float
    settings: dict[str, Any]
    general: Prompts = ()
    general_replies: list[Reply] = field(default_factory=list)


Sittings = dict[tuple[int, str], Sitting]
"""(block, role) → sitting."""


@dataclass
class Course:
    """The prompts of a comparison, and how they are served."""

    gate: Prompts
    general: Prompts
    warm_up: Prompts
    num_blocks: int
    concurrency: int

    def part(self, block: int) -> tuple[Prompts, Prompts]:
        """The gate prompts and the general ones of a block."""
        return self.gate[block :: self.num_blocks], self.general[block :: self.num_blocks]

    def sit(self, server: Server, block: int, role: str) -> Sitting:
        """One drafter's answers to one block, warmed up; the drafter is in use already."""
        gate, general = self.part(block)
        if self.warm_up:
            server.answer(_requests(self.warm_up), concurrency=self.concurrency)
        started = time.monotonic()
        replies = list(server.answer(_requests(gate), concurrency=self.concurrency))
        wall_s = time.monotonic() - started
        others = list(server.answer(_requests(general), concurrency=self.concurrency)) if general else []
        logger.info(
            "evaluate: sitting %d/%d, %s: %d replies in %.1f s", block + 1, self.num_blocks, role, len(replies), wall_s
        )
        return Sitting(gate, replies, wall_s, dict(server.settings()), general, others)


def alternate(
    candidates: Candidates,
    course: Course,
    *,
    server: Server,
    kept: KeptSittings,
    settled: Callable[[Sittings, int], bool],
) -> Sittings:
    """What every drafter answered, block by block: all blocks, or those until ``settled(sittings, blocks done)``.

    Whatever happens, the server is left with the champion.
    """
    roles = [role for role in ROLES if role in candidates]
    sittings: Sittings = {}
    used = False
    try:
        for block in range(course.num_blocks):
            done = kept.load(f"block-{block}", course)
            if done is None:
                done, used = {}, True
                for role in roles if block % 2 == 0 else reversed(roles):
                    server.use(role, candidates[role])
                    done[block, role] = course.sit(server, block, role)
                kept.save(f"block-{block}", done)
            sittings |= done
            if block + 1 < course.num_blocks and settled(sittings, block + 1):
                logger.info("evaluate: settled after %d of %d sittings", block + 1, course.num_blocks)
                break
    finally:
        if used:
            server.use("champion", candidates["champion"])
    return sittings


def with_restarts(
    candidates: Candidates, course: Course, *, server: Server, kept: KeptSittings
) -> tuple[Sittings, Sittings]:
    """What every drafter answered in a visit of its own, and what the champion answered in its second visit."""
    visits = [role for role in ROLES if role in candidates] + ["champion"]
    sittings: Sittings = {}
    for number, role in enumerate(visits):
        done = kept.load(f"visit-{number}", course)
        if done is None:
            server.use(role, candidates[role])
            done = {(block, role): course.sit(server, block, role) for block in range(course.num_blocks)}
            kept.save(f"visit-{number}", done)
        if number == len(visits) - 1:
            return sittings, done
        sittings |= done
    raise AssertionError("unreachable")


def _requests(rows: Prompts) -> list[dict[str, Any]]:
    """Completion requests of exact ids, streamed: only then are there times of single tokens."""
    return [
        {
            "prompt": list(row["prompt_ids"]),
            "max_tokens": row["num_tokens"],
            **row["sampling"],
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for row in rows
    ]
