"""Shifts in what is accepted: two CUSUMs a slice, hour by hour, against a reference that is learned as it goes.

    learning   the first days of a fleet: nothing is watched yet
    watching   every hour moves the CUSUMs; one that crosses its threshold is an alarm, and an event begins
    settling   the hours after an alarm or a release: levels are learned anew; what moves now belongs to the event

Everything here is a pure function of the hours: the same hours give the same alarms, whenever and however often they
are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.watch.alarms import ACCEPTED, ASKED, PROMISE, Alarm, ended
from pipeline.watch.hours import ALL, HOUR_S, Hour
from pipeline.watch.learning import learn, relevel
from pipeline.watch.reference import Reference, compare, lay, step
from pipeline.watch.wording import when
from pipeline.watch_config import WatchConfig

FALLS, RISES = -1, 1
_QUIET_SHARE = 0.4  # of the threshold: with a CUSUM above it, something may have begun, and nothing is learned
_MIN_SHARE = 0.6  # of the hours of the learning days have to have traffic
_DAY_H, _WEEK = 24, 7
_NAMED = 4  # slices in a message
_LIKE_THE_MOST = 0.7  # of the largest change: slices that changed about as much


@dataclass(frozen=True)
class Sums:
    """One CUSUM a slice, and when each was last at zero."""

    values: Mapping[str, float]
    since: Mapping[str, int]

    @classmethod
    def zero(cls, slices: Sequence[str], at: int) -> "Sums":
        """All at zero."""
        return cls(dict.fromkeys(slices, 0.0), dict.fromkeys(slices, at))


@dataclass(frozen=True)
class Watching:
    """What is known after some hours."""

    version: str | None = None
    since: int = 0
    """Hours from here on are of one level."""
    settles_at: int | None = None
    """The end of the event that goes on."""
    event: str | None = None
    """Id of the alarm that began it; None for a release."""
    reference: Reference | None = None
    falls: Sums = Sums({}, {})
    rises: Sums = Sums({}, {})
    last: int | None = None
    """Start of the last hour that was taken."""
    alarms: tuple[Alarm, ...] = ()

    @property
    def phase(self) -> str:
        """learning, watching or settling."""
        return "learning" if self.reference is None else "watching" if self.settles_at is None else "settling"

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        plain = {**self.__dict__, "falls": self.falls.__dict__, "rises": self.rises.__dict__}
        alarms = [one.as_dict() for one in self.alarms]
        return {**plain, "reference": self.reference and self.reference.as_dict(), "alarms": alarms}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Watching":
        """The inverse of as_dict."""
        made = {name: Sums(**body[name]) for name in ("falls", "rises")}
        reference = body["reference"] and Reference.from_dict(body["reference"])
        alarms = tuple(map(Alarm.from_dict, body["alarms"]))
        return cls(**{**body, **made, "reference": reference, "alarms": alarms})


def advance(config: WatchConfig, state: Watching, hours: Sequence[Hour]) -> Watching:
    """The state after the last of these hours; ``hours`` are all that are kept, in order.

    An hour that was taken already changes nothing.
    """
    hour = hours[-1]
    if state.last is not None and hour.start <= state.last:
        return state
    state = replace(state, last=hour.start)
    if hour.version != state.version:
        state = _released(config, state, hour)
    own = [one for one in hours if one.start >= state.since and one.version == state.version]
    if state.reference is None:
        return _learned(config, state, own)
    if state.settles_at is not None:
        return _settled(config, state, own) if hour.start + HOUR_S >= state.settles_at else state
    state, change = _stepped(config, state, state.reference, hour)
    if found := _crossed(state, state.reference):
        return _alarmed(config, state, change, *found)
    return _learned_again(config, state, own) if hour.start // HOUR_S % _DAY_H == _DAY_H - 1 else state


def _released(config: WatchConfig, state: Watching, hour: Hour) -> Watching:
    """Another drafter: what was expected of the last one is over, its rhythm is not."""
    settles = None if state.reference is None else hour.start + config.settle_hours * HOUR_S
    slices = state.reference.slices if state.reference else ()
    over = ended(state.alarms, (ACCEPTED, ASKED, PROMISE), f"drafter version {hour.version} serves")
    return replace(
        state,
        version=hour.version,
        since=hour.start,
        settles_at=settles,
        event=None,
        falls=Sums.zero(slices, hour.start),
        rises=Sums.zero(slices, hour.start),
        alarms=over,
    )


def _learned(config: WatchConfig, state: Watching, own: Sequence[Hour]) -> Watching:
    """With a reference, once there are days enough."""
    needed = config.learn_days * _DAY_H
    if not own or own[-1].start + HOUR_S - own[0].start < needed * HOUR_S or len(own) < _MIN_SHARE * needed:
        return state
    return _with(state, learn(config, own[-config.reference_days * _DAY_H :]), own[-1].start + HOUR_S)


def _learned_again(config: WatchConfig, state: Watching, own: Sequence[Hour]) -> Watching:
    """A day is over and all was quiet: what is expected gets surer, and follows a slow change of rhythm.

    Once there are days enough, rhythm too is learned again, once a week.
    """
    reference = state.reference
    sums = [np.array([one.values[name] for name in reference.slices]) for one in (state.falls, state.rises)]
    highest = float((np.maximum(*sums) / reference.threshold).max())
    settled = own[:-_DAY_H][-config.reference_days * _DAY_H :]  # what began today shall not be learned as usual
    if highest > _QUIET_SHARE or not settled:
        return state
    days = len(own) // _DAY_H
    if days < config.learn_days:
        # The level is of the hours that settled it until there are more than those.
        is_surer = len(settled) > min(reference.num_hours, config.settle_hours)
        return replace(state, reference=relevel(config, reference, settled)[0]) if is_surer else state
    return _with(state, learn(config, settled), own[-1].start + HOUR_S) if days % _WEEK == 0 else state


def _with(state: Watching, reference: Reference, at: int) -> Watching:
    """The state with another reference: CUSUMs of slices that stay go on."""

    def carried(sums: Sums) -> Sums:
        zero = Sums.zero(reference.slices, at)
        known = {name: value for name, value in sums.values.items() if name in zero.values}
        return Sums(zero.values | known, zero.since | {name: sums.since[name] for name in known})

    return replace(state, reference=reference, falls=carried(state.falls), rises=carried(state.rises))


def _settled(config: WatchConfig, state: Watching, own: Sequence[Hour]) -> Watching:
    """The event is over: levels of the hours since it began, and what it came to in each slice."""
    reference, moved, error = relevel(config, state.reference, own)
    alarms = state.alarms
    if state.event is not None:
        changes = _clear(reference, moved, error)
        alarms = tuple(
            replace(one, changes=changes, slices=tuple(changes), message=_message(changes, one.since, one.falls))
            if one.id == state.event and changes
            else one
            for one in alarms
        )
    at = own[-1].start + HOUR_S
    zero = Sums.zero(reference.slices, at)
    return replace(state, reference=reference, settles_at=None, event=None, falls=zero, rises=zero, alarms=alarms)


def _clear(reference: Reference, moved: np.ndarray, error: np.ndarray) -> dict[str, float]:
    """Slice → change, of those that changed by more than their own doubt; the largest first."""
    sure = np.abs(moved) > 3 * error
    found = {name: float(moved[i]) for i, name in enumerate(reference.slices) if sure[i] and abs(moved[i]) > 0.03}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def _stepped(config: WatchConfig, state: Watching, reference: Reference, hour: Hour) -> tuple[Watching, np.ndarray]:
    """The state with its CUSUMs moved by an hour, and the hour's change of each slice."""
    compared = compare(reference, lay(reference.cells, reference.slices, [hour]))

    def moved(sums: Sums, direction: int) -> Sums:
        added = step(config, reference, compared, direction=direction)[0]
        values, since = {}, {}
        for i, name in enumerate(reference.slices):
            values[name] = max(0.0, sums.values[name] + float(added[i]))
            since[name] = sums.since[name] if values[name] > 0 else hour.start + HOUR_S
        return Sums(values, since)

    return replace(state, falls=moved(state.falls, FALLS), rises=moved(state.rises, RISES)), compared.change[0]


def _crossed(state: Watching, reference: Reference) -> tuple[int, list[str]] | None:
    """The direction and the slices of CUSUMs above their thresholds, the highest first."""
    for direction, sums in ((FALLS, state.falls), (RISES, state.rises)):
        over = {
            name: sums.values[name] / reference.threshold[i]
            for i, name in enumerate(reference.slices)
            if reference.watched[i] and sums.values[name] > reference.threshold[i]
        }
        if over:
            return direction, sorted(over, key=lambda name: -over[name])
    return None


def _alarmed(config: WatchConfig, state: Watching, change: np.ndarray, direction: int, slices: list[str]) -> Watching:
    sums = state.falls if direction == FALLS else state.rises
    since = min(sums.since[name] for name in slices)
    at = state.last + HOUR_S
    place = [state.reference.slices.index(name) for name in slices]
    changes = {name: float(change[i]) for name, i in zip(slices, place, strict=True)}
    falls = direction == FALLS
    alarm = Alarm(ACCEPTED, at, since, _message(dict.fromkeys(slices), since, falls), falls, tuple(slices), changes)
    before = state.alarms if falls else ended(state.alarms, (ACCEPTED, PROMISE), "acceptance rose again")
    return replace(
        state,
        since=at,  # what came before belongs to the shift only in part
        settles_at=at + config.settle_hours * HOUR_S,
        event=alarm.id,
        alarms=(*before, alarm),
        falls=Sums.zero(state.reference.slices, at),
        rises=Sums.zero(state.reference.slices, at),
    )


def _message(changes: Mapping[str, float | None], since: int, falls: bool) -> str:
    """What happened, by how much where that is known: everywhere, or in the slices that changed most."""
    sizes = {name: abs(value) for name, value in changes.items() if value is not None}
    most = max(sizes.values(), default=None)
    moved = "fell" if falls else "rose"
    if ALL in changes and (most is None or sizes[ALL] >= _LIKE_THE_MOST * most):
        size = "" if most is None else f" by {sizes[ALL]:.0%}"
        return f"accepted drafts a step {moved}{size} everywhere since about {when(since)}"
    named = [name for name in changes if name != ALL and (most is None or sizes[name] >= _LIKE_THE_MOST * most)]
    size = "" if most is None else f" by {most:.0%}"
    rest = len(named) - _NAMED
    more = f" and {rest} more slices" if rest > 0 else ""
    return f"accepted drafts a step {moved}{size} in {', '.join(named[:_NAMED])}{more} since about {when(since)}"
