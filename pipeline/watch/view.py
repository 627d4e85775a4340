"""What the watch shows: one JSON body, from which the page, the metrics and a scheduler's trigger are made."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.acceptance import acceptance_length
from pipeline.watch.accepted import Watching
from pipeline.watch.alarms import Alarm
from pipeline.watch.hours import HOUR_S, Hour
from pipeline.watch.reference import Compared, Reference, compare, lay
from pipeline.watch.state import Seen, State
from pipeline.watch.wording import when
from pipeline.watch_config import WatchConfig

_DAY_H = 24
_SMOOTHED_H = 6  # a point of a line is so many hours together
_SHOWN_ALARMS = 50


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
        "alarms": [_alarm(one) for one in state.alarms[-_SHOWN_ALARMS:]],
        "slices": _slices(state.accepted, hours, seen),
        "told_apart": told_apart(state.accepted, hours),
        "asked": [_finite({**one.__dict__, "is_alarm": one.is_alarm}) for one in state.drifts],
        "pays": state.paid and _finite(dict(state.paid.__dict__)),
        "how_promised": _how(state.accepted, seen),
    }


def series(state: State, hours: Sequence[Hour], seen: Seen, name: str, *, now: float) -> dict[str, list]:
    """Line → (days from now, acceptance length) of a slice: what was served, what was expected, what was promised."""
    found: dict[str, list] = {"served": [], "expected": [], "promised": []}
    reference = state.accepted.reference
    compared = _compared(reference, hours) if reference and name in reference.slices else None
    for end in range(_SMOOTHED_H, len(hours) + 1, _SMOOTHED_H):
        part = hours[end - _SMOOTHED_H : end]
        at = (part[-1].start + HOUR_S - now) / 86400
        sums = np.array([hour.slices.get(name, (0.0, 0.0, 0.0)) for hour in part]).sum(0)
        found["served"].append((at, acceptance_length(sums[1], sums[2]) if sums[1] else None))
        promised = _promised(seen, part[-1].version, name)
        found["promised"].append((at, promised))
        if compared is not None and part[0].start >= state.accepted.since:
            i = reference.slices.index(name)
            drafts, expected = (x[end - _SMOOTHED_H : end, i].sum() for x in (compared.drafts, compared.expected))
            found["expected"].append((at, acceptance_length(drafts, expected) if drafts else None))
    return found


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


def _slices(state: Watching, hours: Sequence[Hour], seen: Seen) -> dict[str, dict[str, Any]]:
    last = hours[-_DAY_H:]
    reference = state.reference
    names = reference.slices if reference else tuple(dict.fromkeys(name for hour in last for name in hour.slices))
    compared = _compared(reference, last) if reference and last else None
    found = {}
    for i, name in enumerate(names):
        requests, drafts, accepted = np.array([h.slices.get(name, (0.0, 0.0, 0.0)) for h in last] or [(0, 0, 0)]).sum(0)
        found[name] = {
            "requests": float(requests),
            "acceptance_length": acceptance_length(drafts, accepted) if drafts else None,
            "promised": _promised(seen, state.version, name),
            **(_watched(state, reference, compared, i, name) if reference and compared is not None else {}),
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
