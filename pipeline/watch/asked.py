"""Drift in what is asked: a day's conversations against those of the reference days, dimension by dimension.

Of each day a sample of conversations is kept: their cells, and sketches of their words. The statistic of a dimension is
the population stability index of its values; of the sketches, the squared distance of the mean square roots. Two things
have to hold for an alarm. A permutation test: conversations dealt anew between day and reference hardly ever lie so far
apart. And a calibrated limit: no reference day lies so far from the others, by a prediction limit of the logarithm of
their statistics. The first alone would call every Monday a drift, since days differ; the second alone knows little
where days are few.
"""

import base64
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts import write_durably
from pipeline.errors import SchemaError
from pipeline.watch.hours import Cell
from pipeline.watch_config import WatchConfig

WORDS = "words"
"""The dimension of the sketches."""
DAY_S = 86400
VERSION = 1
_PERMUTATIONS = 499
_MAX_P = 0.01
_MAX_VALUES = 20  # of a dimension: the others are one
_MIN_DAYS = 4  # that days are told apart by


@dataclass(frozen=True)
class Asked:
    """One conversation's first request of a day."""

    conversation: str
    rank: float
    """Place in the sample: the lowest are kept. One that stands for more requests has a lower one, on average."""
    cell: Cell
    sketch: np.ndarray  # [BUCKETS] uint8


@dataclass(frozen=True)
class Drift:
    """A dimension of a day against the reference."""

    dimension: str
    statistic: float
    limit: float
    """What no alarm exceeds: the calibrated limit, or the least that counts."""
    p: float

    @property
    def is_alarm(self) -> bool:
        """Whether both tests say so."""
        return self.statistic > self.limit and self.p <= _MAX_P


def rank_of(key_hash: str, weight: float) -> float:
    """The place of a conversation in a weighted sample. Source: Efraimidis and Spirakis (2006)."""
    return 1 - ((int(key_hash[:13], 16) + 0.5) / 16**13) ** (1 / max(weight, 1e-9))


def lowest(sample: Iterable[Asked], size: int) -> list[Asked]:
    """The sample of so many: one entry a conversation."""
    first: dict[str, Asked] = {}
    for one in sample:
        first.setdefault(one.conversation, one)
    return sorted(first.values(), key=lambda one: one.rank)[:size]


def drifts(
    config: WatchConfig,
    dimensions: Sequence[str],
    day: Sequence[Asked],
    reference: Mapping[int, Sequence[Asked]],
    at: int,
) -> list[Drift]:
    """Every dimension of the day that begins ``at``, against days of its kind; empty while there are too few."""
    starts = [start for start, sample in reference.items() if sample]
    if len(starts) < _MIN_DAYS or not day:
        return []
    kinds = np.array([_is_weekend(start) for start in starts])
    alike = kinds == _is_weekend(at)
    alike = alike if alike.sum() >= 2 else np.ones(len(starts), bool)
    level = 1 / (config.asked_false_alarm_days * (len(dimensions) + 1))
    found = []
    for name in (*dimensions, WORDS):
        rows = _rows(name, dimensions, [day, *(reference[start] for start in starts)])
        sums, sizes = np.stack([one.sum(0) for one in rows]), np.array([len(one) for one in rows])
        statistic = _apart(name, sums[0], sizes[0], sums[1:][alike].sum(0), sizes[1:][alike].sum())
        least = config.asked_min_psi if name != WORDS else 0.0
        limit = max(_limit(name, sums[1:], sizes[1:], kinds, level), least)
        others = [one for one, is_alike in zip(rows[1:], alike, strict=True) if is_alike]
        p = _p(name, rows[0], np.concatenate(others), statistic, seed=at) if statistic > limit else 1.0
        found.append(Drift(name, statistic, limit, p))
    return found


def _is_weekend(start: int) -> bool:
    return datetime.fromtimestamp(start, UTC).weekday() >= 5


def _rows(name: str, dimensions: Sequence[str], samples: Sequence[Sequence[Asked]]) -> list[np.ndarray]:
    """What is compared, a row a conversation: roots of the sketch's shares, or a one in the column of its value. The
    rarest values share a column."""
    if name == WORDS:
        counts = [np.stack([one.sketch for one in sample]).astype(float) for sample in samples]
        return [np.sqrt(one / np.maximum(one.sum(1, keepdims=True), 1)) for one in counts]
    place = list(dimensions).index(name)
    values = [[one.cell[place] for one in sample] for sample in samples]
    common = [value for value, _ in Counter(value for one in values for value in one).most_common(_MAX_VALUES)]
    column = {value: i for i, value in enumerate(sorted(common))}
    every = np.eye(len(column) + 1)
    return [every[[column.get(value, len(column)) for value in one]] for one in values]


def _apart(name: str, own: np.ndarray, num_own: int, others: np.ndarray, num_others: int) -> float:
    """The statistic, from the sums of two samples' rows and their sizes."""
    if name == WORDS:
        return float(np.square(own / num_own - others / num_others).sum())
    a, b = (own + 0.5) / (num_own + 0.5 * len(own)), (others + 0.5) / (num_others + 0.5 * len(own))
    return float(((a - b) * np.log(a / b)).sum())


def _limit(name: str, sums: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, level: float) -> float:
    """What a further day like the reference's exceeds with a probability of ``level``: every day of it is compared with
    the others of its kind."""
    from scipy.stats import t

    logs = []
    for i in range(len(sizes)):
        rest = (kinds == kinds[i]) & (np.arange(len(sizes)) != i)
        rest = rest if rest.any() else np.arange(len(sizes)) != i
        logs.append(math.log(max(_apart(name, sums[i], sizes[i], sums[rest].sum(0), sizes[rest].sum()), 1e-9)))
    spread = float(np.std(logs, ddof=1)) * math.sqrt(1 + 1 / len(logs))
    return math.exp(float(np.mean(logs)) + float(t.ppf(1 - level, len(logs) - 1)) * spread)


def _p(name: str, own: np.ndarray, others: np.ndarray, statistic: float, *, seed: int) -> float:
    """The share of deals of the same conversations that lie as far apart."""
    rng, both, count = np.random.default_rng(seed), np.concatenate([own, others]), 1
    whole = both.sum(0)
    for _ in range(_PERMUTATIONS):
        dealt = both[rng.choice(len(both), len(own), replace=False)].sum(0)
        count += _apart(name, dealt, len(own), whole - dealt, len(others)) >= statistic
    return count / (_PERMUTATIONS + 1)


def as_rows(sample: Sequence[Asked]) -> list[list[Any]]:
    """As JSON."""
    return [[a.conversation, a.rank, list(a.cell), base64.b64encode(a.sketch.tobytes()).decode()] for a in sample]


def from_rows(rows: Sequence[Sequence[Any]]) -> list[Asked]:
    """The inverse of as_rows."""
    return [Asked(c, rank, tuple(cell), np.frombuffer(base64.b64decode(s), np.uint8)) for c, rank, cell, s in rows]


def file_of(folder: Path, start: int) -> Path:
    """Where a day's sample is kept."""
    return folder / f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d}.json"


def write_day(folder: Path, start: int, sample: Sequence[Asked]) -> None:
    """Keep a day's sample, whole or not at all."""
    body = {"schema_version": VERSION, "start": start, "asked": as_rows(sample)}
    write_durably(file_of(folder, start), (json.dumps(body, separators=(",", ":")) + "\n").encode())


def read_days(folder: Path, *, since: int, erased: frozenset[str] = frozenset()) -> dict[int, list[Asked]]:
    """Start of the day → its sample, from a day on, without erased subjects. Raises: SchemaError."""
    found = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        if path.name < file_of(folder, since).name:
            continue
        try:
            body = json.loads(path.read_text())
            if body["schema_version"] != VERSION:
                raise ValueError(f"schema version {body['schema_version']}, expected {VERSION}")
            sample = from_rows(body["asked"])
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaError(f"{path}: not a day of the watch ({type(error).__name__}); remove it to go on")
        left = [one for one in sample if one.conversation not in erased]
        if len(left) < len(sample):
            write_day(folder, body["start"], left)
        found[body["start"]] = left
    return found


def forget_days(folder: Path, *, before: float = 0.0, after: float = math.inf) -> None:
    """Remove days that begin before one time or after another."""
    for path in folder.glob("[0-9]*.json"):
        start = datetime.strptime(path.stem, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
        if not before <= start <= after:
            path.unlink(missing_ok=True)
