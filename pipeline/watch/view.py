"""What the watch shows: one JSON body, from which the page, the metrics and a scheduler's trigger are made."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.acceptance import acceptance_length
from pipeline.watch.accepted import Watching
from pipeline.watch.alarms import ACCEPTED, Alarm
from pipeline.watch.hours import ALL, HOUR_S, Hour, slices_of
from pipeline.watch.reference import Compared, Reference, compare, lay
from pipeline.watch.state import Seen, State
from pipeline.watch.wording import when
from pipeline.watch_config import WatchConfig

_DAY_H = 24
_EVERY_H = 6  # between two points of a line
_SHOWN_ALARMS = 50
_MAX_NEW = 10  # slices that nothing is expected of yet


def as_json(config: WatchConfig, state: State, hours: Sequence[Hour], seen: Seen, *, now: float) -> dict[str, Any]:
    """The body of alarms.json: what holds, what is known of every slice, and whether to retrain."""
    firing = [one for one in state.alarms if one.fires]
    return {
        "at": when(now),
        "at_s": round(now, 3),
        "retrain": any(one.retrains for one in firing),
        "firing": [one.id for one in firing],
        "phase": state.accepted.phase,
        "version": state.accepted.version,
        "false_alarm_days": config.false_alarm_days,
        "alarms": [_alarm(one) for one in _shown(state.alarms)],
        "slices": _slices(config, state.accepted, hours, seen),
        "told_apart": told_apart(state.accepted, hours),
        "asked": [_finite({**one.__dict__, "is_alarm": one.is_alarm}) for one in state.drifts],
        "pays": state.paid and _finite(dict(state.paid.__dict__)),
        "how_promised": _how(state.accepted, seen),
    }


def series(
    state: State, hours: Sequence[Hour], seen: Seen, name: str, *, compared: Compared | None, now: float
) -> dict[str, list]:
    """Line → (days from now, acceptance length) of a slice, each point of a whole day, so that no rhythm hides what
    moves: what was served, what was expected of it then, and what the gate promised. ``compared``: see below."""
    found: dict[str, list] = {"served": [], "expected": [], "promised": []}
    drafts, expected = _expected(state, hours, name, compared)
    counts = np.array([hour.slices.get(name, (0.0, 0.0, 0.0)) for hour in hours]).reshape(-1, 3)
    for end in range(min(_DAY_H, len(hours)), len(hours) + 1, _EVERY_H):
        day = slice(max(end - _DAY_H, 0), end)
        at = (hours[end - 1].start + HOUR_S - now) / 86400
        _, steps, accepted = counts[day].sum(0)
        found["served"].append((at, acceptance_length(steps, accepted) if steps else None))
        found["promised"].append((at, _promised(seen, hours[end - 1].version, name)))
        known = drafts[day].sum()
        found["expected"].append((at, acceptance_length(known, expected[day].sum()) if known else None))
    return found


def compared_of(state: State, hours: Sequence[Hour]) -> Compared | None:
    """The hours against what is expected; None where nothing is."""
    reference = state.accepted.reference
    return _compared(reference, hours) if reference is not None and hours else None


def _expected(
    state: State, hours: Sequence[Hour], name: str, compared: Compared | None
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts, and accepted drafts that were expected of them when they were served; zero where nothing was.

    What is expected now has the levels after the last shift: before its alarm was raised, it was without that shift.
    """
    watching = state.accepted
    if compared is None or name not in watching.reference.slices:
        return np.zeros(len(hours)), np.zeros(len(hours))
    i = watching.reference.slices.index(name)
    own = np.array([hour.version == watching.version for hour in hours]) & ~np.isnan(compared.change[:, i])
    factor = np.ones(len(hours))
    for alarm in state.alarms:
        if alarm.kind == ACCEPTED:
            change = dict(alarm.changes).get(name, 0.0)
            factor[compared.starts < alarm.at] /= max(1 + change, 0.1)
    return np.where(own, compared.drafts[:, i], 0.0), np.where(own, compared.expected[:, i] * factor, 0.0)


def told_apart(state: Watching, hours: Sequence[Hour]) -> dict[str, float | None]:
    """The last day's accepted drafts a step against what was usual, as relative changes: all of it, the part of a mix
    that moved, and the part of acceptance that moved within the same requests."""
    reference = state.reference
    nothing = {"total": None, "mix": None, "within": None}
    if reference is None or not hours:
        return nothing
    compared = _compared(reference, hours[-_DAY_H:])
    drafts, accepted, expected = (x[:, 0].sum() for x in (compared.drafts, compared.accepted, compared.expected))
    if not drafts or not expected:
        return nothing
    return {
        "total": float(accepted / drafts / reference.usual - 1),
        "mix": float(expected / drafts / reference.usual - 1),
        "within": float(accepted / expected - 1),
    }


def _shown(alarms: Sequence[Alarm]) -> list[Alarm]:
    """The newest, and all that fire."""
    return [one for i, one in enumerate(alarms) if one.fires or i >= len(alarms) - _SHOWN_ALARMS]


def _unknown_to(reference: Reference | None, hours: Sequence[Hour], *, most: int) -> list[str]:
    """The slices of these hours that have come since the reference was learned, the largest first, so many at most."""
    cells = reference.cells if reference else ()
    known = {ALL} | {name for cell in cells for name in slices_of(cell, reference.dimensions)}
    drafts: dict[str, float] = {}
    for hour in hours:
        for name, (_, steps, _) in hour.slices.items():
            if name not in known:
                drafts[name] = drafts.get(name, 0.0) + steps
    return sorted(drafts, key=lambda name: (-drafts[name], name))[:most]


def _slices(config: WatchConfig, state: Watching, hours: Sequence[Hour], seen: Seen) -> dict[str, dict[str, Any]]:
    last = hours[-_DAY_H:]
    reference = state.reference
    names = reference.slices if reference else (ALL,) if last else ()
    compared = _compared(reference, last) if reference and last else None
    new = _unknown_to(reference, last, most=_MAX_NEW if reference else config.max_slices)
    found = {}
    for i, name in enumerate((*names, *new)):
        requests, drafts, accepted = np.array([h.slices.get(name, (0.0, 0.0, 0.0)) for h in last] or [(0, 0, 0)]).sum(0)
        found[name] = {
            "requests": float(requests),
            "acceptance_length": acceptance_length(drafts, accepted) if drafts else None,
            "promised": _promised(seen, state.version, name),
            **(_watched(state, reference, compared, i, name) if i < len(names) and compared is not None else {}),
            **({"new": True} if reference and i >= len(names) else {}),
        }
    return found


def _watched(state: Watching, reference: Reference, compared: Compared, i: int, name: str) -> dict[str, Any]:
    drafts, expected = compared.drafts[:, i].sum(), compared.expected[:, i].sum()
    return {
        "expected": acceptance_length(drafts, expected) if drafts else None,
        "change": float(compared.accepted[:, i].sum() / expected - 1) if expected else None,
        "falls": state.falls.values.get(name, 0.0),
        "rises": state.rises.values.get(name, 0.0),
        "threshold": float(reference.threshold[i]),
        "days_to_find": float(min(reference.days_to_find()[i], 999.0)),
        "watched": bool(reference.watched[i]),
    }


def _compared(reference: Reference, hours: Sequence[Hour]) -> Compared:
    return compare(reference, lay(reference.cells, reference.slices, hours))


def _promised(seen: Seen, version: str | None, name: str) -> float | None:
    made = dict(seen.promises).get(version or "")
    return made.slices[name].acceptance_length if made and name in made.slices else None


def _how(state: Watching, seen: Seen) -> str | None:
    made = dict(seen.promises).get(state.version or "")
    return made and f"{made.how} (report {made.report})"


def _alarm(one: Alarm) -> dict[str, Any]:
    more = {"fires": one.fires, "retrains": one.retrains, "at_text": when(one.at), "since_text": when(one.since)}
    return {**one.as_dict(), **more}


def _finite(body: Mapping[str, Any]) -> dict[str, Any]:
    """With None for what is no number: JSON has neither infinity nor NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in body.items()}
