"""Alias moves as a log: what was written, in what order, and which of it counts.

Every move names what must hold when its turn comes: where the aliases that it rests on are. Replayed in the order of
their numbers, all readers agree on which moves happened, so of two people who start from the same place exactly one
moves the alias, and no lock is needed that a dead process could leave behind.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.errors import StageError

_FOUND = ("number", "applied", "previous", "refused")  # not written by the mover: what a reader adds


class AliasMoved(StageError):
    """The alias, or one that the move rests on, isn't where the caller last saw it."""


@dataclass(frozen=True)
class Move:
    """One entry of the log."""

    id: str
    """Random: an append that ended in an error is found again by it."""
    alias: str
    version: str
    expected: dict[str, str | None] = field(default_factory=dict)
    """Alias → the version it must name (None: no version) for this move to count."""
    reason: str = ""
    decision: str | None = None
    actor: str = ""
    at: str = ""
    number: int = 0
    applied: bool = False
    """Someone saw the alias in MLflow where this move, or a later one, puts it."""
    previous: str | None = None
    refused: str | None = None
    """Why this move does not count; None for one that does."""

    def as_json(self) -> str:
        """What is written."""
        return json.dumps({name: value for name, value in asdict(self).items() if name not in _FOUND}, sort_keys=True)


def parse(body: str, *, number: int, applied: bool) -> Move:
    """A move as it was written."""
    known: dict[str, Any] = json.loads(body)
    return Move(**known, number=number, applied=applied)


def replay(written: Iterable[Move]) -> list[Move]:
    """The moves in order, each with where its alias was before, and whether it counts."""
    moves: list[Move] = []
    state: dict[str, str] = {}
    seen: set[str] = set()
    for move in sorted(written, key=lambda move: move.number):
        refused = "was written twice; the first counts" if move.id in seen else broken(move.expected, state)
        seen.add(move.id)
        moves.append(replace(move, previous=state.get(move.alias), refused=refused))
        if refused is None:
            state[move.alias] = move.version
    return moves


def broken(expected: Mapping[str, str | None], state: Mapping[str, str]) -> str | None:
    """What is not as expected, in words; None where everything is."""
    wrong = [
        f"alias {alias} names {_named(state.get(alias))}, expected {_named(version)}"
        for alias, version in expected.items()
        if state.get(alias) != version
    ]
    return "; ".join(wrong) or None


def state_after(moves: Iterable[Move]) -> dict[str, str]:
    """Alias → version, after replayed moves."""
    return {move.alias: move.version for move in moves if move.refused is None}


def _named(version: str | None) -> str:
    return "no version" if version is None else f"version {version}"
