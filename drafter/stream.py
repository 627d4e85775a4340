"""Training while the states are captured: each row of a corpus that is larger than the disk, once.

The states come through a queue (pipeline/state_queue.py) in the order of the plan. After a window's last step comes a
checkpoint, and only when it is durable are the window's states removed: a killed run goes on exactly where its
checkpoint is, and only what is not in the queue any more, or not yet, is captured again.

What a streamed run cannot do: see a row again in a second epoch; try several settings on the same states; come to the
same bits after a crash, since states that are captured again may differ in bf16; walk over anything but the held-out
rows, which are cached.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from torch import Tensor

from drafter.anchors import anchor_seed, draw_anchors
from drafter.dataset import CachedRow, read_part
from drafter.deal import Deal
from drafter.feed import anchors_per_row, row_weight
from drafter.mixed_feed import replayable
from drafter.processes import meet, rank_and_world
from drafter.resume import saved_step
from drafter.stream_plan import PlannedRow, StreamPlan, Window, plan_stream, replies_of
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, ResponseSet, artifact_dir
from pipeline.cache_parts import CachePlan
from pipeline.config import Config
from pipeline.disk import QUEUE, RESERVE_BYTES, estimate, sweep
from pipeline.engines import Engines
from pipeline.errors import StageError
from pipeline.follow import Limit
from pipeline.produce import producing
from pipeline.reading import CaptureWork
from pipeline.shards import part_path
from pipeline.shards import read_part as read_record
from pipeline.stages import Artifact, current_names, exclusive
from pipeline.state_queue import StateQueue
from pipeline.twins import REASON, table_of

logger = logging.getLogger("slipstream")

LIMITS = (
    "every row is trained on once: no second epoch and no second setting on the same states; what is captured again "
    "after a crash need not be equal to the bit; walks cover the held-out rows alone"
)


@contextmanager
def fed(
    folder: Path,
    config: Config,
    states: Artifact[HiddenStateCache],
    start: Artifact[DrafterCheckpoint] | None,
    responses: Artifact[ResponseSet],
    replay: Sequence[Artifact[HiddenStateCache]] = (),
    *,
    engines: Engines,
) -> Iterator[None]:
    """Engines read the train rows into the queue of the run that trains in this folder, for as long as the block runs.

    The arguments are those of ``train_in``. Raises: what the engines failed with.
    """
    block_size = start.manifest.block_size if start else config.drafter.block_size
    replay = replayable(replay, block_size=block_size)
    share = config.train.replay_share if replay else 0.0
    plan = plan_stream(config, responses, states, block_size=block_size, replay_share=share)
    layer_ids = states.manifest.fingerprint.target_layer_ids
    expected = estimate(
        config,
        num_rows=plan.num_rows,
        num_tokens=plan.num_tokens,
        num_layers=len(layer_ids),
        hidden_size=states.manifest.hidden_size,
    )
    logger.info("train: %s stream through a queue on disk, in %d steps; %s", expected, plan.num_steps, LIMITS)
    remove_abandoned(config, keep=folder)
    queue = queue_of(config, folder, plan)
    queue.recover()
    keep = {states.id, *(cache.id for cache in replay), *current_names(config.root).values()}
    present = sum(queue.bytes_taken().values())
    queue = replace(queue, max_bytes=_room(config, plan, keep=keep, present=present))
    work = CaptureWork(
        CachePlan(queue.folder, layer_ids, config.capture), responses.folder, responses.manifest.shards, ("train",)
    )
    with producing(queue, work, engines, covered=plan.parts_before(saved_step(folder)), total_rows=plan.num_rows):
        yield


def _room(config: Config, plan: StreamPlan, *, keep: set[str], present: int) -> int:
    """Bytes that the queue may take beside the caches that stay; older ones are removed for it.

    ``present`` bytes of it are there already.

    Raises: StageError where one window does not fit.
    """
    root, budget = config.root, config.capture.max_bytes
    sweep(root, max_bytes=budget, ttl_hours=config.capture.ttl_hours, need=plan.queue_bytes, keep=keep)
    stays = sum(path.stat().st_size for path in (root / HiddenStateCache.kind).rglob("*") if path.is_file())
    room = min(plan.queue_bytes, budget - stays)
    free = shutil.disk_usage(root).free - RESERVE_BYTES + present
    if plan.window_bytes > min(room, free):
        raise StageError(
            f"{root}: states that are trained on together take {plan.window_bytes} bytes. capture.max_bytes = {budget} "
            f"leaves {room} beside the caches that stay, and the disk {max(0, free)}: raise the one, or free some of "
            "the other"
        )
    return room


def queue_of(config: Config, folder: Path, plan: StreamPlan) -> StateQueue:
    """The queue of the run that trains in this folder."""
    return StateQueue(_queues(config) / folder.name, plan.queue_bytes, plan.expected)


def remove_queue(config: Config, folder: Path) -> None:
    """Remove the queue of a run that has ended."""
    shutil.rmtree(_queues(config) / folder.name, ignore_errors=True)


def remove_abandoned(config: Config, keep: Path) -> None:
    """Remove the queues of runs that are not going on; what they still need is captured again when they are."""
    for queue in _queues(config).glob("*/"):
        if queue.name == keep.name:
            continue
        try:
            with exclusive(artifact_dir(config.root, DrafterCheckpoint, queue.name), "train"):
                logger.info("train: removed the states of a streamed run that was abandoned (%s)", queue.name)
                shutil.rmtree(queue)
        except StageError:  # it is going on
            continue


class StreamFeed:
    """Rows as they come through the queue; see drafter/feed.py."""

    def __init__(
        self,
        config: Config,
        plan: StreamPlan,
        queue: StateQueue,
        responses: Artifact[ResponseSet],
        *,
        block_size: int,
    ):
        self.num_steps, self.mean_weight = plan.num_steps, plan.mean_weight
        self._plan, self._queue, self._responses, self._block_size = plan, queue, responses, block_size
        self._settings = config.train
        self._limit = Limit("capture", config.capture.max_reject_share)
        self._window: Window | None = None
        self._rows: dict[str, CachedRow] = {}
        self._seen: dict[str, int] = {}  # digest → hash of the ids that have it
        self._twins: list[dict[str, Any]] = []  # of all windows so far
        self._released = -1
        self._waited_s = 0.0

    def replies(self) -> Iterator[Tensor]:
        """The reply of each row of the plan."""
        return replies_of(self._responses, self._plan)

    def rows_of(self, step: int) -> list[Deal]:
        """The rows of a step, once they are there; those that were kept out of the cache are missing from it."""
        window = self._plan.window_of(step)
        if window is not self._window:
            self._take(window)
        planned = [row for row in window.rows_of(step) if row.row_id in self._rows]
        return [self._deal_of(row) for row in planned]

    def learn(self, accepted: Sequence[Tensor]) -> None:
        """Nothing: no row is seen again, so its anchors are always drawn uniformly."""

    def state(self) -> dict[str, Any]:
        """The rows that were left out as twins: nobody else knows of them. All else follows from the plan."""
        return {"twins": list(self._twins)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Leave the same rows out."""
        self._twins = list(state.get("twins", []))

    def wants_checkpoint(self, step: int) -> bool:
        """After a window's last step: its states hold the room that the window after the next one needs."""
        return step == self._plan.window_of(step - 1).steps.stop

    def covered(self, step: int) -> None:
        """Release the windows that are through, when no process looks at them any more."""
        num_parts = self._plan.parts_before(step)
        if num_parts == self._released:
            return
        self._window, self._rows = None, {}
        meet()
        if rank_and_world()[0] == 0:
            self._queue.release(num_parts)
        self._released = num_parts

    def figures(self) -> dict[str, float]:
        """How long training has waited for states so far: back-pressure the other way round."""
        return {"waited_for_states_s": round(self._waited_s, 3)}

    def outcome(self, num_steps: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """The rows that were trained on, counted, and the records of those that were not."""
        in_parts = [*self._queue.released().rejects, *self._rejects_of_open_window(num_steps)]
        rejects = [*in_parts, *self._twins]
        kept_out = {reject["row_id"] for reject in rejects}
        return sum(row.row_id not in kept_out for row in self._plan.rows(num_steps)), rejects

    def _rejects_of_open_window(self, num_steps: int) -> list[dict[str, Any]]:
        """Of the parts of the window that a run which stopped early leaves unreleased amid its steps."""
        if self._plan.parts_before(num_steps) == len(self._plan.expected):
            return []
        window = self._plan.window_of(num_steps)
        if num_steps == window.first_step:
            return []
        if window is not self._window:  # a run that had stopped already was resumed
            self._take(window)
        return self._queue.rejects_of(window.parts)

    def _take(self, window: Window) -> None:
        """Wait for a window's parts and open them. Raises: StageError when too many of their rows were kept out."""
        self._window, self._rows = None, {}
        self._waited_s += self._queue.wait_for(window.parts)
        rejects = [*self._queue.released().rejects, *self._queue.rejects_of(window.parts), *self._twins]
        self._limit.require(Counter(str(reject["reason"]) for reject in rejects), self._plan.num_rows)
        rows = [row for part in window.parts for row in read_part(self._queue.folder, part)]
        known = {twin["row_id"] for twin in self._twins}
        if found := [twin for twin in self._find_twins(window.parts) if twin["row_id"] not in known]:
            logger.warning("train: %d rows share their last state with another input, and are left out", len(found))
        self._twins += found
        left_out = {twin["row_id"] for twin in self._twins}
        self._rows = {row.row_id: row for row in rows if row.row_id not in left_out}
        self._window = window

    def _find_twins(self, parts: Sequence[int]) -> list[dict[str, Any]]:
        """Rejects for rows whose last state is another input's, here or in a window since this process began."""
        rows = [row for part in parts for row in _digests(self._queue.folder, part)]
        inputs: dict[str, set[int]] = {digest: set() for _, digest, _ in rows}
        for _, digest, ids in rows:
            inputs[digest] |= {ids, self._seen.get(digest, ids)}
        self._seen |= {digest: ids for _, digest, ids in rows}
        return [
            {"row_id": row_id, "reason": REASON, "digest": digest}
            for row_id, digest, _ in rows
            if len(inputs[digest]) > 1
        ]

    def _deal_of(self, planned: PlannedRow) -> Deal:
        row, settings = self._rows[planned.row_id], self._settings
        seed = anchor_seed(settings.seed, 0, planned.number)
        limit = anchors_per_row(settings)
        anchors = draw_anchors(row.num_prompt_tokens, row.num_tokens, self._block_size, limit, seed=seed)
        return Deal(row, anchors, row_weight(row.weight, settings))


def _digests(folder: Path, index: int) -> Iterator[tuple[str, str, int]]:
    """Row id, digest of the last state, and hash of the ids that it was made from, of a part's rows."""
    path = folder / table_of(read_record(part_path(folder, index))).path
    for row in pq.read_table(path, columns=["row_id", "digest", "ids"]).to_pylist():
        yield row["row_id"], row["digest"], hash(tuple(row["ids"][:-1]))


def _queues(config: Config) -> Path:
    return config.root / QUEUE
