"""The plan of a streamed run: which rows each step trains on, known before there are any states.

The parts of the responses are shuffled and gathered into windows of at most half the queue's bytes: while one window is
trained on, the next is captured. A window's rows are shuffled, and its steps hold no other's. All of it follows from
the seed, the budget and the rows' lengths, and nothing from time.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import NamedTuple

import pyarrow.compute as pc
import torch
from torch import Tensor

from drafter.anchors import num_legal_anchors
from drafter.feed import rows_per_step, total_weight
from pipeline.artifacts import HiddenStateCache, ResponseSet
from pipeline.config import Config, TrainConfig
from pipeline.errors import ConfigError, StageError
from pipeline.rows import read_rows, tables
from pipeline.schemas import RESPONSES, bytes_per_state
from pipeline.stages import Artifact

# At most, beside the states: a row's Arrow batch, record and ids; a part's schemas, footers and record.
_BYTES_PER_ROW, _BYTES_PER_ID, _BYTES_PER_PART = 1024, 5, 8 << 10


class PlannedRow(NamedTuple):
    """A row that is to be trained on."""

    row_id: str
    number: int
    """Its place among the responses: its anchors are drawn by it."""
    weight: float
    """Of all its blocks together in the loss."""


@dataclass(frozen=True)
class Window:
    """Parts that are in the queue at the same time, and the steps that train on them."""

    parts: tuple[int, ...]
    rows: tuple[PlannedRow, ...]
    """In the order of training."""
    first_step: int
    num_steps: int

    @property
    def steps(self) -> range:
        """The steps of the run that are the window's."""
        return range(self.first_step, self.first_step + self.num_steps)

    def rows_of(self, step: int) -> tuple[PlannedRow, ...]:
        """The rows of a step; the steps of a window differ by one row at most."""
        n, place = len(self.rows), step - self.first_step
        return self.rows[place * n // self.num_steps : (place + 1) * n // self.num_steps]


@dataclass(frozen=True)
class StreamPlan:
    """The whole of a streamed run."""

    windows: tuple[Window, ...]
    num_steps: int
    """Those of the corpus, or train.steps where they are fewer."""
    queue_bytes: int
    """The queue's budget: capture.max_bytes without what the held-out rows take of it."""
    expected: dict[int, int]
    """Part → bytes that its states take at most, in the order of training."""
    num_tokens: int
    """Of all rows of these parts, prompts and replies."""
    num_short: int
    """Train rows of the responses that are too short for a block, and left out."""

    @property
    def window_bytes(self) -> int:
        """The bytes of the largest window: less room than that, and training would wait for ever."""
        return max(sum(self.expected[part] for part in window.parts) for window in self.windows)

    def rows(self, num_steps: int | None = None) -> Iterator[PlannedRow]:
        """The rows that are trained on, in order; with ``num_steps``, those of so many steps."""
        for window in self.windows:
            for step in range(window.steps.start, min(window.steps.stop, num_steps or self.num_steps)):
                yield from window.rows_of(step)

    @cached_property
    def num_rows(self) -> int:
        """Rows that are trained on."""
        return sum(1 for _ in self.rows())

    @cached_property
    def mean_weight(self) -> float:
        """Of all blocks of a row together in the loss, on average."""
        return sum(row.weight for row in self.rows()) / self.num_rows

    def window_of(self, step: int) -> Window:
        """The window that a step trains on."""
        return self.windows[bisect_right(self.windows, step, key=lambda window: window.first_step) - 1]

    def parts_before(self, step: int) -> int:
        """How many parts, from the front, no step from this one on asks for."""
        if step >= self.num_steps:
            return len(self.expected)
        return sum(len(window.parts) for window in self.windows[: self.windows.index(self.window_of(step))])


def plan_stream(
    config: Config,
    responses: Artifact[ResponseSet],
    heldout: Artifact[HiddenStateCache],
    *,
    block_size: int,
    replay_share: float = 0.0,
) -> StreamPlan:
    """The plan for the train rows of these responses; ``heldout`` holds the others' states.

    ``replay_share`` of each step's rows are left free for replayed ones.

    Raises: ConfigError without a budget, with one that the held-out rows fill, or with so few steps that none has a row
    of its own; StageError when no row has room for a block.
    """
    num_parts = len(tables(responses.manifest.shards))
    parts = [_read_part(responses, part, block_size, config.train) for part in range(num_parts)]
    queue_bytes, per_state = _queue_bytes(config, heldout, parts)
    expected = {n: _num_bytes(part.train_lengths, per_state) for n, part in enumerate(parts) if part.rows}
    if not expected:
        raise StageError(
            f"{responses.folder}: no train row has room for a block of {block_size} in its reply; collect more "
            "traffic or use a smaller drafter.block_size"
        )
    seed = config.train.seed * 1_000_003
    shuffled = [list(expected)[i] for i in _permutation(len(expected), seed)]
    streamed = rows_per_step(config.train) * (1 - Fraction(str(replay_share)))
    windows, num_steps = [], 0
    for number, together in enumerate(_gather(shuffled, expected, queue_bytes // 2)):
        if num_steps >= config.train.steps:
            break
        rows = [row for part in together for row in parts[part].rows]
        order = tuple(rows[i] for i in _permutation(len(rows), seed + 1 + number))
        windows.append(Window(together, order, num_steps, ceil(len(rows) / streamed)))
        num_steps += windows[-1].num_steps
    taken = [part for window in windows for part in window.parts]
    plan = StreamPlan(
        windows=tuple(windows),
        num_steps=min(num_steps, config.train.steps),
        queue_bytes=queue_bytes,
        expected={part: expected[part] for part in taken},
        num_tokens=sum(sum(parts[part].train_lengths) for part in taken),
        num_short=sum(len(part.train_lengths) - len(part.rows) for part in parts),
    )
    if not plan.num_rows:
        raise ConfigError(
            f"train.steps = {config.train.steps}: with {rows_per_step(config.train)} rows a step, {replay_share:.0%} "
            "of them replayed, no step has one of the run's own; raise train.steps or train.blocks_per_step"
        )
    return plan


def replies_of(responses: Artifact[ResponseSet], plan: StreamPlan) -> Iterator[Tensor]:
    """The token ids of every reply that the plan trains on, int64 [n] each."""
    for window in plan.windows:
        wanted = {row.row_id for row in window.rows}
        for part in window.parts:
            table = _table(responses, part).select(["row_id", "response_ids"])
            for row in table.to_pylist():
                if row["row_id"] in wanted:
                    yield torch.tensor(row["response_ids"])


@dataclass(frozen=True)
class _Part:
    """A part of the responses, as far as lengths go."""

    rows: list[PlannedRow]
    train_lengths: list[int]
    heldout_lengths: list[int]


def _read_part(responses: Artifact[ResponseSet], part: int, block_size: int, config: TrainConfig) -> _Part:
    table = _table(responses, part)
    first = sum(shard.rows for shard in tables(responses.manifest.shards)[:part])
    lengths = [pc.list_value_length(table.column(name)).to_pylist() for name in ("prompt_ids", "response_ids")]
    found = _Part([], [], [])
    columns = [table.column(name).to_pylist() for name in ("row_id", "split", "weight")]
    for place, (row_id, split, num_served, num_prompt_tokens, num_reply_tokens) in enumerate(
        zip(*columns, *lengths, strict=True)
    ):
        num_tokens = num_prompt_tokens + num_reply_tokens
        (found.train_lengths if split == "train" else found.heldout_lengths).append(num_tokens)
        if split == "train" and num_legal_anchors(num_reply_tokens, block_size):
            weight = total_weight(num_served, num_reply_tokens, config, block_size)
            found.rows.append(PlannedRow(row_id, first + place, weight))
    return found


def _table(responses: Artifact[ResponseSet], part: int):
    shards = tables(responses.manifest.shards)[part : part + 1]
    return read_rows(responses.folder, shards, RESPONSES, 0, shards[0].rows)


def _queue_bytes(config: Config, heldout: Artifact[HiddenStateCache], parts: Sequence[_Part]) -> tuple[int, int]:
    """The queue's budget, and the bytes of one position's states."""
    budget = config.capture.max_bytes
    if budget is None:
        raise ConfigError("capture.stream = true needs capture.max_bytes: the disk that the states may take")
    fingerprint = heldout.manifest.fingerprint
    num_layers = len(fingerprint.target_layer_ids) if fingerprint else 0
    per_state = bytes_per_state(num_layers, heldout.manifest.hidden_size, config.capture.states_format)
    # By their lengths and not by the files: the order of training must be the same when they are captured again.
    taken = sum(_num_bytes(part.heldout_lengths, per_state) for part in parts)
    if taken >= budget:
        raise ConfigError(
            f"capture.max_bytes = {budget}: the held-out rows alone take about {taken} bytes; raise it, or lower "
            "collect.validation_share and collect.gate_share"
        )
    return budget - taken, per_state


def _num_bytes(lengths: Sequence[int], per_state: int) -> int:
    """At most so many bytes do rows of these lengths take in a part; one without rows has its table, too."""
    return sum(n * (per_state + _BYTES_PER_ID) + _BYTES_PER_ROW for n in lengths) + _BYTES_PER_PART


def _gather(parts: Sequence[int], expected: dict[int, int], num_bytes: int) -> Iterator[tuple[int, ...]]:
    """Neighbouring parts that take at most so many bytes together; a part that is larger is alone."""
    together: list[int] = []
    for part in parts:
        if together and sum(expected[one] for one in (*together, part)) > num_bytes:
            yield tuple(together)
            together = []
        together.append(part)
    yield tuple(together)


def _permutation(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
