"""The part of the vocabulary that a training step looks at.

The head is most of a step's arithmetic. Real traffic uses a small part of the vocabulary, so a step may
take every token that occurs in the replies, and a fresh random sample of all others that stands for them:
each sampled token's logit is raised by the log of how many it stands for, which keeps the estimate of the
softmax's denominator unbiased. The walk, and so every checkpoint's selection, always uses the whole head.

Source: sampled softmax, Jean et al., arXiv 1412.2007, section 3, with a uniform proposal over what is left.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """What one step's loss is computed over."""

    head: Tensor  # [C, H]
    logit_offset: Tensor | None  # [C], added to the logits; None for the whole vocabulary
    place: Tensor | None  # [V], a token's row in head, -1 where it has none; None for the whole vocabulary

    def labels(self, ids: Tensor) -> Tensor:  # [...] -> [...]
        """Rows of ``head`` for these token ids."""
        return ids if self.place is None else self.place[ids]


class Vocabulary:
    """The whole vocabulary, or the tokens that occur and a sample of the others, drawn by step."""

    def __init__(self, head: Tensor, *, num_sampled: int | None, occurring: Iterable[Tensor] = (), seed: int = 0):
        self._head, self._num_sampled, self._seed = head, num_sampled, seed
        if num_sampled is None:
            return
        occurs = torch.zeros(head.shape[0], dtype=torch.bool)
        for ids in occurring:
            occurs[ids] = True
        self._occurring, self._others = occurs.nonzero().squeeze(1), (~occurs).nonzero().squeeze(1)
        self._occurring_head = head[self._occurring]
        place = torch.full((head.shape[0],), -1, dtype=torch.int64)
        place[self._occurring] = torch.arange(len(self._occurring))
        self._place = place.to(head.device)  # labels are there too

    def at(self, step: int) -> Candidates:
        """The candidates of a step; the same for the same seed and step."""
        if self._num_sampled is None or self._num_sampled >= len(self._others):
            return Candidates(self._head, None, None)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        drawn = self._others[torch.randint(len(self._others), (self._num_sampled,), generator=generator)]
        offset = self._head.new_zeros(len(self._occurring) + len(drawn))
        offset[len(self._occurring) :] = math.log(len(self._others) / len(drawn))
        return Candidates(torch.cat([self._occurring_head, self._head[drawn]]), offset, self._place)
