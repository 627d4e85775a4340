"""Part of the responses → part of their states, by one prefill of what was answered; done where the engine is."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.artifacts import Shard
from pipeline.cache_parts import CachePlan, ids_of
from pipeline.engines import CaptureRequest, Engine, PartDone
from pipeline.rows import ids_of_rows, read_rows, tables
from pipeline.schemas import RESPONSES, SPLITS
from pipeline.shards import Part, part_path, read_part


@dataclass(frozen=True)
class CaptureWork:
    """Reads the responses' rows by prefill, a part of the cache for a part of the responses."""

    plan: CachePlan
    responses: Path
    shards: tuple[Shard, ...]
    splits: tuple[str, ...] = SPLITS

    @property
    def num_parts(self) -> int:
        """Parts of the responses, and so of the cache."""
        return len(tables(self.shards))

    def table(self, index: int) -> pa.Table:
        """The rows of a part that are captured."""
        shard = tables(self.shards)[index]
        rows = read_rows(self.responses, [shard], RESPONSES, 0, shard.rows)
        return rows.filter(pc.is_in(rows.column("split"), pa.array(self.splits)))

    def rows(self, index: int) -> list[dict[str, Any]]:
        """The same, a row at a time."""
        return self.table(index).to_pylist()

    def extent(self, index: int) -> tuple[int, int]:
        """The rows and the tokens of a part."""
        table = self.table(index)
        return len(table), sum(len(ids) for ids in ids_of_rows(table, "prompt_ids", "response_ids"))

    def begin(self, engine: Engine) -> dict[str, float]:
        """The capture check, on the first rows there are."""
        every = (ids_of(row) for index in range(self.num_parts) for row in self.rows(index))
        return self.plan.check(engine, every)

    def part(self, engine: Engine, index: int, begun: Mapping[str, float]) -> PartDone:
        """The states of one part's rows."""
        rows = self.rows(index)
        if not self.plan.is_done(index):
            with self.plan.begin(engine, index, begun) as part:
                requests = [CaptureRequest(row["row_id"], tuple(ids_of(row))) for row in rows]
                part.commit(rows, engine.prefill(requests, states=part))
        return part_done(index, read_part(part_path(self.plan.folder, index)), rows=len(rows))


def part_done(index: int, part: Part, *, rows: int) -> PartDone:
    """What a committed part of the cache amounts to."""
    return PartDone(index, rows, part.counts["states"], Counter(reject["reason"] for reject in part.rejects))
