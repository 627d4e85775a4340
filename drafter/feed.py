"""What the training loop is fed with: the rows and anchors of each step, from wherever their states are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from drafter.dataset import CachedRow, shard_sizes, staging_of, window_rows
from drafter.order import Order
from pipeline.config import TrainConfig

# Files of states that are on storage are fetched so early.
STEPS_AHEAD = 8


class Feed(Protocol):
    """Rows by step. Every process that trains has its own and asks it for the same steps."""

    num_steps: int
    """Steps of the whole run."""

    def replies(self) -> Iterator[Tensor]:
        """The token ids of every reply that is trained on, int64 [n] each."""

    def rows_of(self, step: int) -> list[tuple[CachedRow, Tensor]]:
        """All processes' rows of a step and the anchors in them, int64 [m]; m may be 0."""

    def wants_checkpoint(self, step: int) -> bool:
        """Whether the states of the first ``step`` steps had better be given up now."""

    def covered(self, step: int) -> None:
        """Every step before this one is in a durable checkpoint: their states are never asked for again."""

    def figures(self) -> dict[str, float]:
        """What to put beside a measurement of the curve."""

    def outcome(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """How many rows were trained on, and the records of those that were rejected on the way."""


class CachedFeed:
    """Rows of a cache, shuffled anew each epoch, for as many steps as are asked for."""

    def __init__(self, rows: Sequence[CachedRow], config: TrainConfig, *, block_size: int):
        self.num_steps = config.steps
        self._rows, self._limit, self._block_size = rows, config.anchors_per_row, block_size
        self._order = Order(
            len(rows), rows_per_step(config), config.seed, shards=shard_sizes(rows), window=window_rows(rows)
        )

    def replies(self) -> Iterator[Tensor]:
        """The reply of each row."""
        return (row.ids[row.num_prompt_tokens :] for row in self._rows)

    def rows_of(self, step: int) -> list[tuple[CachedRow, Tensor]]:
        """The rows that the order deals to this step."""
        if staging := staging_of(self._rows):
            soon = (self._order.rows_of(step + ahead) for ahead in range(1, STEPS_AHEAD + 1))
            staging.ahead(self._rows[row].states.name for picks in soon for _, row in picks)
        picks = self._order.rows_of(step)
        anchors = self._order.anchors_of(self._rows, picks, limit=self._limit, block_size=self._block_size)
        return [(self._rows[row], drawn) for (_, row), drawn in zip(picks, anchors, strict=True)]

    def wants_checkpoint(self, step: int) -> bool:
        """Never: the cache stays."""
        return False

    def covered(self, step: int) -> None:
        """The cache stays."""

    def figures(self) -> dict[str, float]:
        """None."""
        return {}

    def outcome(self) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """All rows: capture has rejected and counted the others."""
        return len(self._rows), []


def rows_per_step(config: TrainConfig) -> int:
    """Rows that make up a step's blocks."""
    return max(1, config.blocks_per_step // config.anchors_per_row)
