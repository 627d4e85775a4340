"""What became of the records of each source: counted piece by piece, added up, and shown on the report's page."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class SourceTally:
    """Of one source. ``records`` = ``kept`` + all of ``dropped``."""

    records: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason → records."""
    newest: float | None = None
    """The source's watermark: the latest time of a record, in seconds since 1970."""

    def saw(self, ts: float | None) -> None:
        """Move the watermark up to this time."""
        if ts is not None:
            self.newest = ts if self.newest is None else max(self.newest, ts)

    def add(self, other: Self) -> None:
        """Count another piece of the source in."""
        self.records += other.records
        self.kept += other.kept
        self.dropped.update(other.dropped)
        self.saw(other.newest)


@dataclass
class Tally:
    """Of all sources."""

    sources: dict[str, SourceTally] = field(default_factory=dict)
    redacted: Counter[str] = field(default_factory=Counter)
    """Kind → values that were replaced in records that were kept; never the values."""

    def of(self, source: str) -> SourceTally:
        """The tally of a source, new where there is none."""
        return self.sources.setdefault(source, SourceTally())

    def add(self, other: Self) -> None:
        """Count in what another piece had."""
        for name, one in other.sources.items():
            self.of(name).add(one)
        self.redacted.update(other.redacted)

    @property
    def records(self) -> int:
        """Records of all sources."""
        return sum(one.records for one in self.sources.values())

    @property
    def kept(self) -> int:
        """Records that became a row, or count in one."""
        return sum(one.kept for one in self.sources.values())

    @property
    def dropped(self) -> Counter[str]:
        """Reason → records of all sources."""
        return sum((one.dropped for one in self.sources.values()), Counter())

    def as_json(self) -> dict[str, Any]:
        """In the order of names, so that equal tallies are equal bytes."""
        sources = {
            name: {
                "records": one.records,
                "kept": one.kept,
                "dropped": dict(sorted(one.dropped.items())),
                "newest": one.newest,
            }
            for name, one in sorted(self.sources.items())
        }
        return {"sources": sources, "redacted": dict(sorted(self.redacted.items()))}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """What ``as_json`` wrote."""
        sources = {
            name: SourceTally(one["records"], one["kept"], Counter(one["dropped"]), one["newest"])
            for name, one in body["sources"].items()
        }
        return cls(sources, Counter(body["redacted"]))


def total(bodies: Iterable[bytes]) -> Tally:
    """The sum of tallies that were written as JSON."""
    found = Tally()
    for body in bodies:
        found.add(Tally.from_json(json.loads(body)))
    return found
