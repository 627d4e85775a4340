"""How far the watch has read, and the hours that are not over: one small file, written whole after every look.

A look that is killed before its file is written is forgotten: the next one reads the same records again. One that is
killed after an hour was closed and before the file is written closes the same hour again. So nothing counts twice.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts import write_durably
from pipeline.errors import Rejected, SchemaError
from pipeline.split import SplitKey
from pipeline.watch import asked
from pipeline.watch.asked import Asked
from pipeline.watch.hours import HOUR_S, Cell, Hour, hour_of
from pipeline.watch.logs import Position
from pipeline.watch.served import Served
from pipeline.watch_config import WatchConfig

FILE = "reading.json"
VERSION = 1
_AHEAD_S = 600.0  # a clock that is wrong by more is wrong
Rows = dict[tuple[str, Cell], list[float]]


@dataclass
class Reading:
    """What was read so far and is not in a closed hour."""

    dimensions: tuple[str, ...]
    positions: dict[str, Position] = field(default_factory=dict)
    open: dict[int, dict[str, Rows]] = field(default_factory=dict)
    """Start of the hour → drafter version → sums of its conversations."""
    sampled: dict[int, list[Asked]] = field(default_factory=dict)
    """Start of the day → conversations that drift in what is asked is told from."""
    closed: int | None = None
    """Start of the last hour that is closed."""
    newest: float | None = None
    """When the newest record was served."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """What became of records: counted, or why not."""

    def take(self, one: Served, config: WatchConfig, key: SplitKey, *, now: float) -> None:
        """Count a request. Raises: Rejected for one whose hour is over, or has not begun."""
        hour = int(one.ts // HOUR_S) * HOUR_S
        if one.ts > now + _AHEAD_S:
            raise Rejected("in_the_future")
        if one.ts < now - config.keep_days * asked.DAY_S:
            raise Rejected("too_old")
        if self.closed is not None and hour <= self.closed:
            raise Rejected("late")
        rows = self.open.setdefault(hour, {}).setdefault(one.version, {})
        sums = rows.setdefault((one.conversation, one.cell), [0.0, 0.0, 0.0])
        for i, count in enumerate((1, one.num_drafts, one.num_accepted_tokens)):
            sums[i] += one.weight * count
        self.newest = one.ts if self.newest is None else max(self.newest, one.ts)
        self._sample(one, config, key)

    def _sample(self, one: Served, config: WatchConfig, key: SplitKey) -> None:
        day = int(one.ts // asked.DAY_S) * asked.DAY_S
        rank = asked.rank_of(key.hash("asked", f"{day}\0{one.conversation}"), one.weight)
        sample = self.sampled.setdefault(day, [])
        sample.append(Asked(one.conversation, rank, one.cell, one.sketch))
        if len(sample) >= 4 * config.asked_sample:
            self.sampled[day] = asked.lowest(sample, config.asked_sample)

    def close(self, until: float) -> Iterator[Hour]:
        """The hours that end by a time, in order, each of the version that most of it was drafted by."""
        for start in sorted(one for one in self.open if one + HOUR_S <= until):
            versions = self.open.pop(start)
            drafts = {version: sum(sums[1] for sums in rows.values()) for version, rows in versions.items()}
            version = max(drafts, key=lambda name: (drafts[name], name))
            others = sum(sums[0] for name, rows in versions.items() if name != version for sums in rows.values())
            yield hour_of(start, version, self.dimensions, versions[version], others=round(others))
        last = int(until // HOUR_S) * HOUR_S - HOUR_S
        if last >= 0:
            self.closed = last if self.closed is None else max(self.closed, last)

    def days(self, config: WatchConfig) -> Iterator[tuple[int, list[Asked]]]:
        """The samples of days that are closed."""
        for day in sorted(self.sampled):
            if self.closed is not None and day + asked.DAY_S <= self.closed + HOUR_S:
                yield day, asked.lowest(self.sampled.pop(day), config.asked_sample)

    def without(self, erased: frozenset[str]) -> None:
        """Forget conversations of erased subjects, as far as anything is still about single ones."""
        self.sampled = {
            day: [one for one in sample if one.conversation not in erased] for day, sample in self.sampled.items()
        }

    def write(self, folder: Path, config: WatchConfig) -> None:
        """Keep it: whole or not at all."""
        body = {
            "schema_version": VERSION,
            "dimensions": self.dimensions,
            "positions": {key: [one.size_bytes, one.records] for key, one in self.positions.items()},
            "open": [
                [start, version, [[name, list(cell), *sums] for (name, cell), sums in rows.items()]]
                for start, versions in self.open.items()
                for version, rows in versions.items()
            ],
            "sampled": [
                [day, asked.as_rows(asked.lowest(sample, config.asked_sample))] for day, sample in self.sampled.items()
            ],
            "closed": self.closed,
            "newest": self.newest,
            "outcomes": dict(sorted(self.outcomes.items())),
        }
        write_durably(folder / FILE, (json.dumps(body, separators=(",", ":")) + "\n").encode())


def read_reading(folder: Path, dimensions: Sequence[str]) -> Reading:
    """Where the last look ended, or a beginning.

    Raises: SchemaError for a file that is none, or of other dimensions.
    """
    path = folder / FILE
    if not path.exists():
        return Reading(tuple(dimensions))
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        if body["schema_version"] != VERSION:
            raise ValueError(f"schema version {body['schema_version']}, expected {VERSION}")
        found = Reading(
            dimensions=tuple(body["dimensions"]),
            positions={key: Position(*one) for key, one in body["positions"].items()},
            sampled={day: asked.from_rows(rows) for day, rows in body["sampled"]},
            closed=body["closed"],
            newest=body["newest"],
            outcomes=Counter(body["outcomes"]),
        )
        for start, version, rows in body["open"]:
            found.open.setdefault(start, {})[version] = {(name, tuple(cell)): sums for name, cell, *sums in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{path}: cannot be read ({type(error).__name__}: {error}); remove {folder} to begin anew")
    if found.dimensions != tuple(dimensions):
        raise SchemaError(
            f"{path}: watched by {', '.join(found.dimensions)}, watch.dimensions says {', '.join(dimensions)}; put "
            f"that back, or move {folder} away to learn anew"
        )
    return found
