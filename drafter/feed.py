"""What the training loop is fed with: the rows and anchors of each step, from wherever their states are."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from torch import Tensor

from drafter.anchors import anchor_seed, draw_anchors, num_legal_anchors
from drafter.dataset import CachedRow, shard_sizes, staging_of, window_rows
from drafter.deal import Deal
from drafter.on_policy import VisitTable
from drafter.order import Order
from pipeline.config import TrainConfig
from pipeline.errors import StageError

# Files of states that are on storage are fetched so early.
STEPS_AHEAD = 8


class Feed(Protocol):
    """Rows by step. Every process that trains has its own and asks it for the same steps."""

    num_steps: int
    """Steps of the whole run."""
    mean_weight: float
    """Of all blocks of a row together in the loss, on average over its rows."""

    def replies(self) -> Iterator[Tensor]:
        """The token ids of every reply that is trained on, int64 [n] each."""

    def rows_of(self, step: int) -> list[Deal]:
        """All processes' rows of a step, each with at least one anchor."""

    def learn(self, accepted: Sequence[Tensor]) -> None:
        """Be told the accepted drafts at each anchor, int64 [m], of each deal of the last ``rows_of``."""

    def state(self) -> dict[str, Any]:
        """What a resumed run must give back to ``restore`` to be fed as if it had never stopped."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``; nothing where it is empty. Raises: StageError when it is that of other rows."""

    def wants_checkpoint(self, step: int) -> bool:
        """Whether the states of the first ``step`` steps had better be given up now."""

    def covered(self, step: int) -> None:
        """Every step before this one is in a durable checkpoint: their states are never asked for again."""

    def figures(self) -> dict[str, float]:
        """What to put beside a measurement of the curve."""

    def outcome(self, num_steps: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """How many rows the first ``num_steps`` steps had, and the records of those that were rejected on the way."""


class Dealer:
    """The rows of one cache, dealt one after the other, shuffled anew each epoch, each with its anchors."""

    def __init__(self, rows: Sequence[CachedRow], config: TrainConfig, *, block_size: int):
        self.rows = rows
        lengths = (row.num_tokens - row.num_prompt_tokens for row in rows)
        totals = [total_weight(row.weight, n, config, block_size) for row, n in zip(rows, lengths, strict=True)]
        self.mean_weight = sum(totals) / len(totals)
        self._config, self._block_size = config, block_size
        shards = shard_sizes(rows)
        self._order = Order(len(rows), config.seed, shards=shards, window=window_rows(rows))
        self._rows_hash = _hash_of(rows, shards)
        self._visits = VisitTable.of(rows, block_size) if config.anchors == "on_policy" else None
        self._dealt: list[tuple[int, Tensor]] = []

    def deal(self, places: range, *, ahead: range = range(0)) -> list[Deal]:
        """The rows at these places of the run's sequence; the files of those ``ahead`` are fetched meanwhile."""
        if staging := staging_of(self.rows):
            staging.ahead(self.rows[row].states.name for _, row in self._order.dealt(ahead))
        picks = self._order.dealt(places)
        drawn = zip(picks, self._draw(picks), strict=True)
        self._dealt = [(row, anchors) for (_, row), anchors in drawn if len(anchors)]
        return [
            Deal(self.rows[row], anchors, row_weight(self.rows[row].weight, self._config))
            for row, anchors in self._dealt
        ]

    def learn(self, accepted: Sequence[Tensor]) -> None:
        """As ``Feed.learn``, of the last ``deal``."""
        if self._visits is not None:
            for (row, anchors), found in zip(self._dealt, accepted, strict=True):
                self._visits.learn(row, anchors, found)

    def state(self) -> dict[str, Any]:
        """As ``Feed.state``."""
        return {"rows": self._rows_hash} | (self._visits.state() if self._visits is not None else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """As ``Feed.restore``."""
        if not state:
            return
        if state.get("rows") != self._rows_hash:
            raise StageError(
                f"train: the {len(self.rows)} rows of these states (the first is {self.rows[0].row_id}), or how they "
                "lie in files, are not those of the run's last checkpoint: they were captured again meanwhile. Remove "
                "the folder of the run, which holds resume.pt, to train anew"
            )
        if self._visits is not None:
            self._visits.restore(state)

    def _draw(self, picks: Sequence[tuple[int, int]]) -> list[Tensor]:
        limit = anchors_per_row(self._config)
        seeds = [anchor_seed(self._config.seed, epoch, row) for epoch, row in picks]
        if self._visits is not None:
            rows = [row for _, row in picks]
            return self._visits.draw(rows, seeds, limit=limit, uniform_share=self._config.uniform_share)
        return [
            draw_anchors(row.num_prompt_tokens, row.num_tokens, self._block_size, limit, seed=seed)
            for row, seed in zip((self.rows[row] for _, row in picks), seeds, strict=True)
        ]


class CachedFeed:
    """Rows of a cache, shuffled anew each epoch, for as many steps as are asked for.

    With ``leaves_room`` each step has fewer of them, by the share of replayed rows (drafter/mixed_feed.py).
    """

    def __init__(self, rows: Sequence[CachedRow], config: TrainConfig, *, block_size: int, leaves_room: bool = False):
        self.num_steps = config.steps
        self._config, self._leaves_room = config, leaves_room
        self._dealer = Dealer(rows, config, block_size=block_size)
        self.mean_weight = self._dealer.mean_weight

    def replies(self) -> Iterator[Tensor]:
        """The reply of each row."""
        return replies_of(self._dealer.rows)

    def rows_of(self, step: int) -> list[Deal]:
        """The rows that the order deals to this step."""
        first, end = self._first_of(step), self._first_of(step + 1)
        return self._dealer.deal(range(first, end), ahead=range(end, self._first_of(step + 1 + STEPS_AHEAD)))

    def learn(self, accepted: Sequence[Tensor]) -> None:
        """On-policy anchors are drawn by it."""
        self._dealer.learn(accepted)

    def state(self) -> dict[str, Any]:
        """Which rows they are, and what was accepted so far."""
        return self._dealer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._dealer.restore(state)

    def wants_checkpoint(self, step: int) -> bool:
        """Never: the cache stays."""
        return False

    def covered(self, step: int) -> None:
        """The cache stays."""

    def figures(self) -> dict[str, float]:
        """None."""
        return {}

    def outcome(self, num_steps: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """All rows, or those that were dealt where that is fewer: capture has rejected and counted the others."""
        return min(len(self._dealer.rows), self._first_of(num_steps)), []

    def _first_of(self, step: int) -> int:
        """The place of a step's first row in the run's sequence."""
        replayed = replayed_before(step, self._config) if self._leaves_room else 0
        return step * rows_per_step(self._config) - replayed


def anchors_per_row(config: TrainConfig) -> int:
    """At most so many anchors are drawn in one row: never more than a step may have blocks."""
    return min(config.anchors_per_row, config.blocks_per_step)


def rows_per_step(config: TrainConfig) -> int:
    """Rows that make up a step's blocks."""
    return config.blocks_per_step // anchors_per_row(config)


def replayed_before(step: int, config: TrainConfig) -> int:
    """Replay rows in all steps before this one: the share exactly, in whole rows, spread evenly."""
    return int(step * rows_per_step(config) * Fraction(str(config.replay_share)))


def row_weight(num_served: int, config: TrainConfig) -> float:
    """How much each of a row's blocks counts: as often as it was served, within the cap."""
    return float(min(num_served, config.max_row_weight))


def total_weight(num_served: int, num_reply_tokens: int, config: TrainConfig, block_size: int) -> float:
    """Of all blocks of a row together, in one pass over it."""
    num_blocks = min(num_legal_anchors(num_reply_tokens, block_size), anchors_per_row(config))
    return row_weight(num_served, config) * num_blocks


def _hash_of(rows: Sequence[CachedRow], shards: Sequence[int]) -> str:
    """Of what the order of dealing rests on: which rows there are, in stored order, and how many share a file."""
    found = hashlib.sha256(repr(list(shards)).encode())
    for row in rows:
        found.update(f"\n{row.row_id}".encode())
    return found.hexdigest()


def replies_of(rows: Sequence[CachedRow]) -> Iterator[Tensor]:
    """The token ids of each row's reply, int64 [n]."""
    return (row.ids[row.num_prompt_tokens :] for row in rows)
