"""The state of a rollout: what has been decided, and what cannot be seen by looking at the replicas.

It is written before every step, so whoever takes over from a controller that died reads it, looks at the replicas,
and goes on.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from serving.fleet.counters import counters_of
from serving.fleet.replicas import Drafter
from serving.fleet.soak import Interval, SoakPolicy
from serving.monitor.counters import Counters

Phase = Literal["canary", "soak", "waves", "naming", "reverting", "converged", "reverted", "stopped"]
"""naming: every replica serves it, and the alias is to be moved. stopped: ended, and not all could be put back."""
ENDED = ("converged", "reverted", "stopped")
FORWARD = ("canary", "soak", "waves")
"""Phases that can still be aborted."""
BACK = ("reverting", "reverted", "stopped")


@dataclass(frozen=True)
class Policy:
    """How a rollout goes about it."""

    max_unavailable: int = 1
    """Replicas that may be out of service at a time: down, or being changed."""
    max_failed: int = 0
    """Replicas that may refuse, or stay down, before all are put back."""
    turns_back: bool = True
    """False: nobody is put back, however many are lost. ``max_failed`` still says how many may be down at a restart."""
    attempts: int = 1
    """Tries before a replica counts as refusing."""
    max_changes: int = 3
    """Changes of one replica in one rollout: it may have gone down, and come back with its old drafter, in between."""
    dead_after_s: float = 60.0
    tick_s: float = 2.0
    """Between two looks."""
    soak: SoakPolicy | None = None
    soak_tick_s: float = 10.0


@dataclass(frozen=True)
class Record:
    """One replica in a rollout."""

    name: str
    url: str
    state: Literal["waiting", "changing", "serving", "failed"] = "waiting"
    """changing: a change was begun, and what came of it is not known yet. failed: it refused."""
    why: str = ""
    before: Drafter | None = None
    """What it served when this rollout first saw it."""
    reference: str | None = None
    """Hash of its greedy probe tokens from before a change."""
    stale: str | None = None
    """Its live fingerprint from before a change to other weights."""
    refusals: int = 0
    changes: int = 0
    began_at: float | None = None
    """When its last change was begun (epoch seconds, as all times here)."""
    down_since: float | None = None
    version: str | None = None
    """What its last change brought it, ``since`` when (ISO 8601), at which ``counts`` and at what cost (``change``)."""
    since: str | None = None
    counts: Counters | None = None
    change: Mapping[str, Any] = field(default_factory=dict)
    """pause_s, changed_outputs, live_fingerprint, …"""

    def is_given_up(self, now: float, policy: Policy) -> bool:
        """Whether it has been down for so long that nobody waits for it."""
        return self.down_since is not None and now - self.down_since >= policy.dead_after_s

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What ``as_dict`` gave."""
        before = Drafter(**plain["before"]) if plain["before"] else None
        return cls(**{**plain, "before": before, "counts": counters_of(plain["counts"])})


@dataclass(frozen=True)
class Soak:
    """The soak so far."""

    began_at: float
    looks: int = 0
    observed_s: float = 0.0
    """For how long it was looked at, until ``last_at``: pauses, and controllers that died, do not count."""
    last_at: float | None = None
    intervals: tuple[Interval, ...] = ()
    last: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Replica → its counts at the last scrape."""
    verdict: str = ""
    """What the last look said."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What ``as_dict`` gave."""
        return cls(**{**plain, "intervals": tuple(Interval(**one) for one in plain["intervals"])})


@dataclass(frozen=True)
class Rollout:
    """A drafter on its way onto all replicas, or back."""

    target: Drafter
    base: Drafter | None
    """What is put back; None: what each replica served before."""
    phase: Phase = "canary"
    why: str = ""
    """Why it is on its way back."""
    canary: str | None = None
    soak: Soak | None = None
    replicas: tuple[Record, ...] = ()
    promise: float | None = None
    """The acceptance length that the gate measured of the target."""
    taken_over_at: float = 0.0
    """When the present controller began (epoch seconds)."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase in ENDED

    def goal(self, record: Record) -> Drafter | None:
        """What a replica is to serve; None: whatever it does."""
        return (self.base or record.before) if self.phase in BACK else self.target

    def record(self, name: str | None) -> Record | None:
        """The record of a replica, or None."""
        return next((record for record in self.replicas if record.name == name), None)

    def with_records(self, *changed: Record) -> Self:
        """The same with these records in the place of those of the same names."""
        by_name = {record.name: record for record in changed}
        return replace(self, replicas=tuple(by_name.get(record.name, record) for record in self.replicas))

    def reverting(self, why: str) -> Self:
        """The way back: every replica has to be looked at again, and refusals so far count for nothing."""
        records = tuple(
            replace(record, state="waiting" if record.state == "failed" else record.state, refusals=0, changes=0)
            for record in self.replicas
        )
        return replace(self, phase="reverting", why=why, replicas=records)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What ``as_dict`` gave."""
        return cls(
            **{
                **plain,
                "target": Drafter(**plain["target"]),
                "base": Drafter(**plain["base"]) if plain["base"] else None,
                "soak": Soak.from_dict(plain["soak"]) if plain["soak"] else None,
                "replicas": tuple(map(Record.from_dict, plain["replicas"])),
            }
        )
