"""What was served in one hour, as sums: enough to compare acceptance with what is expected, and no text or subject.

A *cell* is one value of every watched dimension; a *slice* (``route=mail``) is all cells with one value of one, and
``all`` is everything. Requests of one conversation are alike, so the spread of a slice is told from sums over
conversations: of (drafts)², drafts x accepted and (accepted)², from which the spread about any rate follows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts import write_durably
from pipeline.errors import SchemaError

HOUR_S = 3600
ALL = "all"
VERSION = 1
Cell = tuple[str, ...]


@dataclass(frozen=True)
class Hour:
    """The sums of one hour and of the drafter version that most of it was drafted by."""

    start: int
    """Seconds since 1970, a whole hour."""
    version: str
    dimensions: tuple[str, ...]
    cells: Mapping[Cell, tuple[float, float, float]]
    """Cell → requests, drafts, accepted drafts; each weighted by how many requests its record stands for."""
    spread: Mapping[str, tuple[float, float, float, float]]
    """Slice → conversations, and the sums over them of drafts², drafts x accepted, accepted²."""
    others: int = 0
    """Requests that another version drafted: in a rollout both serve."""

    @cached_property
    def slices(self) -> dict[str, tuple[float, float, float]]:
        """Slice → requests, drafts, accepted drafts."""
        found: dict[str, list[float]] = {}
        for cell, sums in self.cells.items():
            for name in slices_of(cell, self.dimensions):
                own = found.setdefault(name, [0.0, 0.0, 0.0])
                for i, count in enumerate(sums):
                    own[i] += count
        return {name: (own[0], own[1], own[2]) for name, own in found.items()}


def slices_of(cell: Cell, dimensions: Sequence[str]) -> list[str]:
    """The slices that a cell is in."""
    return [ALL, *(f"{name}={value}" for name, value in zip(dimensions, cell, strict=True))]


Rows = Mapping[tuple[str, Cell], Sequence[float]]
"""(Conversation, cell) → requests, drafts, accepted drafts of one hour and version."""


def hour_of(start: int, version: str, dimensions: Sequence[str], rows: Rows, *, others: int = 0) -> Hour:
    """The sums of an hour's conversations."""
    conversations = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    cells = {cell: i for i, cell in enumerate(dict.fromkeys(cell for _, cell in rows))}
    owner = np.fromiter((conversations[name] for name, _ in rows), np.int64, len(rows))
    kind = np.fromiter((cells[cell] for _, cell in rows), np.int64, len(rows))
    sums = np.array(list(rows.values()), np.float64).reshape(-1, 3)
    return hour_of_arrays(start, version, dimensions, owner, kind, sums, cells=list(cells), others=others)


def hour_of_arrays(
    start: int,
    version: str,
    dimensions: Sequence[str],
    owner: np.ndarray,  # [rows] number of the conversation
    kind: np.ndarray,  # [rows] index into cells
    sums: np.ndarray,  # [rows, 3] requests, drafts, accepted
    *,
    cells: Sequence[Cell],
    others: int = 0,
) -> Hour:
    """``hour_of`` for rows that are arrays already."""
    totals = np.stack([np.bincount(kind, sums[:, i], len(cells)) for i in range(3)], axis=1)
    names: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        for name in slices_of(cell, dimensions):
            names.setdefault(name, []).append(index)
    spread = {}
    for name, members in names.items():
        inside = np.ones(len(kind), bool) if name == ALL else np.isin(kind, members)
        own, place = np.unique(owner[inside], return_inverse=True)
        drafts, accepted = (np.bincount(place, sums[inside, i], len(own)) for i in (1, 2))
        if len(own):
            spread[name] = (
                float(len(own)),
                float(drafts @ drafts),
                float(drafts @ accepted),
                float(accepted @ accepted),
            )
    found = {cell: tuple(map(float, totals[i])) for i, cell in enumerate(cells) if totals[i, 0]}
    return Hour(start, version, tuple(dimensions), found, spread, others)


def file_of(folder: Path, start: int) -> Path:
    """Where an hour is kept."""
    return folder / f"{datetime.fromtimestamp(start, UTC):%Y-%m-%dT%H}.json"


def write_hour(folder: Path, hour: Hour) -> None:
    """Keep an hour: whole or not at all, and never changed afterwards."""
    body = {
        "schema_version": VERSION,
        "start": hour.start,
        "version": hour.version,
        "dimensions": hour.dimensions,
        "cells": [[list(cell), *sums] for cell, sums in hour.cells.items()],
        "spread": hour.spread,
        "others": hour.others,
    }
    write_durably(file_of(folder, hour.start), (json.dumps(body, separators=(",", ":")) + "\n").encode())


def read_hours(folder: Path, *, since: int | None = None) -> list[Hour]:
    """The kept hours from a time on, in order. Raises: SchemaError for a file that is none."""
    first = "" if since is None else file_of(folder, since).name
    return [_read(path) for path in sorted(folder.glob("[0-9]*.json")) if path.name >= first]


def forget_hour(folder: Path, hour: Hour) -> None:
    """Remove an hour that is kept."""
    file_of(folder, hour.start).unlink(missing_ok=True)


def _read(path: Path) -> Hour:
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        if body["schema_version"] != VERSION:
            raise ValueError(f"schema version {body['schema_version']}, expected {VERSION}")
        return Hour(
            start=body["start"],
            version=body["version"],
            dimensions=tuple(body["dimensions"]),
            cells={tuple(cell): tuple(sums) for cell, *sums in body["cells"]},
            spread={name: tuple(sums) for name, sums in body["spread"].items()},
            others=body["others"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{path}: not an hour of the watch ({type(error).__name__}: {error}); remove it to go on")
