"""Near-duplicates among distinct prompts: which row stands for which, and which may not train because it would judge.

The rule, in this order:

1. **A row's split is its subject's, for good** (pipeline/split.py). Nothing here moves a row. If a cluster decided,
   a subject's rows would change sides whenever somebody else asked something similar.
2. **Gate wins.** A train or validation row that is near any gate row is dropped (``near_gate``), and a train row that
   is near any validation row that is left is, too (``near_validation``): a drafter must not be judged, nor a
   checkpoint chosen, by what it learned. Compared is with every such row and not with the kept ones alone, since to be
   near is not transitive: a row may be near one that was merged, and not near the one it was merged into.
3. **Rows are merged within their split alone.** In the order of a keyed rank a row joins the first kept row that it is
   near to, else it is kept. So no chain of small steps joins what differs: every row is near the one that stands for
   it. A kept row's weight is that of its cluster. What was dropped adds to no weight: subjects were dealt into the
   gate set at random, so its own rows show the traffic in its own proportions. If a gate row also counted its copies
   among the dropped, prompts with copies would weigh more than those without by nothing but how much could leak.
4. **Turns of one conversation are never near each other.** Turn 3 contains turn 2, and each has a reply of its own to
   learn from. They share a split anyway. Different conversations of one subject are compared like any two.

To be near is to have an exact Jaccard similarity of pieces (pipeline/shingles.py) of at least the configured one. The
pairs to compare are found by MinHash in bands (pipeline/buckets.py). The order of rows is that of a keyed hash, so
files, their order and the number of partitions change nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.buckets import BandedSketches, Buckets
from pipeline.schemas import SPLITS
from pipeline.sketches import Sketches

FATES = ("kept", "near_duplicate", "near_gate", "near_validation")
KEPT, NEAR_DUPLICATE, NEAR_GATE, NEAR_VALIDATION = range(len(FATES))


@dataclass(frozen=True)
class NearDuplicates:
    """What became of every row, by its number in the sketches."""

    fates: np.ndarray  # uint8 [rows], index into FATES
    leaders: np.ndarray  # int64 [rows], the row that stands for it: itself where kept, -1 where dropped
    left_out: int
    """Comparisons that were not made, where very many rows resemble each other (pipeline/buckets.py)."""

    def cluster_sums(self, amounts: np.ndarray) -> np.ndarray:
        """The sum of every cluster's amounts (weights, say) at its kept row; 0 at all other rows."""
        found = np.zeros(len(self.leaders), amounts.dtype)
        counted = self.leaders >= 0
        np.add.at(found, self.leaders[counted], amounts[counted])
        return found

    def counts(self) -> dict[str, int]:
        """Rows by fate, the rows of the largest cluster, and comparisons not made."""
        rows = dict(zip(FATES, np.bincount(self.fates, minlength=len(FATES)).tolist(), strict=True))
        largest = int(self.cluster_sums(np.ones(len(self.leaders), np.int64)).max(initial=0))
        return {**rows, "largest_cluster": largest, "left_out_comparisons": self.left_out}


def near_duplicates(sketches: Sketches, *, similarity: float, scratch: Path) -> NearDuplicates:
    """What becomes of every row by the rule above. ``scratch`` is a folder for what need not be in memory.

    Time is about linear in the rows, whatever they hold: a row is compared with so many others at most.
    """
    return _Search(sketches, similarity, scratch).run()


def near_pairs(sketches: Sketches, *, similarity: float, scratch: Path) -> Iterator[tuple[int, int]]:
    """All pairs of near rows that are found, each once, whatever their splits."""
    order = np.argsort(sketches.ranks, kind="stable")
    buckets = Buckets(BandedSketches(sketches, similarity, scratch), order, enterable=len(order), sought=0)
    for place in buckets.places():
        for other in buckets.near(place):
            yield int(order[other]), int(order[place])
        buckets.enter(place)


class _Search:
    """The steps of the rule, each with buckets of the rows that it is about."""

    def __init__(self, sketches: Sketches, similarity: float, scratch: Path):
        self.banded = BandedSketches(sketches, similarity, scratch)
        self.fates = np.full(len(sketches), KEPT, np.uint8)
        self.leaders = np.arange(len(sketches), dtype=np.int64)
        self.left_out = 0
        ranked = np.argsort(sketches.ranks, kind="stable")
        self.rows = {name: ranked[sketches.splits[ranked] == index] for index, name in enumerate(SPLITS)}

    def run(self) -> NearDuplicates:
        self._merge("gate")
        self._drop("gate", ("train", "validation"), NEAR_GATE)
        self._merge("validation")
        self._drop("validation", ("train",), NEAR_VALIDATION)
        self._merge("train")
        return NearDuplicates(self.fates, self.leaders, self.left_out)

    def _merge(self, split: str) -> None:
        rows = self._left(split)
        buckets = Buckets(self.banded, rows, enterable=len(rows), sought=0)
        for place in buckets.places():
            leader = next(buckets.near(place), None)
            if leader is None:
                buckets.enter(place)
            else:
                self.fates[rows[place]] = NEAR_DUPLICATE
                self.leaders[rows[place]] = rows[leader]
        self.left_out += buckets.left_out

    def _drop(self, split: str, others: tuple[str, ...], fate: int) -> None:
        index = self._left(split)
        index = index[np.argsort(self.fates[index], kind="stable")]  # kept ones first: no merged one crowds them out
        rows = np.concatenate([index, *(self._left(other) for other in others)])
        buckets = Buckets(self.banded, rows, enterable=len(index), sought=len(index))
        for place in buckets.places():
            if place < len(index):
                buckets.enter(place)
            elif next(buckets.near(place), None) is not None:
                self.fates[rows[place]] = fate
                self.leaders[rows[place]] = -1
        self.left_out += buckets.left_out

    def _left(self, split: str) -> np.ndarray:
        """The split's rows that were not dropped, kept or merged, in the order of their ranks."""
        return self.rows[split][self.leaders[self.rows[split]] >= 0]
