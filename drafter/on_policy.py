"""On-policy anchors: drawn by how often the drafter's own walk visits a position, estimated without a forward pass.

Decoding begins at a reply's first token and jumps by the accepted drafts and one. Every trained block tells how many
drafts were accepted at its anchor; the last known count of each reply position is kept in a byte. Where it is known,
the walk jumps by it; where it is not, by the run's recent distribution of counts. Following all jumps forward from the
first token gives each position's probability v of being visited.

What is estimated: with q = (1 - u) v / sum(v) + u / m over a reply's m legal anchors (u: ``uniform_share``), anchor p
is in the draw with probability min(1, c q_p) exactly, where c makes the expected number that of the draw. The blocks
are not weighted back: the step's loss stands for the loss of the blocks that decoding meets, which is the aim, and not
for that of all positions alike. Counts are those of the position's last block, so v lags by up to an epoch, and a
sampled vocabulary makes them a little high; both move blocks between positions and never change the loss of a block.

Legend: R rows of a draw, n reply positions of a row, N of all rows of the draw, K predicted slots, m anchors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.dataset import CachedRow

_UNKNOWN = -1
_CHUNK = 64  # positions that are solved for together
_FORGET = 0.98  # of the distribution of counts, a step
# Before anything is known: half of all drafts are accepted, at every slot.
_PRIOR = 0.5


@dataclass
class VisitTable:
    """The last known count of accepted drafts at each reply position of a cache's rows."""

    firsts: Tensor  # int64 [rows], each row's first reply token
    sizes: Tensor  # int64 [rows], its reply tokens
    offsets: Tensor  # int64 [rows], where its counts begin in ``known``
    known: Tensor  # int8 [all reply tokens], -1 where nothing is known
    spread: Tensor  # float64 [K + 1], how often so many drafts were accepted lately
    block_size: int

    @classmethod
    def of(cls, rows: Sequence[CachedRow], block_size: int) -> "VisitTable":
        """One in which nothing is known."""
        firsts = torch.tensor([row.num_prompt_tokens for row in rows], dtype=torch.int64)
        sizes = torch.tensor([row.num_tokens for row in rows], dtype=torch.int64) - firsts
        ends = sizes.cumsum(0)
        known = torch.full((int(ends[-1]),), _UNKNOWN, dtype=torch.int8)
        spread = _PRIOR ** torch.arange(1, block_size + 1, dtype=torch.float64)
        spread[-1] *= 2  # all are accepted: there is no slot to stop at
        return cls(firsts, sizes, ends - sizes, known, spread, block_size)

    def draw(self, rows: Sequence[int], seeds: Sequence[int], *, limit: int, uniform_share: float) -> list[Tensor]:
        """At most ``limit`` legal anchors of each row, in order, int64 [m]; the same for the same seeds and counts."""
        if not rows:
            return []
        sizes = self.sizes[list(rows)].tolist()
        visits = self._visits(torch.tensor(rows, dtype=torch.int64)).split(sizes)
        drawn = []
        for row, visited, size, seed in zip(rows, visits, sizes, seeds, strict=True):
            num_legal = max(0, size - self.block_size + 1)
            share = visited[:num_legal] + 1e-12  # a walk may end before the last of them
            share = (1 - uniform_share) * share / share.sum() + uniform_share / max(1, num_legal)
            places = _systematic(share, limit, seed) if num_legal > limit else torch.arange(num_legal)
            drawn.append(int(self.firsts[row]) + places)
        return drawn

    def learn(self, row: int, anchors: Tensor, accepted: Tensor) -> None:
        """Remember what was accepted at these anchors of a row, both int64 [m]."""
        self.known[self.offsets[row] + anchors - self.firsts[row]] = accepted.to(torch.int8)
        self.spread.mul_(_FORGET).add_(torch.bincount(accepted, minlength=self.block_size))

    def state(self) -> dict[str, Tensor]:
        """For ``restore``."""
        return {"known": self.known.clone(), "spread": self.spread.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a ``state`` over."""
        self.known, self.spread = state["known"].clone(), state["spread"].clone()

    def _visits(self, rows: Tensor) -> Tensor:  # [R] -> float64 [N], one row after the other
        sizes = self.sizes[rows]
        ends = sizes.cumsum(0)
        of_row = torch.repeat_interleave(torch.arange(len(rows)), sizes)
        place = torch.arange(int(ends[-1]))
        known = self.known[self.offsets[rows][of_row] + place - (ends - sizes)[of_row]].long()
        jumps = torch.nn.functional.one_hot(known.clamp_min(0), self.block_size).double()
        jumps[known == _UNKNOWN] = self.spread / self.spread.sum()
        # A jump past the reply's end ends the walk.
        jumps[place[:, None] + torch.arange(1, self.block_size + 1) >= ends[of_row][:, None]] = 0
        starts = torch.zeros(len(place), dtype=torch.float64)
        starts[ends - sizes] = 1
        return visit_probabilities(jumps, starts)


def visit_probabilities(jumps: Tensor, starts: Tensor) -> Tensor:  # [N, B], [N] -> [N]
    """How probable it is that a walk stands at each position.

    ``jumps[p, j]`` is the probability of going on from p to p + j + 1; walks begin at p with probability ``starts[p]``.
    The visits v solve v = starts + T v with T banded below the diagonal: chunks are solved at once for what comes in
    over their first edge, and then follow each other.
    """
    N, B = jumps.shape
    C = max(_CHUNK, B)
    num_chunks = -(-N // C)
    places = torch.arange(N)
    to = places[:, None] + torch.arange(1, B + 1)  # [N, B]
    chunk = to // C
    inside = to < num_chunks * C
    # Row: where a jump ends in its chunk. Column: where it began, counted from B positions before the chunk.
    band = jumps.new_zeros(num_chunks, C, B + C)
    begins = places[:, None].expand_as(to) - chunk * C + B
    band[chunk[inside], (to - chunk * C)[inside], begins[inside]] = jumps[inside]
    padded = torch.nn.functional.pad(starts, (0, num_chunks * C - N)).view(num_chunks, C, 1)
    system = torch.eye(C, dtype=jumps.dtype) - band[:, :, B:]
    solved = torch.linalg.solve_triangular(
        system, torch.cat([padded, band[:, :, :B]], dim=2), upper=False, unitriangular=True
    )
    visits = solved[:, :, 0].contiguous()
    for n in range(1, num_chunks):
        visits[n].addmv_(solved[n, :, 1:], visits[n - 1, C - B :])
    return visits.view(-1)[:N]


def _systematic(share: Tensor, limit: int, seed: int) -> Tensor:  # float64 [m] -> int64 [limit]
    """``limit`` places, place p among them with probability min(1, c share[p]) exactly; needs more places than that.

    Source: systematic sampling with unequal probabilities, Madow 1949.
    """
    chances = limit * share
    while bool((over := chances > 1).any()):
        sure = chances >= 1
        chances[over] = 1
        chances[~sure] *= (limit - int(sure.sum())) / chances[~sure].sum()
    offset = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ends = chances.cumsum(0)
    ends *= limit / ends[-1]
    return torch.searchsorted(ends, torch.arange(limit, dtype=torch.float64) + offset, right=True)
