"""On-policy anchors: drawn by how often the drafter's own walk visits a position, estimated without a forward pass.

Decoding begins at a reply's first token and jumps by the accepted drafts and one. Every trained block tells how many
drafts were accepted at its anchor; the last known count of each reply position is kept in two bytes. Where it is known,
the walk jumps by it; where it is not, by the run's recent distribution of counts. Following all jumps forward from the
first token gives each position's probability v of being visited.

What is estimated: with q = (1 - u) v / sum(v) + u / m over a reply's m legal anchors (u: ``uniform_share``), anchor p
is in the draw with probability min(1, c q_p) exactly, where c makes the expected number that of the draw. The blocks
are not weighted back: the step's loss stands for the loss of the blocks that decoding meets, which is the aim, and not
for that of all positions alike. Counts are those of the position's last block, so v lags by up to an epoch, and a
sampled vocabulary makes them a little high; both move blocks between positions and never change the loss of a block.

All of it in NumPy, which stays on one thread: operations this small on torch's threads cost more in waiting for each
other than in work, a hundred times so where something else keeps the cores busy.

Legend: R rows of a draw, n reply positions of a row, N of all rows of the draw, K predicted slots, m anchors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.anchors import num_legal_anchors
from drafter.dataset import CachedRow

_UNKNOWN = -1
_CHUNK = 16  # positions that are solved for together
_FORGET = 0.98  # of the distribution of counts, a step
# Before anything is known: half of all drafts are accepted, at every slot.
_PRIOR = 0.5

Floats, Ints = NDArray[np.float64], NDArray[np.int64]


@dataclass
class VisitTable:
    """The last known count of accepted drafts at each reply position of a cache's rows."""

    firsts: Ints  # [rows], each row's first reply token
    sizes: Ints  # [rows], its reply tokens
    offsets: Ints  # [rows], where its counts begin in ``known``
    known: NDArray[np.int16]  # [all reply tokens], -1 where nothing is known
    spread: Floats  # [K + 1], how often so many drafts were accepted lately
    block_size: int

    @classmethod
    def of(cls, rows: Sequence[CachedRow], block_size: int) -> "VisitTable":
        """One in which nothing is known."""
        firsts = np.array([row.num_prompt_tokens for row in rows], dtype=np.int64)
        sizes = np.array([row.num_tokens for row in rows], dtype=np.int64) - firsts
        ends = sizes.cumsum()
        known = np.full(ends[-1], _UNKNOWN, dtype=np.int16)
        spread = _PRIOR ** np.arange(1.0, block_size + 1)
        spread[-1] *= 2  # all are accepted: there is no slot to stop at
        return cls(firsts, sizes, ends - sizes, known, spread, block_size)

    def draw(self, rows: Sequence[int], seeds: Sequence[int], *, limit: int, uniform_share: float) -> list[Tensor]:
        """At most ``limit`` legal anchors of each row, in order, int64 [m]; the same for the same seeds and counts."""
        if not rows:
            return []
        sizes = self.sizes[list(rows)]
        visits = np.split(self._visits(np.array(rows)), sizes.cumsum()[:-1])
        drawn = []
        for row, visited, size, seed in zip(rows, visits, sizes, seeds, strict=True):
            num_legal = num_legal_anchors(int(size), self.block_size)
            places = np.arange(num_legal)
            if num_legal > limit:
                share = visited[:num_legal] + 1e-12  # a walk may end before the last of them
                share = (1 - uniform_share) * share / share.sum() + uniform_share / num_legal
                places = _systematic(share, limit, seed)
            drawn.append(torch.from_numpy(self.firsts[row] + places))
        return drawn

    def learn(self, row: int, anchors: Tensor, accepted: Tensor) -> None:
        """Remember what was accepted at these anchors of a row, both int64 [m]."""
        counts = accepted.numpy()
        self.known[self.offsets[row] + anchors.numpy() - self.firsts[row]] = counts
        self.spread = _FORGET * self.spread + np.bincount(counts, minlength=self.block_size)

    def state(self) -> dict[str, Tensor]:
        """For ``restore``."""
        return {"known": torch.from_numpy(self.known.copy()), "spread": torch.from_numpy(self.spread.copy())}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a ``state`` over."""
        self.known, self.spread = state["known"].numpy().copy(), state["spread"].numpy().copy()

    def _visits(self, rows: Ints) -> Floats:  # [R] -> [N], one row after the other
        sizes = self.sizes[rows]
        ends = sizes.cumsum()
        of_row = np.repeat(np.arange(len(rows)), sizes)
        place = np.arange(ends[-1])
        known = self.known[self.offsets[rows][of_row] + place - (ends - sizes)[of_row]]
        jumps = np.eye(self.block_size)[np.maximum(known, 0)]
        jumps[known == _UNKNOWN] = self.spread / self.spread.sum()
        # A jump past the reply's end ends the walk.
        jumps[place[:, None] + np.arange(1, self.block_size + 1) >= ends[of_row][:, None]] = 0
        starts = np.zeros(len(place))
        starts[(ends - sizes)[sizes > 0]] = 1
        return visit_probabilities(jumps, starts)


def visit_probabilities(jumps: Floats, starts: Floats) -> Floats:  # [N, B], [N] -> [N]
    """How probable it is that a walk stands at each position.

    ``jumps[p, j]`` is the probability of going on from p to p + j + 1; walks begin at p with probability ``starts[p]``.
    The visits v solve v = starts + T v with T banded below the diagonal: chunks are solved at once for what comes in
    over their first edge, and then follow each other.
    """
    N, B = jumps.shape
    C = max(_CHUNK, B)
    num_chunks = -(-N // C)
    places = np.arange(N)[:, None]
    to = places + np.arange(1, B + 1)  # [N, B]
    chunk = to // C
    inside = to < num_chunks * C
    # Row: where a jump ends in its chunk. Column: where it began, counted from B positions before the chunk.
    band = np.zeros((num_chunks, C, B + C))
    band[chunk[inside], (to - chunk * C)[inside], (places - chunk * C + B)[inside]] = jumps[inside]
    begins = np.zeros(num_chunks * C)
    begins[:N] = starts
    known = np.concatenate([begins.reshape(num_chunks, C, 1), band[:, :, :B]], axis=2)
    solved = np.linalg.solve(np.eye(C) - band[:, :, B:], known)
    visits = solved[:, :, 0].copy()
    for n in range(1, num_chunks):
        visits[n] += solved[n, :, 1:] @ visits[n - 1, C - B :]
    return visits.reshape(-1)[:N]


def _systematic(share: Floats, limit: int, seed: int) -> Ints:  # [m] -> [limit]
    """``limit`` places, place p among them with probability min(1, c share[p]) exactly; needs more places than that.

    Source: systematic sampling with unequal probabilities, Madow 1949.
    """
    chances = limit * share
    while (over := chances > 1).any():
        sure = chances >= 1
        chances[over] = 1
        chances[~sure] *= (limit - sure.sum()) / chances[~sure].sum()
    offset = np.random.default_rng(seed).random()
    ends = chances.cumsum()
    ends *= limit / ends[-1]
    return np.searchsorted(ends, np.arange(limit) + offset, side="right")
