"""Which rows are worth comparing: those whose signatures agree in a band, found without looking at all pairs."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.sketches import NUM_PERM, Sketches, give_back

_RECALL = 0.99  # of pairs at exactly the configured similarity; of more similar ones it is higher
_SIGMAS = 4.0  # a pair whose signatures agree by so much less than they should is not compared exactly
_CROWD = 64  # rows of one bucket that others are compared with: a template's bucket costs so many, not all pairs
_CHUNK = 1 << 14  # rows between two times that mapped pages are given back
_COMPARED = 16  # rows that one row is compared with exactly, those whose signatures agree most


@dataclass(frozen=True)
class Bands:
    """How signatures are cut: rows that agree in all places of one band share a bucket."""

    similarity: float
    """The Jaccard similarity from which on rows are near."""
    num_bands: int
    num_places: int
    """In a band."""

    @property
    def recall(self) -> float:
        """The share of pairs at just this similarity that share a bucket."""
        return _recall(self.similarity, self.num_bands, self.num_places)

    @property
    def min_agreement(self) -> float:
        """The places in which signatures have to agree for an exact comparison."""
        spread = (self.similarity * (1 - self.similarity) / NUM_PERM) ** 0.5
        return NUM_PERM * (self.similarity - _SIGMAS * spread)


def bands_for(similarity: float) -> Bands:
    """The longest bands that find 99% of the pairs at this similarity: the longer, the fewer comparisons in vain."""
    fitting = [p for p in range(1, NUM_PERM + 1) if _recall(similarity, NUM_PERM // p, p) >= _RECALL]
    num_places = max(fitting, default=1)
    return Bands(similarity, NUM_PERM // num_places, num_places)


class BandedSketches:
    """Sketches, and which bucket every row is in in every band: 4 bytes a row and band, in a file of ``scratch``.

    Built a band at a time, 16 bytes a row in memory.
    """

    def __init__(self, sketches: Sketches, similarity: float, scratch: Path):
        self.sketches, self.bands, self.scratch = sketches, bands_for(similarity), scratch
        self.signatures = in_scratch(scratch, (len(sketches), NUM_PERM), np.uint32)
        sketches.copy_signatures(self.signatures)
        self.buckets = in_scratch(scratch, (self.bands.num_bands, len(sketches)), np.int32)
        self.num_buckets = [0] * self.bands.num_bands
        for band in range(self.bands.num_bands):
            first = band * self.bands.num_places
            keys = [
                _keys(self.signatures[start : start + _CHUNK, first : first + self.bands.num_places])
                for start in self._chunks()
            ]
            self.buckets[band], self.num_buckets[band] = _shared(np.concatenate([np.empty(0, np.uint64), *keys]))
        self.release()

    def release(self) -> None:
        """Give all mapped pages back to their files: they count as this process's memory."""
        self.sketches.release()
        give_back(self.signatures)
        give_back(self.buckets)

    def _chunks(self) -> Iterator[int]:
        for start in range(0, len(self.sketches), _CHUNK):
            yield start
            give_back(self.signatures)

    def near(self, one: int, other: int) -> bool:
        """Whether two rows are near to each other, exactly; turns of one conversation never are."""
        if self.sketches.threads[one] == self.sketches.threads[other]:
            return False
        return self.sketches.similarity(one, other) >= self.bands.similarity


class Buckets:
    """Rows that are entered one by one, and found by others that share a bucket with them.

    Rows are known here by their place in ``rows``. The first ``enterable`` may be entered, and those from ``sought``
    on may be looked for. Buckets are kept that have one of each and two in all.
    """

    def __init__(self, banded: BandedSketches, rows: np.ndarray, *, enterable: int, sought: int):
        self._banded, self._rows = banded, rows
        self._bucket = in_scratch(banded.scratch, (len(rows), banded.bands.num_bands), np.int32)
        capacities, num_buckets = [np.empty(0, np.int64)], 0
        for band, bound in enumerate(banded.num_buckets):
            found = banded.buckets[band][rows]
            capacity = _counts(found[:enterable], bound)
            useful = (capacity > 0) & (_counts(found[sought:], bound) > 0) & (_counts(found, bound) > 1)
            # The last entry stands for -1, no bucket.
            renumbered = np.r_[np.where(useful, np.cumsum(useful) - 1 + num_buckets, -1), -1]
            self._bucket[:, band] = renumbered[found]
            capacities.append(np.minimum(capacity[useful], _CROWD))
            num_buckets += len(capacities[-1])
        self._capacity = np.concatenate(capacities)
        self._start = np.cumsum(self._capacity) - self._capacity
        self._entered = np.zeros(len(self._capacity), np.int64)
        self._slots = np.empty(int(self._capacity.sum()), np.int32)
        self.left_out = 0
        """Comparisons that were left to chance: places in full buckets not entered, and agreeing rows not compared."""

    def places(self) -> Iterator[int]:
        """The rows that have any bucket, in order: all others are near none."""
        for first in range(0, len(self._rows), _CHUNK):
            some = self._bucket[first : first + _CHUNK]
            yield from (np.flatnonzero((some >= 0).any(1)) + first).tolist()
            self._banded.release()
            give_back(self._bucket)

    def enter(self, place: int) -> None:
        """Let others find this row. Of a full bucket it stays out: the ones that came first stand for it there."""
        buckets = self._buckets(place)
        free = buckets[self._entered[buckets] < self._capacity[buckets]]
        self._slots[self._start[free] + self._entered[free]] = place
        self._entered[free] += 1
        self.left_out += len(buckets) - len(free)

    def near(self, place: int) -> Iterator[int]:
        """The entered rows that this one is near to, in the order of their places."""
        row = int(self._rows[place])
        for other in self._agreeing(place):
            if self._banded.near(row, int(self._rows[other])):
                yield other

    def _agreeing(self, place: int) -> list[int]:
        """The entered rows that share a bucket with this one and whose signatures agree enough, in order."""
        buckets = self._buckets(place)
        starts, entered = self._start[buckets].tolist(), self._entered[buckets].tolist()
        found: set[int] = set()
        for start, count in zip(starts, entered, strict=True):
            if count:
                found.update(self._slots[start : start + count].tolist())
        if not found:
            return []
        others = np.array(sorted(found), np.int64)
        signed = self._banded.signatures
        agreement = np.count_nonzero(signed[self._rows[others]] == signed[self._rows[place]], axis=1)
        enough = agreement >= self._banded.bands.min_agreement
        others, agreement = others[enough], agreement[enough]
        if len(others) > _COMPARED:
            self.left_out += len(others) - _COMPARED
            others = np.sort(others[np.argsort(-agreement, kind="stable")[:_COMPARED]])
        return others.tolist()

    def _buckets(self, place: int) -> np.ndarray:
        buckets = self._bucket[place]
        return buckets[buckets >= 0]


def in_scratch(folder: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """A new array that lies in a file without a name, and is gone as soon as nobody holds it."""
    if 0 in shape:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=shape).view(np.ndarray)


def _keys(signed: np.ndarray) -> np.ndarray:  # [rows, places] -> uint64 [rows]
    """A hash of every row's places, equal where all of them are."""
    keys = np.zeros(len(signed), np.uint64)
    for place in range(signed.shape[1]):
        keys = (keys ^ signed[:, place]) * np.uint64(0xFF51AFD7ED558CCD)
        keys ^= keys >> np.uint64(32)
    return keys


def _shared(keys: np.ndarray) -> tuple[np.ndarray, int]:
    """The number of every row's bucket, -1 where it is alone in it; and how many buckets there are."""
    order = np.argsort(keys)
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(keys)])
    sizes = np.diff(np.r_[starts, len(keys)])
    many = sizes > 1
    bucket = np.empty(len(keys), np.int32)
    bucket[order] = np.repeat(np.where(many, np.cumsum(many) - 1, -1), sizes)
    return bucket, int(many.sum())


def _counts(buckets: np.ndarray, bound: int) -> np.ndarray:
    return np.bincount(buckets[buckets >= 0], minlength=bound)


def _recall(similarity: float, num_bands: int, num_places: int) -> float:
    """The chance of two rows to agree in a whole band. Source: Leskovec et al., Mining of Massive Datasets, 3.4."""
    return 1 - (1 - similarity**num_places) ** num_bands
