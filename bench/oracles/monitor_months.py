"""The monitor on months whose shifts are known: what it finds, how soon, and what it takes for a shift that is none."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.figures import Figure, at_least, at_most, shown
from bench.oracles.simulated_month import DAYS, ROUTES, START, Noise, Shift, month
from pipeline.watch.alarms import ACCEPTED, ASKED, Alarm
from pipeline.watch.hours import HOUR_S, Hour
from pipeline.watch.state import Seen, State, fold
from pipeline.watch_config import WatchConfig

NAMED = 0
"""The month that the row is about; the others say how often it is like that."""
WITHIN_H = 24
_LATE_H = 96  # an alarm that comes within so many hours of a shift is late, and not false
_TEN_PER_CENT = 0.9


@dataclass(frozen=True)
class Outcome:
    """One month."""

    delays_h: tuple[float | None, ...]
    """Of every shift, in order: hours until its alarm; None where none came in time to be its own."""
    false: tuple[Alarm, ...]
    """Alarms of acceptance that no shift explains,"""
    false_asked: tuple[Alarm, ...] = ()
    """and of what is asked."""
    asked: tuple[Alarm, ...] = ()
    """Alarms of what is asked, explained or not."""

    @property
    def found(self) -> int:
        """Shifts that were found within a day."""
        return sum(one is not None and one <= WITHIN_H for one in self.delays_h)

    @property
    def num_false(self) -> int:
        """False alarms of every kind."""
        return len(self.false) + len(self.false_asked)


@dataclass(frozen=True)
class Month:
    """What a month is made of."""

    seed: int
    shifts: tuple[Shift, ...] = ()
    mix: tuple[Shift, ...] = ()
    conversations_a_day: float = 30_000
    noise: Noise = field(default_factory=Noise)
    days: int = DAYS
    config: WatchConfig = field(default_factory=WatchConfig)


def three_shifts(seed: int) -> tuple[Shift, ...]:
    """Falls of 10% at hours that are drawn: everywhere, in a route with a fifth of the traffic or more, everywhere."""
    rng = np.random.default_rng([7, seed])
    routes = [name for name, (share, _) in ROUTES.items() if share >= 0.2]
    first, second, third = (int(rng.integers(24 * a, 24 * b)) for a, b in ((8, 13), (15, 20), (22, 28)))
    where = ("route", str(rng.choice(routes)))
    return Shift(first, _TEN_PER_CENT), Shift(second, _TEN_PER_CENT, where), Shift(third, _TEN_PER_CENT)


def run(one: Month) -> Outcome:
    """The monitor over a month, hour by hour, as the job runs it."""
    samples: dict[int, list] = {}
    hours: list[Hour] = []
    state = State()
    hours_of_month = month(
        one.seed,
        shifts=one.shifts,
        mix=one.mix,
        noise=one.noise,
        days=one.days,
        conversations_a_day=one.conversations_a_day,
        samples=samples,
    )
    for hour in hours_of_month:
        hours.append(hour)
        state = fold(one.config, state, hours, Seen(samples), until=hour.start + HOUR_S)
    return _outcome(one, state.alarms)


def _outcome(one: Month, alarms: Sequence[Alarm]) -> Outcome:
    left = [alarm for alarm in alarms if alarm.kind == ACCEPTED]
    delays = []
    for shift in one.shifts:
        begins = START + shift.hour * HOUR_S
        own = [a for a in left if a.falls == (shift.factor < 1) and 0 < a.at - begins <= _LATE_H * HOUR_S]
        delays.append((own[0].at - begins) / HOUR_S if own else None)
        left = [a for a in left if not own or a is not own[0]]
    asked = tuple(alarm for alarm in alarms if alarm.kind == ASKED)
    begin = [START + shift.hour * HOUR_S for shift in one.mix]
    false_asked = tuple(a for a in asked if not any(0 < a.at - at <= _LATE_H * HOUR_S for at in begin))
    return Outcome(tuple(delays), tuple(left), false_asked, asked)


def monitor_month(
    *, months: int, workers: int = 1, report: Callable[[str], Any] = lambda line: None
) -> dict[str, Figure]:
    """The figures of the row "monitor on a simulated month": of the named month, and over so many others.

    ``report`` gets a line for people for every group of months.
    """
    seeds = range(NAMED, NAMED + max(months, 1))
    groups = {
        "usual": [Month(seed, three_shifts(seed)) for seed in seeds],
        "less traffic": [Month(seed, three_shifts(seed), conversations_a_day=10_000) for seed in seeds],
        "rougher": [Month(seed, three_shifts(seed), noise=ROUGH) for seed in seeds],
        "no shift": [Month(1000 + seed) for seed in seeds],
        "other mix": [Month(seed, mix=(Shift(24 * 20, 4.0, ("route", "code")),)) for seed in seeds],
    }
    outcomes = {}
    for name, group in groups.items():
        outcomes[name] = _all(group, workers)
        report(_line(name, outcomes[name]))
    return _figures(outcomes)


ROUGH = Noise(common=0.015, route=0.015, day=0.01)


def _all(group: Sequence[Month], workers: int) -> list[Outcome]:
    if workers == 1:
        return [run(one) for one in group]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(run, group))


def _figures(outcomes: dict[str, list[Outcome]]) -> dict[str, Figure]:
    usual, quiet, mixed = outcomes["usual"], outcomes["no shift"], outcomes["other mix"]
    named, n = usual[0], len(usual)
    watched_days = (DAYS - WatchConfig().learn_days) * len(quiet)
    false_quiet = sum(len(one.false) for one in quiet)
    return {
        "monitor_found_within_a_day": at_least(named.found, 3, n=1, on=f"the named month, seed {NAMED}"),
        "monitor_false_alarms": at_most(named.num_false, 1, n=1, on=f"the named month, seed {NAMED}"),
        "monitor_power": shown(sum(one.found for one in usual) / (3 * n), n=3 * n, on="shifts found within a day"),
        "monitor_months_all_found": shown(sum(one.found == 3 for one in usual) / n, n=n),
        "monitor_months_at_most_one_false": shown(sum(one.num_false <= 1 for one in usual) / n, n=n),
        "monitor_false_alarms_a_month": shown(sum(one.num_false for one in usual) / n, n=n),
        "monitor_delay_median_h": shown(_quantile(usual, 0.5), n=3 * n),
        "monitor_delay_p95_h": shown(_quantile(usual, 0.95), n=3 * n),
        "monitor_power_less_traffic": shown(_power(outcomes["less traffic"]), n=3 * n, on="a third of the traffic"),
        "monitor_power_rougher": shown(_power(outcomes["rougher"]), n=3 * n, on="half as much wobble again"),
        "monitor_quiet_false_alarms": shown(false_quiet, n=watched_days, on="watched days without a shift"),
        "monitor_quiet_false_asked": shown(sum(len(one.false_asked) for one in quiet), n=watched_days),
        "monitor_mix_told_apart": shown(
            sum(bool(one.asked) and not one.false for one in mixed) / len(mixed),
            n=len(mixed),
            on="months in which a route's traffic grows fourfold: drift in what is asked, and none in acceptance",
        ),
    }


def _power(months: Sequence[Outcome]) -> float:
    return sum(one.found for one in months) / (3 * len(months))


def _quantile(months: Sequence[Outcome], q: float) -> float:
    """Of the delays; a shift that was never found took forever."""
    delays = sorted(float("inf") if d is None else d for one in months for d in one.delays_h)
    return min(delays[min(int(q * len(delays)), len(delays) - 1)], 24.0 * DAYS)


def _line(name: str, months: Sequence[Outcome]) -> str:
    shifts = sum(len(one.delays_h) for one in months)
    found = f"{sum(one.found for one in months)} of {shifts} shifts found within a day, " if shifts else ""
    false, asked = sum(len(one.false) for one in months), sum(len(one.false_asked) for one in months)
    return f"{name}: {len(months)} months, {found}{false} false alarms of acceptance, {asked} of what is asked"
