"""Everything that the watch knows, folded hour by hour, and the file that keeps it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts import write_durably
from pipeline.errors import SchemaError
from pipeline.watch import asked, pays, promise
from pipeline.watch.accepted import Watching, advance
from pipeline.watch.alarms import ASKED, PAYS, PROMISE, Alarm, ended
from pipeline.watch.asked import DAY_S, Asked, Drift
from pipeline.watch.hours import HOUR_S, Hour
from pipeline.watch.pays import Load, Paid, Point
from pipeline.watch.promise import Promise
from pipeline.watch_config import WatchConfig

FILE = "state.json"
VERSION = 1
_NAMED = 4
_MAX_ALARMS = 200  # that are kept beside those that hold


@dataclass(frozen=True)
class State:
    """What is known after some hours."""

    accepted: Watching = field(default_factory=Watching)
    """Its alarms are those of every kind."""
    asked_since: int | None = None
    """Start of the day from which on days are alike."""
    asked_until: int | None = None
    """Start of the first day that has not been judged."""
    drifts: tuple[Drift, ...] = ()
    """Of the last day that was."""
    paid: Paid | None = None
    """Of the last hours."""

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """All of them, in the order in which they were raised."""
        return self.accepted.alarms

    def with_alarms(self, alarms: Sequence[Alarm]) -> "State":
        """The same with other alarms."""
        return replace(self, accepted=replace(self.accepted, alarms=tuple(alarms)))


@dataclass(frozen=True)
class Seen:
    """What the hours are judged by."""

    days: Mapping[int, Sequence[Asked]]
    """Start of the day → its sample of conversations."""
    loads: Sequence[Load] = ()
    points: Sequence[Point] = ()
    """Where speculation pays, as the gate measured it."""
    promises: Mapping[str, Promise] = ()  # type: ignore[assignment]
    """Drafter version → what the gate measured of it."""


def fold(config: WatchConfig, state: State, hours: Sequence[Hour], seen: Seen, *, until: int) -> State:
    """The state after all hours that begin before ``until``; ``hours`` are those that are kept, in order.

    Hours that were taken before change nothing, so it can be called with the same ones again.
    """
    for number, hour in enumerate(hours):
        if state.accepted.last is None or hour.start > state.accepted.last:
            before = state.accepted.phase
            state = replace(state, accepted=advance(config, state.accepted, hours[: number + 1]))
            has_settled = before == "settling" and state.accepted.phase == "watching"
            state = _promised(config, state, hours[: number + 1], seen, is_due=has_settled)
    state = _asked(config, state, seen, until=until)
    state = _paid(config, state, seen, until=until)
    old = len(state.alarms) - _MAX_ALARMS
    return state.with_alarms([one for i, one in enumerate(state.alarms) if i >= old or one.over is None])


def _promised(config: WatchConfig, state: State, hours: Sequence[Hour], seen: Seen, *, is_due: bool) -> State:
    """A look at the promise: when a release has settled, and at the end of every day."""
    made = dict(seen.promises).get(state.accepted.version or "")
    if made is None or not (is_due or promise.day_is_over(hours[-1])):
        return state
    if any(one.kind == PROMISE and one.over is None for one in state.alarms):
        return state
    since = hours[-1].start - config.learn_days * DAY_S
    own = [one for one in hours if one.version == state.accepted.version and one.start > since]
    found = promise.kept(config, made, own)
    raised = promise.alarm_of(made, found, since=own[0].start, at=hours[-1].start + HOUR_S)
    return state if raised is None else state.with_alarms((*state.alarms, raised))


def _asked(config: WatchConfig, state: State, seen: Seen, *, until: int) -> State:
    """Every day that is over and was not judged, against the days before it."""
    dimensions = config.dimensions
    for day in sorted(seen.days):
        if day + DAY_S > until or (state.asked_until is not None and day < state.asked_until):
            continue
        since = day if state.asked_since is None else state.asked_since
        oldest = max(since, day - config.reference_days * DAY_S)
        reference = {start: seen.days[start] for start in seen.days if oldest <= start < day}
        state = replace(state, asked_since=since, asked_until=day + DAY_S)
        if len(reference) < config.learn_days:
            continue
        drifts = asked.drifts(config, dimensions, seen.days[day], reference, day)
        state = replace(state, drifts=tuple(drifts))
        if found := {one.dimension: one.statistic for one in drifts if one.is_alarm}:
            alarm = Alarm(ASKED, day + DAY_S, day, _asked_message(found), True, tuple(found), found)
            state = replace(state, asked_since=day).with_alarms((*state.alarms, alarm))
    return state


def _asked_message(found: Mapping[str, float]) -> str:
    named = ", ".join(list(found)[:_NAMED])
    return f"what is asked drifted in {named}; acceptance within slices is watched apart from it"


def _paid(config: WatchConfig, state: State, seen: Seen, *, until: int) -> State:
    since = until - config.pays_hours * HOUR_S
    if not seen.points:
        return replace(state, paid=None)
    found = pays.paid(seen.points, [one for one in seen.loads if since <= one.start < until])
    is_firing = any(one.kind == PAYS and one.over is None for one in state.alarms)
    judged = pays.judged(config, found, firing=is_firing, at=until)
    state = replace(state, paid=found)
    if isinstance(judged, Alarm):
        return state.with_alarms((*state.alarms, judged))
    return state if judged or not is_firing else state.with_alarms(ended(state.alarms, (PAYS,), "it pays again"))


def back_to(state: State, start: int) -> State:
    """The state without hours after ``start``, which a clock that was ahead had made up."""
    watching = state.accepted
    if watching.last is None or watching.last <= start:
        return state
    settles_at = watching.settles_at and min(watching.settles_at, start + HOUR_S)
    watching = replace(watching, last=start, since=min(watching.since, start), settles_at=settles_at)
    day = start // DAY_S * DAY_S
    asked_since, asked_until = (one and min(one, day) for one in (state.asked_since, state.asked_until))
    return replace(state, accepted=watching, asked_since=asked_since, asked_until=asked_until)


def write_state(folder: Path, state: State) -> None:
    """Keep it: whole or not at all."""
    body = {
        "schema_version": VERSION,
        "accepted": state.accepted.as_dict(),
        "asked_since": state.asked_since,
        "asked_until": state.asked_until,
        "drifts": [one.__dict__ for one in state.drifts],
        "paid": state.paid and state.paid.__dict__,
    }
    write_durably(folder / FILE, (json.dumps(body, separators=(",", ":")) + "\n").encode())


def read_state(folder: Path) -> State:
    """What was kept, or a beginning. Raises: SchemaError for a file that is none."""
    path = folder / FILE
    if not path.exists():
        return State()
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        if body["schema_version"] != VERSION:
            raise ValueError(f"schema version {body['schema_version']}, expected {VERSION}")
        return State(
            accepted=Watching.from_dict(body["accepted"]),
            asked_since=body["asked_since"],
            asked_until=body["asked_until"],
            drifts=tuple(Drift(**one) for one in body["drifts"]),
            paid=body["paid"] and Paid(**body["paid"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{path}: cannot be read ({type(error).__name__}: {error}); remove it to learn anew")
