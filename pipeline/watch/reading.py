"""How far the watch has read, and the hours that are not over: one small file, written whole after every look.

A look that is killed before its file is written is forgotten: the next one reads the same records again. One that is
killed after an hour was closed and before the file is written closes the same hour again. So nothing counts twice.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts import write_durably
from pipeline.errors import Rejected, SchemaError
from pipeline.split import SplitKey
from pipeline.watch import asked
from pipeline.watch.asked import Asked
from pipeline.watch.hours import HOUR_S, Cell, Hour, hour_of
from pipeline.watch.logs import Position
from pipeline.watch.served import OTHER, UNKNOWN_VERSION, Served
from pipeline.watch_config import WatchConfig

FILE = "reading.json"
VERSION = 2
_AHEAD_S = 600.0  # a clock that is wrong by more is wrong
_MAX_VALUES = 200  # of a dimension in one hour, and
_MAX_CELLS = 5000  # cells: whatever a header says, an hour stays small
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
    _cells: dict[int, "_Cells"] = field(default_factory=dict, repr=False, compare=False)

    def take(self, one: Served, config: WatchConfig, key: SplitKey, *, now: float) -> None:
        """Count a request. Raises: Rejected for one whose hour is over, or has not begun."""
        hour = int(one.ts // HOUR_S) * HOUR_S
        if one.ts > now + _AHEAD_S:
            raise Rejected("in_the_future")
        if one.ts < now - config.keep_days * asked.DAY_S:
            raise Rejected("too_old")
        if self.closed is not None and hour <= self.closed:
            raise Rejected("late")
        if (cell := self._bounded(hour, one.cell)) != one.cell:
            one = replace(one, cell=cell)
        rows = self.open.setdefault(hour, {}).setdefault(one.version, {})
        sums = rows.setdefault((one.conversation, one.cell), [0.0, 0.0, 0.0])
        for i, count in enumerate((1, one.num_drafts, one.num_accepted_tokens)):
            sums[i] += one.weight * count
        self.newest = one.ts if self.newest is None else max(self.newest, one.ts)
        self._sample(one, config, key)

    def _bounded(self, hour: int, cell: Cell) -> Cell:
        """The cell, or the next one to it in an hour that has too many."""
        if hour not in self._cells:
            self._cells = {start: cells for start, cells in self._cells.items() if start in self.open}
            rows = self.open.get(hour, {}).values()
            self._cells[hour] = _Cells()
            for _, known in (key for own in rows for key in own):
                self._cells[hour].add(known)
        return self._cells[hour].add(cell)

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
            # Requests that a swap came between name no version: such an hour is the named one's all the same.
            version = max(drafts, key=lambda name: (name != UNKNOWN_VERSION, drafts[name], name))
            others = sum(sums[0] for name, rows in versions.items() if name != version for sums in rows.values())
            if not any(versions.values()):
                continue
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
        if not erased:
            return
        self.sampled = {
            day: [one for one in sample if one.conversation not in erased] for day, sample in self.sampled.items()
        }
        for versions in self.open.values():
            for version, rows in versions.items():
                versions[version] = {key: sums for key, sums in rows.items() if key[0] not in erased}

    def expire(self, before: float) -> None:
        """Forget single conversations of days that began before a time."""
        self.sampled = {day: sample for day, sample in self.sampled.items() if day >= before}

    def back_to(self, now: float) -> bool:
        """Forget what lies in the future, since a clock was ahead and is right again; whether anything did."""
        last = int(now // HOUR_S) * HOUR_S - HOUR_S
        was_ahead = self.closed is not None and self.closed > last + HOUR_S
        self.open = {start: rows for start, rows in self.open.items() if start <= now + _AHEAD_S}
        self.sampled = {day: sample for day, sample in self.sampled.items() if day <= now + _AHEAD_S}
        if self.newest is not None:
            self.newest = min(self.newest, now + _AHEAD_S)
        if was_ahead:
            self.closed = last
        return was_ahead

    def write(self, folder: Path, config: WatchConfig) -> None:
        """Keep it: whole or not at all."""
        body = {
            "schema_version": VERSION,
            "dimensions": self.dimensions,
            "positions": {key: astuple(one) for key, one in self.positions.items()},
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


@dataclass
class _Cells:
    """The cells of an hour, as many as there may be."""

    known: set[Cell] = field(default_factory=set)
    values: dict[int, set[str]] = field(default_factory=dict)
    """Dimension, by its place → its values."""

    def add(self, cell: Cell) -> Cell:
        """The cell as it counts: what is one value too many is of the others."""
        if cell in self.known:
            return cell
        sets = [self.values.setdefault(i, set()) for i in range(len(cell))]
        named = zip(cell, sets, strict=True)
        found = tuple(value if value in own or len(own) < _MAX_VALUES else OTHER for value, own in named)
        if found not in self.known and len(self.known) >= _MAX_CELLS:
            found = (OTHER,) * len(cell)
        for value, own in zip(found, sets, strict=True):
            own.add(value)
        self.known.add(found)
        return found


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
