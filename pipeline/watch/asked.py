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
    alike = {start: sample for start, sample in reference.items() if sample and _kind(start) == _kind(at)}
    pool = alike if len(alike) >= 2 else {start: sample for start, sample in reference.items() if sample}
    if len(reference) < _MIN_DAYS or not pool or not day:
        return []
    rng = np.random.default_rng(at)
    level = 1 / (config.asked_false_alarm_days * (len(dimensions) + 1))
    found = []
    for name in (*dimensions, WORDS):
        measure = _measure(name, dimensions)
        own, others = measure(day), measure([one for sample in pool.values() for one in sample])
        own, others = _aligned(own, others)
        statistic = _apart(name, own, others)
        limit = max(_limit(name, measure, reference, level), config.asked_min_psi if name != WORDS else 0.0)
        p = _p(name, own, others, statistic, rng) if statistic > limit else 1.0
        found.append(Drift(name, statistic, limit, p))
    return found


def _kind(start: int) -> bool:
    """Whether a day is on a weekend."""
    return datetime.fromtimestamp(start, UTC).weekday() >= 5


def _measure(name: str, dimensions: Sequence[str]):
    """Conversations → what is compared: values, or rows of numbers."""
    if name == WORDS:
        return lambda sample: _roots(np.stack([one.sketch for one in sample]).astype(float))
    place = list(dimensions).index(name)
    return lambda sample: np.array([one.cell[place] for one in sample], dtype=object)


def _roots(counts: np.ndarray) -> np.ndarray:  # [conversations, BUCKETS]
    return np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1))


def _aligned(own: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values as columns of ones and zeros, the rarest together; rows of numbers stay."""
    if own.dtype != object:
        return own, others
    values, counts = np.unique(np.concatenate([own, others]).astype(str), return_counts=True)
    named = {value: i for i, value in enumerate(values[np.argsort(-counts, kind="stable")][:_MAX_VALUES])}
    width = len(named) + 1

    def columns(sample: np.ndarray) -> np.ndarray:
        found = np.zeros((len(sample), width))
        found[np.arange(len(sample)), [named.get(str(value), width - 1) for value in sample]] = 1
        return found

    return columns(own), columns(others)


def _apart(name: str, own: np.ndarray, others: np.ndarray) -> float:
    """The statistic, from rows of two samples."""
    if name == WORDS:
        return float(np.square(own.mean(0) - others.mean(0)).sum())
    a, b = ((rows.sum(0) + 0.5) / (len(rows) + 0.5 * rows.shape[1]) for rows in (own, others))
    return float(((a - b) * np.log(a / b)).sum())


def _limit(name: str, measure: Any, reference: Mapping[int, Sequence[Asked]], level: float) -> float:
    """What a further day of the reference's kind exceeds with a probability of ``level``."""
    from scipy.stats import t

    logs = []
    for start, sample in reference.items():
        others = [s for other, s in reference.items() if other != start and _kind(other) == _kind(start) and s]
        others = others or [s for other, s in reference.items() if other != start and s]
        if sample and others:
            own, rest = _aligned(measure(sample), measure([one for s in others for one in s]))
            logs.append(math.log(max(_apart(name, own, rest), 1e-9)))
    if len(logs) < _MIN_DAYS:
        return math.inf
    spread = float(np.std(logs, ddof=1)) * math.sqrt(1 + 1 / len(logs))
    return math.exp(float(np.mean(logs)) + float(t.ppf(1 - level, len(logs) - 1)) * spread)


def _p(name: str, own: np.ndarray, others: np.ndarray, statistic: float, rng: np.random.Generator) -> float:
    """The share of deals of the same conversations that lie as far apart."""
    both, count = np.concatenate([own, others]), 1
    for _ in range(_PERMUTATIONS):
        order = rng.permutation(len(both))
        count += _apart(name, both[order[: len(own)]], both[order[len(own) :]]) >= statistic
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


def forget_days(folder: Path, *, before: int) -> None:
    """Remove what is older."""
    oldest = file_of(folder, before).name
    for path in folder.glob("[0-9]*.json"):
        if path.name < oldest:
            path.unlink(missing_ok=True)
