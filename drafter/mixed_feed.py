"""Replay: rows of earlier caches among a run's own, against forgetting what an earlier drafter could."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor

from drafter.anchors import num_legal_anchors
from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.feed import STEPS_AHEAD, Dealer, Feed, replayed_before, replies_of
from pipeline.artifacts import HiddenStateCache
from pipeline.config import TrainConfig
from pipeline.errors import StageError
from pipeline.rows import read_rows, tables
from pipeline.schemas import CACHE
from pipeline.stages import Artifact


class MixedFeed:
    """A run's own feed, which leaves ``train.replay_share`` of each step's rows free, and the caches that fill it.

    The caches take turns row by row, so each has an equal part of the share, however large it is; each is shuffled anew
    in epochs of its own, and every one of its epochs deals every one of its rows once.

    The weights of each source are divided by what its rows weigh on average: over an epoch its share of the loss is its
    share of the rows, also where the run's own rows were served many times, or have longer replies.
    """

    def __init__(self, own: Feed, caches: Sequence[Sequence[CachedRow]], config: TrainConfig, *, block_size: int):
        self.num_steps, self.mean_weight = own.num_steps, 1.0
        self._own, self._config = own, config
        self._dealers = [Dealer(rows, config, block_size=block_size) for rows in caches]
        self._counts: list[int] = []

    def replies(self) -> Iterator[Tensor]:
        """The run's own replies, and those that are replayed."""
        return chain(self._own.replies(), *(replies_of(dealer.rows) for dealer in self._dealers))

    def rows_of(self, step: int) -> list[Deal]:
        """The step's own rows, then each cache's."""
        dealt = [self._own.rows_of(step)]
        ends = [replayed_before(later, self._config) for later in (step, step + 1, step + 1 + STEPS_AHEAD)]
        for turn, dealer in enumerate(self._dealers):
            first, end, ahead = (self._turns_before(place, turn) for place in ends)
            dealt.append(dealer.deal(range(first, end), ahead=range(end, ahead)))
        self._counts = [len(deals) for deals in dealt]
        return [
            deal._replace(weight=deal.weight / part.mean_weight)
            for part, deals in zip((self._own, *self._dealers), dealt, strict=True)
            for deal in deals
        ]

    def learn(self, accepted: Sequence[Tensor]) -> None:
        """Each part is told of its own deals."""
        rest = iter(accepted)
        for part, count in zip((self._own, *self._dealers), self._counts, strict=True):
            part.learn(list(islice(rest, count)))

    def state(self) -> dict[str, Any]:
        """Of each part."""
        return {"own": self._own.state(), "replay": [dealer.state() for dealer in self._dealers]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """To each part. Raises: StageError when it is the state of other rows, or of another number of caches."""
        if not state:
            return
        if len(state.get("replay", ())) != len(self._dealers):
            raise StageError(
                f"train: {len(self._dealers)} caches are replayed, and not as many were when the run's last checkpoint "
                "was made. Remove the folder of the run, which holds resume.pt, to train anew"
            )
        self._own.restore(state["own"])
        for dealer, its in zip(self._dealers, state["replay"], strict=True):
            dealer.restore(its)

    def wants_checkpoint(self, step: int) -> bool:
        """Where the run's own feed does: replayed caches stay."""
        return self._own.wants_checkpoint(step)

    def covered(self, step: int) -> None:
        """Only the run's own feed gives up states."""
        self._own.covered(step)

    def figures(self) -> dict[str, float]:
        """Of the run's own feed."""
        return self._own.figures()

    def outcome(self, num_steps: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """Of the run's own feed."""
        return self._own.outcome(num_steps)

    def _turns_before(self, place: int, turn: int) -> int:
        """How many of the first ``place`` replay rows are this cache's."""
        return (place - turn + len(self._dealers) - 1) // len(self._dealers)


def replayable(caches: Sequence[Artifact[HiddenStateCache]], *, block_size: int) -> list[Artifact[HiddenStateCache]]:
    """The caches that hold a train row with room for a block. Raises: SchemaError when a table cannot be read."""
    return [cache for cache in caches if _has_train_row(cache, block_size)]


def _has_train_row(cache: Artifact[HiddenStateCache], block_size: int) -> bool:
    if "train" not in cache.manifest.splits:  # a streamed run caches the held-out rows alone
        return False
    for shard in tables(cache.manifest.shards):
        table = read_rows(cache.folder, [shard], CACHE, 0, shard.rows)
        columns = (table.column(name).to_pylist() for name in ("split", "num_states", "num_prompt_tokens"))
        for split, num_states, num_prompt_tokens in zip(*columns, strict=True):
            if split == "train" and num_legal_anchors(num_states + 1 - num_prompt_tokens, block_size):
                return True
    return False
