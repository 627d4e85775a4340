"""Alarms: what was found, since when, and whether it still holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

ACCEPTED, ASKED, PROMISE, PAYS = "accepted", "asked", "promise", "pays"
RETRAIN = (ACCEPTED, ASKED, PROMISE)
"""What a drafter trained on newer traffic may help against."""


@dataclass(frozen=True)
class Alarm:
    """One thing that happened. Its id is the same whenever the same hours are read again."""

    kind: str
    """accepted: acceptance shifted; asked: what is asked drifted; promise: less than the gate measured; pays:
    speculation costs time at this load."""
    at: int
    """When it was raised: the end of the hour that showed it, in seconds since 1970."""
    since: int
    """When it began, about."""
    message: str
    falls: bool = True
    """Whether it is about less acceptance; a rise is told, and asks for nothing."""
    slices: tuple[str, ...] = ()
    changes: Mapping[str, float] = ()  # type: ignore[assignment]
    """Slice or dimension → relative change of accepted drafts a step, or the drift's statistic."""
    over: str | None = None
    """Why it no longer holds."""
    taken: str | None = None
    """When somebody (a retraining) took it on."""

    @property
    def id(self) -> str:
        """Names it: kind and hour."""
        return f"{self.kind}-{datetime.fromtimestamp(self.at, UTC):%Y%m%dT%H}"

    @property
    def fires(self) -> bool:
        """Whether it holds and nobody has taken it on."""
        return self.over is None and self.taken is None

    @property
    def retrains(self) -> bool:
        """Whether a retraining is the answer."""
        return self.fires and self.falls and self.kind in RETRAIN

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**self.__dict__, "id": self.id, "slices": list(self.slices), "changes": dict(self.changes)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Alarm":
        """The inverse of as_dict."""
        own = {name: value for name, value in body.items() if name != "id"}
        return cls(**own | {"slices": tuple(body["slices"])})


def ended(alarms: Iterable[Alarm], kinds: Sequence[str], why: str) -> tuple[Alarm, ...]:
    """The alarms, those of these kinds over."""
    return tuple(replace(one, over=why) if one.over is None and one.kind in kinds else one for one in alarms)
