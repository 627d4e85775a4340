"""Part of the prompts → part of the responses and, in the same pass, of their states; done where the engine is.

The responses are committed first. A kill in between leaves a part without states, which the capture stage reads.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.artifacts import Shard
from pipeline.cache_parts import CachePart, CachePlan, ids_of
from pipeline.config import Config
from pipeline.engines import Captured, CaptureRequest, Engine, PartDone, Reply
from pipeline.follow import STATES
from pipeline.plan import Planned, Served, plan, usable_context
from pipeline.render import Renderer, RenderError
from pipeline.rendering_check import require_same_rendering
from pipeline.rows import num_rows, read_rows
from pipeline.schemas import PROMPTS, RESPONSES
from pipeline.shards import Part, commit_part, drop_part, part_path, read_part, write_table

_KEPT = ("row_id", "conversation", "split", "slice", "slices", "weight", "inclusion_probability")

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Begun:
    """What an engine's process needs for every part."""

    renderer: Renderer
    check: Mapping[str, float]
    """The capture check of this engine; empty where nothing is captured."""


@dataclass(frozen=True)
class AnswerWork:
    """Has the target answer a part's prompts, and keeps the states that it has on the way."""

    config: Config
    prompts: Path
    shards: tuple[Shard, ...]
    folder: Path
    """Of the responses."""
    target_id: str
    cache: CachePlan | None
    """Where the states go; None keeps none."""

    @property
    def num_parts(self) -> int:
        """Parts that the prompts are dealt into."""
        return -(-num_rows(self.shards) // self.config.regenerate.rows_per_part)

    def size(self, index: int) -> int:
        """Prompts of a part."""
        size = self.config.regenerate.rows_per_part
        return min(size, num_rows(self.shards) - index * size)

    def max_tokens(self) -> int:
        """About the most tokens that prompts and replies can come to.

        Prompts are counted from the bytes of all and the tokens of some; every reply is taken to be as long as it may.
        """
        tokens_per_byte = self._tokens_per_byte()
        most, context, total = self.config.regenerate.max_tokens, usable_context(self.config), 0
        for index in range(self.num_parts):
            table = self._table(index)
            asked = pc.min_element_wise(pc.fill_null(table.column("max_tokens"), most), most).to_numpy()
            total += int(np.minimum(_num_bytes(table) * tokens_per_byte + asked, context).sum())
        return total

    def begin(self, engine: Engine) -> Begun:
        """The checks that no reply is made before: how prompts are rendered, and what is captured."""
        renderer = Renderer(self.config.target.model)
        require_same_rendering(self.config, renderer, engine)
        check = self.cache.check(engine, self._some_prompts(renderer)) if self.cache else {}
        return Begun(renderer, check)

    def part(self, engine: Engine, index: int, begun: Begun) -> PartDone:
        """The replies of one part's prompts, committed, and then their states."""
        if part_path(self.folder, index).exists():
            return self._done(index)
        if self.cache:
            drop_part(self.cache.folder, index)  # of replies that were removed since
        asked, served, rejects = self._plan(index, begun.renderer)
        with self.cache.begin(engine, index, begun.check) if self.cache else nullcontext() as states:
            replies, captured = engine.generate([item.request for item in asked], states=states)
            rows, refused = response_rows(asked, replies)
            rows += [_response_row(item, item.reply, origin="served") for item in served]
            rejects += refused
            table = pa.Table.from_pylist(rows, schema=RESPONSES)
            files = {f"responses-{index:05d}.parquet": (len(table), write_table(table))}
            commit_part(self.folder, index, files, rejects=rejects, counts=count(rows))
            if states is not None:
                _commit_states(engine, states, rows, captured)
        return self._done(index)

    def _done(self, index: int) -> PartDone:
        part = read_part(part_path(self.folder, index))
        reasons = Counter(reject["reason"] for reject in part.rejects)
        if self.cache and self.cache.is_done(index):
            kept_out = read_part(part_path(self.cache.folder, index)).rejects
            reasons.update(STATES + reject["reason"] for reject in kept_out)
        return PartDone(index, self.size(index), part.counts["response_tokens"], reasons)

    def _table(self, index: int) -> pa.Table:
        size = self.config.regenerate.rows_per_part
        return read_rows(self.prompts, self.shards, PROMPTS, index * size, (index + 1) * size)

    def _rows(self, index: int) -> list[dict[str, Any]]:
        return self._table(index).to_pylist()

    def _tokens_per_byte(self) -> float:
        """Of the first prompts that have a rendering; 1 where none has, since a token has a byte at least."""
        renderer, table = Renderer(self.config.target.model), self._table(0)
        num_tokens, num_bytes = 0, 0.0
        for row, size in zip(table.to_pylist(), _num_bytes(table), strict=True):
            with suppress(RenderError):
                num_tokens += len(renderer.row_ids(row))
                num_bytes += size
        return num_tokens / num_bytes if num_bytes else 1.0

    def _some_prompts(self, renderer: Renderer) -> Iterator[list[int]]:
        for index in range(self.num_parts):
            for row in self._rows(index):
                try:
                    yield renderer.row_ids(row)
                except RenderError:
                    continue  # counted when its part is done

    def _plan(self, index: int, renderer: Renderer) -> tuple[list[Planned], list[Served], list[dict[str, Any]]]:
        asked, served, rejects = [], [], []
        for row in self._rows(index):
            try:
                ids = renderer.row_ids(row)
                found = plan(self.config, row, ids, target_id=self.target_id, end_ids=renderer.end_ids)
            except RenderError as error:
                found = {"reason": error.reason, "detail": error.detail}
            match found:
                case Planned():
                    asked.append(found)
                case Served():
                    served.append(found)
                case _:
                    rejects.append({"row_id": row["row_id"], **found})
        return asked, served, rejects


def _num_bytes(prompts: pa.Table) -> np.ndarray:  # [rows]
    tools = pc.fill_null(pc.binary_length(prompts.column("tools")), 0)
    return pc.add(pc.binary_length(prompts.column("messages")), tools).to_numpy()


def response_rows(
    items: Sequence[Planned], replies: Iterable[Reply]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the replies, and the records of those that there are none of. By id, never by their order."""
    by_id = {reply.row_id: reply for reply in replies}
    rows, rejects = [], []
    for item in items:
        reply = by_id.get(item.request.row_id) or Reply(item.request.row_id, error="the engine returned no reply")
        if reply.error or not reply.ids:
            detail = reply.error or "the engine returned no token ids, and text is not encoded again"
            rejects.append({"row_id": reply.row_id, "reason": "no_reply", "detail": detail})
        else:
            rows.append(_response_row(item, reply, origin="target"))
    return rows, rejects


def count(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What a part's responses add to the manifest: replies, tokens, ends, and how budgets were met."""
    counts = Counter(responses=len(rows), clamped=sum(row["clamped"] for row in rows))
    counts.update(f"finish_{row['finish_reason']}" for row in rows)
    counts["served"] = sum(row["origin"] == "served" for row in rows)
    counts["response_tokens"] = sum(len(row["response_ids"]) for row in rows)
    counts["prompt_tokens"] = sum(len(row["prompt_ids"]) for row in rows)
    drafted = [row["accepted_per_step"] for row in rows if row["accepted_per_step"] is not None]
    counts["draft_steps"] = sum(map(len, drafted))
    counts["accepted_tokens"] = sum(map(sum, drafted))
    return dict(counts)


def _response_row(item: Planned | Served, reply: Reply, *, origin: str) -> dict[str, Any]:
    kept = {name: item.row[name] for name in _KEPT}
    request = item.request
    return {
        **kept,
        "prompt_ids": list(request.prompt_ids),
        "response_ids": list(reply.ids),
        "finish_reason": reply.finish_reason,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_tokens,
        "clamped": item.clamped,
        "sampling": request.sampling,
        "origin": origin,
        "accepted_per_step": None if reply.accepted_per_step is None else list(reply.accepted_per_step),
    }


def _commit_states(
    engine: Engine, states: CachePart, rows: Sequence[Mapping[str, Any]], captured: Sequence[Captured]
) -> Part:
    """Commit what was taken in the pass; what was not, or has holes, is read by one prefill."""
    taken = {result.row_id: result for result in captured if result.reason != "holes"}
    left = [CaptureRequest(row["row_id"], tuple(ids_of(row))) for row in rows if row["row_id"] not in taken]
    again = engine.prefill(left, states=states) if left else []
    return states.commit(rows, [*taken.values(), *again])
