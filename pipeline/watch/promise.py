"""What the gate measured of the drafter that serves, and whether live traffic comes up to it, in the same units.

Both are the engine's own acceptance length, 1 + accepted / drafts, before a reply is trimmed; both by slice. What may
differ all the same is how the gate served: its sampling and its limits are named beside the figures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.acceptance import unflagged_everywhere
from pipeline.slices import names
from pipeline.watch.alarms import PROMISE, Alarm
from pipeline.watch.hours import ALL, HOUR_S, Hour
from pipeline.watch_config import WatchConfig

_LEVEL = 0.001  # of one look at all slices together; a release has a look a day
_MIN_REQUESTS = 20  # on either side
_MIN_MEASURED = 0.5  # of live drafts, in slices that the gate measured
_NAMED = 4


@dataclass(frozen=True)
class Promised:
    """A slice as the gate served it."""

    num_requests: int
    accepted_per_step: float
    error: float
    """Its standard error, clustered by conversation."""

    @property
    def acceptance_length(self) -> float:
        """In the gate's own units."""
        return 1 + self.accepted_per_step


@dataclass(frozen=True)
class Promise:
    """What a version was let through with."""

    version: str
    report: str
    """Id of the acceptance report."""
    how: str
    """How the gate served, in words."""
    slices: Mapping[str, Promised]


def promise_of(
    version: str, report: str, rows: Iterable[Mapping[str, Any]], role: str, *, settings: Mapping[str, Any]
) -> Promise:
    """The promise in a report's rows (schemas.ACCEPTANCE): of the requests that no role was flagged for, by weight."""
    gate = unflagged_everywhere([row for row in rows if row["prompt_set"] == "gate"])
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in gate:
        if row["role"] == role:
            for name in (ALL, *names(row["slices"])):
                groups.setdefault(name, []).append(row)
    made = {name: _promised(own) for name, own in groups.items()}
    return Promise(version, report, _how(settings), {name: one for name, one in made.items() if one is not None})


def _promised(rows: Sequence[Mapping[str, Any]]) -> Promised | None:
    sums: dict[str, np.ndarray] = {}
    for row in rows:
        counts = row["weight"] * np.array([row["num_drafts"], row["num_accepted_tokens"]], float)
        sums[row["conversation"]] = sums.get(row["conversation"], 0) + counts
    drafts, accepted = np.array(list(sums.values())).T
    if not drafts.sum():
        return None
    rate = accepted.sum() / drafts.sum()
    left, n = accepted - rate * drafts, len(drafts)
    error = float(np.sqrt((left**2).sum() * n / max(n - 1, 1)) / drafts.sum()) if n > 1 else float(rate)
    return Promised(len(rows), float(rate), error)


def _how(settings: Mapping[str, Any]) -> str:
    sampling = settings.get("sampling") or {}
    greedy = "greedy" if sampling.get("temperature") == 0.0 else "at the requests' own temperatures"
    limits = f", at most {settings['max_tokens']} tokens" if settings.get("max_tokens") else ""
    load = f", {settings['concurrency']} requests at a time" if settings.get("concurrency") else ""
    return greedy + limits + load


@dataclass(frozen=True)
class Kept:
    """A slice's live figure beside its promise."""

    live: float
    """Accepted drafts a step."""
    promised: float
    """Of the whole: with the shares of slices that live traffic has, by the dimension that leaves least of it."""
    falls_short: bool
    """Shown to be under the promise by more than the configured share."""


def kept(config: WatchConfig, promise: Promise, hours: Sequence[Hour]) -> dict[str, Kept]:
    """Slice → live against promise, of the slices that both sides have requests enough of."""
    from scipy.stats import norm

    found: dict[str, tuple[float, float, Promised]] = {}
    live = {name: _live(hours, name) for name in promise.slices}
    for name, one in promise.slices.items():
        requests, drafts, accepted = live[name]
        if requests < _MIN_REQUESTS or one.num_requests < _MIN_REQUESTS or not drafts:
            continue
        if name == ALL:
            one = replace(one, accepted_per_step=_as_mixed(promise, live))
        rate = accepted / drafts
        dd, da, aa = np.array([hour.spread.get(name, (0, 0, 0, 0))[1:] for hour in hours]).reshape(-1, 3).sum(0)
        found[name] = (rate, float(np.sqrt(max(aa - 2 * rate * da + rate**2 * dd, 0.0)) / drafts), one)
    quantile = norm.ppf(1 - _LEVEL / max(len(found), 1))
    least = 1 - config.promise_gap
    return {
        name: Kept(
            rate,
            one.accepted_per_step,
            rate + quantile * np.hypot(error, least * one.error) < least * one.accepted_per_step,
        )
        for name, (rate, error, one) in found.items()
    }


def _live(hours: Sequence[Hour], name: str) -> tuple[float, float, float]:
    """A slice's requests, drafts and accepted drafts."""
    sums = np.array([hour.slices.get(name, (0.0, 0.0, 0.0)) for hour in hours]).reshape(-1, 3).sum(0)
    return float(sums[0]), float(sums[1]), float(sums[2])


def _as_mixed(promise: Promise, live: Mapping[str, tuple[float, float, float]]) -> float:
    """What was promised of all traffic in the mix that there is, by the dimension that leaves least of it: other things
    that are asked break no promise. Zero, which nothing falls short of, where most of it was never measured."""
    all_drafts, found = live[ALL][1], [promise.slices[ALL].accepted_per_step]
    for dimension in {name.partition("=")[0] for name in promise.slices if name != ALL}:
        own = {name: one for name, one in promise.slices.items() if name.startswith(f"{dimension}=")}
        drafts = {name: live[name][1] for name, one in own.items() if one.num_requests >= _MIN_REQUESTS}
        if not any(live[name][1] for name in own):
            continue  # no dimension of the watch
        measured = sum(drafts.values())
        if measured < _MIN_MEASURED * all_drafts:
            return 0.0
        found.append(sum(n * own[name].accepted_per_step for name, n in drafts.items()) / measured)
    return min(found)


def alarm_of(promise: Promise, found: Mapping[str, Kept], *, since: int, at: int) -> Alarm | None:
    """The alarm about the slices that fall short; None where none does."""
    short = {name: one.live / one.promised - 1 for name, one in found.items() if one.falls_short}
    if not short:
        return None
    short = dict(sorted(short.items(), key=lambda item: (item[0] != ALL, item[1])))
    lengths = ", ".join(
        f"{name} {1 + found[name].live:.2f} instead of {1 + found[name].promised:.2f}" for name in list(short)[:_NAMED]
    )
    more = f" and {len(short) - _NAMED} more slices" if len(short) > _NAMED else ""
    message = f"acceptance length is under what the gate measured ({promise.how}): {lengths}{more}"
    return Alarm(PROMISE, at, since, message, True, tuple(short), short)


def day_is_over(hour: Hour) -> bool:
    """Whether a look at the promise is due."""
    return hour.start // HOUR_S % 24 == 23
