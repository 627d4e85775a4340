"""What replicas did, hour by hour, from looks at their counters; kept in one small file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts import write_durably
from pipeline.errors import SchemaError
from pipeline.watch.hours import HOUR_S, Cell, Hour, hour_of_arrays
from pipeline.watch.pays import Load
from serving.monitor.counters import Counted, Counters, between

FILE = "replicas.json"
VERSION = 2
KEEP_HOURS = 72
_STEPS = ("step_s", "num_steps", "num_iterations")
_SUMS = ("seconds", "num_drafts", "num_accepted_tokens", "num_tokens", "num_requests", *_STEPS)
_GAUGE = ("running", "busy_looks")
_MIN_LOOKS = 12  # of an hour: with fewer, the mean of a gauge says less than the sum of the steps' times
_SPREAD = 0.5  # of accepted drafts between requests, relative: assumed where no record says it

Sums = dict[str, float]


@dataclass
class Replicas:
    """The last look at each replica, and sums of hours."""

    last: dict[str, Counters] = field(default_factory=dict)
    hours: dict[tuple[int, str], Sums] = field(default_factory=dict)
    down: dict[str, str] = field(default_factory=dict)
    """Replica → why it gave no counters at the last look."""
    restarts: dict[str, int] = field(default_factory=dict)

    def look(self, found: Mapping[str, Counters | str]) -> None:
        """Count what every replica did since the last look at it. One that is missing is counted when it is back."""
        self.down = {url: one for url, one in found.items() if isinstance(one, str)}
        for url, one in found.items():
            if isinstance(one, str):
                continue
            counted = between(self.last.get(url), one)
            if counted is not None:
                self._add(url, one, counted)
            self.last[url] = one
        self.last = {url: one for url, one in self.last.items() if url in found}
        self.restarts = {url: count for url, count in self.restarts.items() if url in found}

    def _add(self, url: str, now: Counters, counted: Counted) -> None:
        start = int(now.at // HOUR_S) * HOUR_S
        sums = self.hours.setdefault((start, url), dict.fromkeys((*_SUMS, *_GAUGE), 0.0))
        for name in _SUMS:
            sums[name] += getattr(counted, name)
        if now.running:
            sums["running"], sums["busy_looks"] = sums["running"] + now.running, sums["busy_looks"] + 1
        if counted.restarted:
            self.restarts[url] = self.restarts.get(url, 0) + 1
        self.hours = {key: one for key, one in self.hours.items() if abs(start - key[0]) < KEEP_HOURS * HOUR_S}

    def loads(self) -> list[Load]:
        """The hours of every replica."""
        return [_load(url, start, sums) for (start, url), sums in sorted(self.hours.items())]

    def hours_until(self, until: int, version: str, *, apart: bool) -> list[Hour]:
        """The hours that end by then as hours of the watch: what is watched where no record is read.

        A cell a replica; one for all where they are not ``apart``, since pods have another name each time. Counters
        know no request, so the spread between requests is assumed.
        """
        starts = sorted({start for start, _ in self.hours if start + HOUR_S <= until})
        return [hour for start in starts if (hour := self._hour(start, version, apart)) is not None]

    def _hour(self, start: int, version: str, apart: bool) -> Hour | None:
        import numpy as np

        own = {url: sums for (at, url), sums in self.hours.items() if at == start and sums["num_drafts"]}
        if not own:
            return None
        cells: list[Cell] = [(url if apart else "any",) for url in own]
        rows = np.array([[s["num_requests"], s["num_drafts"], s["num_accepted_tokens"]] for s in own.values()])
        order = np.arange(len(own))
        kinds = list(dict.fromkeys(cells))
        kind = np.array([kinds.index(cell) for cell in cells])
        plain = hour_of_arrays(start, version, ("replica",), order, kind, rows, cells=kinds)
        spread = {name: _assumed(*sums) for name, sums in plain.slices.items()}
        return Hour(start, plain.version, plain.dimensions, plain.cells, spread)

    def write(self, folder: Path) -> None:
        """Keep it: whole or not at all."""
        body = {
            "schema_version": VERSION,
            "last": {url: one.as_dict() for url, one in self.last.items()},
            "hours": [[start, url, sums] for (start, url), sums in self.hours.items()],
            "restarts": self.restarts,
        }
        write_durably(folder / FILE, (json.dumps(body, separators=(",", ":")) + "\n").encode())

    def shown(self) -> dict[str, dict[str, Any]]:
        """Replica → what people see of it: of its last hour with drafts."""
        found: dict[str, dict[str, Any]] = {}
        for (_, url), sums in sorted(self.hours.items()):
            if sums["num_drafts"]:
                length = 1 + sums["num_accepted_tokens"] / sums["num_drafts"]
                found[url] = {"acceptance_length": length, "running": _running(sums)}
        nothing = {"acceptance_length": None, "running": None}
        urls = dict.fromkeys([*self.last, *self.down])
        return {
            url: {**found.get(url, nothing), "down": self.down.get(url), "restarts": self.restarts.get(url, 0)}
            for url in urls
        }


def read_replicas(folder: Path) -> Replicas:
    """What was kept, or a beginning. Raises: SchemaError for a file that is none."""
    path = folder / FILE
    if not path.exists():
        return Replicas()
    try:
        body = json.loads(path.read_text())
        if body["schema_version"] != VERSION:
            raise ValueError(f"schema version {body['schema_version']}, expected {VERSION}")
        last = {url: Counters.from_dict(one) for url, one in body["last"].items()}
        return Replicas(last, {(start, url): sums for start, url, sums in body["hours"]}, restarts=body["restarts"])
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{path}: cannot be read ({type(error).__name__}: {error}); remove it to begin anew")


def _load(url: str, start: int, sums: Sums) -> Load:
    step_s = sums["step_s"] / sums["num_steps"] if sums["num_steps"] else None
    counts = (sums["num_drafts"], sums["num_accepted_tokens"], sums["num_tokens"])
    return Load(url, start, _running(sums), *counts, step_s)


def _running(sums: Sums) -> float:
    """Requests at a time while there were any: the mean of what looks saw.

    With few looks, the larger of two figures that are never too high: by Little's law of the time that requests spent
    in steps, which counts idle time; and requests in a step of the engine, which counts prefills as steps, and a step
    once for each API server process.
    """
    if sums["busy_looks"] >= _MIN_LOOKS:
        return sums["running"] / sums["busy_looks"]
    by_time = sums["step_s"] / sums["seconds"] if sums["seconds"] else 0.0
    return max(by_time, sums["num_steps"] / sums["num_iterations"] if sums["num_iterations"] else 0.0)


def _assumed(requests: float, drafts: float, accepted: float) -> tuple[float, float, float, float]:
    """Sums over requests of drafts², drafts x accepted and accepted², where all have the mean length."""
    n = max(requests, 1.0)
    d, a = drafts / n, accepted / n
    return n, n * d * d, n * d * a, n * (a * a + (_SPREAD * a) ** 2)
