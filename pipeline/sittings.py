"""The sittings of a comparison: one engine, its drafters swapped in turn, in an order that cancels drift.

The prompts are dealt into sittings, and every sitting visits the drafters in the opposite order of the one
before (A B C, C B A), so that a slow change of the machine meets all of them alike.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts import DrafterCheckpoint
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")

ROLES = ("champion", "challenger", "control")

Candidates = Mapping[str, Artifact[DrafterCheckpoint]]


class Reply(Protocol):
    """One answer of a server."""

    token_ids: Sequence[int]
    """What the engine emitted, exactly."""
    finish_reason: str | None
    latency_s: float
    spec: Mapping[str, Any] | None
    """The reply's ``metrics.speculative_decoding``."""
    error: str | None
    """Why there is no answer."""


class Server(Protocol):
    """One engine that serves the target and can change its drafter."""

    def use(self, role: str, folder: Path, manifest: DrafterCheckpoint) -> None:
        """Serve with this drafter from now on, its caches empty."""

    def answer(self, requests: Sequence[Mapping[str, Any]], *, concurrency: int) -> Sequence[Reply]:
        """The replies to these completion requests, in order, ``concurrency`` at a time."""

    def settings(self) -> Mapping[str, Any]:
        """What of this engine must be equal for two measurements to be compared: version, flags, dtype."""


@dataclass(frozen=True)
class Sitting:
    """What one drafter answered in one block."""

    replies: list[Reply]
    wall_s: float
    settings: dict[str, Any]


def alternate(
    candidates: Candidates,
    prompts: Sequence[Mapping[str, Any]],
    *,
    num_blocks: int,
    concurrency: int,
    warm_up: Sequence[Mapping[str, Any]],
    server: Server,
) -> dict[tuple[int, str], Sitting]:
    """(block, role) → what that drafter answered to ``prompts[block::num_blocks]``.

    Prompts are rows with ``prompt_ids`` and a token budget ``num_tokens``. Whatever happens, the server is
    left with the champion.
    """
    roles = [role for role in ROLES if role in candidates]
    sittings = {}
    try:
        for block in range(num_blocks):
            for role in roles if block % 2 == 0 else reversed(roles):
                server.use(role, candidates[role].folder, candidates[role].manifest)
                if warm_up:
                    server.answer(_requests(warm_up), concurrency=concurrency)
                started = time.monotonic()
                replies = server.answer(_requests(prompts[block::num_blocks]), concurrency=concurrency)
                wall_s = time.monotonic() - started
                sittings[block, role] = Sitting(list(replies), wall_s, dict(server.settings()))
                logger.info(
                    "evaluate: sitting %d/%d, %s: %d replies in %.1f s",
                    *(block + 1, num_blocks, role, len(replies), wall_s),
                )
    finally:
        server.use("champion", candidates["champion"].folder, candidates["champion"].manifest)
    return sittings


def _requests(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": list(row["prompt_ids"]),
            "max_tokens": row["num_tokens"],
            "temperature": 0.0,
            "return_token_ids": True,
        }
        for row in rows
    ]
