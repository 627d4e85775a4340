"""A month of traffic whose shifts are known: what a monitor has to find, and what it must not take for a shift.

Requests are real replies drawn again (drafts and accepted drafts of one reply belong together), scaled to the rate of
their route, language and length. On top of that lies what real fleets have: volume with day, week and its own noise; a
mix of routes and languages that moves with the hour, so that the average has a rhythm though nothing changes; a rhythm
within every slice; conversations whose requests are alike; wobble between hours that lasts for some hours, for all
traffic and for each route; days that differ; single subjects that send thousands of requests; an outage.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipeline.watch.asked import Asked
from pipeline.watch.hours import HOUR_S, Cell, Hour, hour_of_arrays
from pipeline.watch.served import BUCKETS

RECORDS = Path(__file__).resolve().parents[1] / "records" / "support_mails.parquet"
DIMENSIONS = ("route", "tenant", "language", "length")
START = 1_798_761_600  # Friday, 1 January 2027, 00:00 UTC
DAYS = 30
_ASKED_AN_HOUR = 12

# Share of the traffic, accepted drafts a step.
ROUTES = {"support": (0.4, 1.9), "search": (0.3, 1.2), "code": (0.2, 2.6), "notes": (0.1, 1.5)}
_PEAK_H = {"support": 14, "search": 17, "code": 13, "notes": 2}  # the hour at which a route is busiest, UTC
LANGUAGES = {"en": (0.6, 1.0, 16), "de": (0.2, 0.93, 10), "ja": (0.2, 0.8, 3)}  # share, factor, busiest hour
LENGTHS = {"≤128": (0.3, 1.05), "≤512": (0.5, 1.0), "≤2048": (0.2, 0.92)}
TENANTS = {f"tenant-{i}": 1 / i for i in range(1, 6)}


@dataclass(frozen=True)
class Shift:
    """From an hour on, accepted drafts are so many times what they were: everywhere, or where a dimension says so."""

    hour: int
    factor: float
    where: tuple[str, str] | None = None

    def applies(self, cell: Cell) -> bool:
        """Whether a cell is shifted."""
        return self.where is None or cell[DIMENSIONS.index(self.where[0])] == self.where[1]


@dataclass(frozen=True)
class Noise:
    """What moves though nothing has changed: relative standard deviations."""

    conversation: float = 0.15
    common: float = 0.01
    route: float = 0.01
    lasts: float = 0.7
    """Correlation of the two above from hour to hour."""
    day: float = 0.007
    rhythm: float = 0.04
    bursts: int = 3
    outage_h: int = 5


@lru_cache(maxsize=1)
def real_replies() -> tuple[np.ndarray, np.ndarray]:
    """Drafts, and accepted drafts a step over their mean, of the better drafter's real replies."""
    import pyarrow.parquet as pq

    rows = pq.read_table(RECORDS, columns=["role", "flag", "num_drafts", "num_accepted_tokens"]).to_pylist()
    rows = [row for row in rows if row["role"] == "challenger" and row["flag"] is None]
    drafts, accepted = (np.array([row[name] for row in rows], float) for name in ("num_drafts", "num_accepted_tokens"))
    return drafts, accepted / drafts * drafts.sum() / accepted.sum()


def cells() -> list[Cell]:
    """Every cell."""
    return [(r, t, g, n) for r in ROUTES for t in TENANTS for g in LANGUAGES for n in LENGTHS]


def month(
    seed: int,
    *,
    shifts: Sequence[Shift] = (),
    conversations_a_day: float = 10_000,
    days: int = DAYS,
    noise: Noise | None = None,
    mix: Sequence[Shift] = (),
    samples: dict[int, list[Asked]] | None = None,
) -> Iterator[Hour]:
    """The hours of a month, in order; an outage has none. ``mix``: shifts of traffic, not of acceptance.

    ``samples`` gets what was asked: start of a day → a sample of its conversations, before its last hour is given.
    """
    noise, rng, kinds = noise or Noise(), np.random.default_rng(seed), cells()
    rates = np.array([ROUTES[r][1] * LANGUAGES[g][1] * LENGTHS[n][1] for r, _, g, n in kinds])
    wobble = {name: 0.0 for name in ("all", *ROUTES)}
    of_route = np.array([list(ROUTES).index(cell[0]) for cell in kinds])
    bursts = _bursts(rng, noise.bursts, days, len(kinds))
    out = int(rng.integers(0, 24 * days - noise.outage_h)) if noise.outage_h else None
    day_effect, phase = 1.0, rng.uniform(0, 2 * math.pi, len(ROUTES))
    asked: list[int] = []
    for hour in range(24 * days):
        if hour % 24 == 0:
            day_effect = math.exp(rng.normal(0, noise.day))
        for name in wobble:
            sd = noise.common if name == "all" else noise.route
            wobble[name] = noise.lasts * wobble[name] + math.sqrt(1 - noise.lasts**2) * rng.normal(0, sd)
        if out is not None and out <= hour < out + noise.outage_h:
            continue
        weekend = (hour // 24 + 4) % 7 >= 5
        by_route = np.array([wobble[name] for name in ROUTES])
        by_route += noise.rhythm * np.sin(2 * math.pi * hour / 24 + phase) - 0.03 * weekend
        rate = rates * day_effect * np.exp(wobble["all"] + by_route[of_route])
        share = _mix(hour % 24, weekend, kinds)
        for one in shifts:
            if hour >= one.hour:
                rate = np.where([one.applies(cell) for cell in kinds], rate * one.factor, rate)
        for one in mix:
            if hour >= one.hour:
                share = np.where([one.applies(cell) for cell in kinds], share * one.factor, share)
        volume = conversations_a_day / 24 * _volume(hour % 24, weekend) * math.exp(rng.normal(0, 0.1))
        count = rng.poisson(volume)
        kind = rng.choice(len(kinds), count, p=share / share.sum())
        made = _hour(rng, hour, kind, rate, noise, bursts.get(hour, ()), kinds)
        if samples is not None:
            asked += rng.choice(kind, min(len(kind), _ASKED_AN_HOUR), replace=False).tolist()
            if hour % 24 == 23:
                samples[START + (hour - 23) * HOUR_S] = _sample(rng, asked, kinds)
                asked = []
        yield made


def _hour(
    rng: np.random.Generator,
    hour: int,
    kind: np.ndarray,  # [conversations] index into kinds
    rate: np.ndarray,  # [kinds] accepted drafts a step
    noise: Noise,
    bursts: Sequence[tuple[int, int, float]],
    kinds: Sequence[Cell],
) -> Hour:
    count = len(kind)
    requests = 1 + rng.poisson(0.6, count)
    effect = np.exp(rng.normal(0, noise.conversation, count))
    for cell, size, own in bursts:
        kind, requests = np.r_[kind, cell], np.r_[requests, size]
        effect = np.r_[effect, own]
    owner = np.repeat(np.arange(len(kind)), requests)
    drafts, ratio = real_replies()
    drawn = rng.integers(0, len(drafts), len(owner))
    exact = drafts[drawn] * ratio[drawn] * rate[kind[owner]] * effect[owner]
    accepted = np.floor(exact + rng.random(len(owner)))
    sums = np.stack([np.bincount(owner, x, len(kind)) for x in (np.ones(len(owner)), drafts[drawn], accepted)], axis=1)
    start = START + hour * HOUR_S
    return hour_of_arrays(start, "1", DIMENSIONS, np.arange(len(kind)), kind, sums, cells=kinds)


def _sample(rng: np.random.Generator, asked: Sequence[int], kinds: Sequence[Cell]) -> list[Asked]:
    """Conversations of a day; pieces of their words depend on route and language, and differ from one to the next."""
    found = []
    for number, index in enumerate(asked):
        cell = kinds[index]
        words = np.random.default_rng([list(ROUTES).index(cell[0]), list(LANGUAGES).index(cell[2])])
        usual = words.gamma(2.0, 1.0, BUCKETS)
        own = rng.poisson(60 * rng.gamma(3.0, 1 / 3.0, BUCKETS) * usual / usual.sum())
        found.append(Asked(f"{number}", float(rng.random()), cell, np.minimum(own, 255).astype(np.uint8)))
    return found


def _bursts(rng: np.random.Generator, count: int, days: int, num_cells: int) -> dict[int, list[tuple[int, int, float]]]:
    """Hour → (cell, requests, factor) of subjects that send thousands of requests for some hours."""
    found: dict[int, list[tuple[int, int, float]]] = {}
    for _ in range(count):
        begins, lasts = int(rng.integers(0, 24 * days)), int(rng.integers(1, 5))
        one = (int(rng.integers(0, num_cells)), int(rng.integers(200, 1500)), math.exp(rng.normal(0, 0.3)))
        for hour in range(begins, begins + lasts):
            found.setdefault(hour, []).append(one)
    return found


@lru_cache(maxsize=64)
def _mix_of(hour: int, weekend: bool) -> tuple[float, ...]:
    found = []
    for route, tenant, language, length in cells():
        share = ROUTES[route][0] * LANGUAGES[language][0] * LENGTHS[length][0] * TENANTS[tenant]
        share *= 1 + 0.6 * math.cos(2 * math.pi * (hour - _PEAK_H[route]) / 24)
        share *= 1 + 0.7 * math.cos(2 * math.pi * (hour - LANGUAGES[language][2]) / 24)
        found.append(share * (0.6 if weekend and route == "code" else 1.0))
    return tuple(found)


def _mix(hour: int, weekend: bool, kinds: Sequence[Cell]) -> np.ndarray:
    return np.array(_mix_of(hour, weekend))


def _volume(hour: int, weekend: bool) -> float:
    return (1 + 0.6 * math.cos(2 * math.pi * (hour - 14) / 24)) * (0.55 if weekend else 1.0)
