"""Rows of a cache whose states are another row's: two inputs, one and the same last state.

In a causal model the last position's states depend on every token before it, so at least one of the two is not what it
says it is, and nobody can tell which. All of them are kept out, in whichever parts they are and whichever run they came
in. A part that has one gets a new table and a new record; its states files stand, and so do all other parts.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.artifacts import Shard, describe_file, publish
from pipeline.rows import ids_of_rows
from pipeline.shards import Part, fsync_file, part_path, read_part, record, write_table

logger = logging.getLogger("slipstream")

REASON = "duplicate_states"


def quarantine_twins(folder: Path, num_parts: int) -> int:
    """Keep out every row that shares its last state with another input; how many there are that were not yet.

    All parts must be committed. A kill in the middle costs nothing: the records of parts that have been through name
    the states, and the others are found by them.
    """
    owners: dict[str, dict[int, str]] = defaultdict(dict)  # digest → input → a row that has both
    tainted: set[str] = set()
    for index in range(num_parts):
        part = read_part(part_path(folder, index))
        tainted |= {reject["digest"] for reject in part.rejects if reject["reason"] == REASON}
        table = _table(folder, part, ["row_id", "ids", "digest"])
        named = zip(table.column("row_id").to_pylist(), table.column("digest").to_pylist(), strict=True)
        for (row_id, digest), ids in zip(named, ids_of_rows(table, "ids"), strict=True):
            owners[digest].setdefault(hash(ids[:-1].tobytes()), row_id)  # the last token is never an input
    tainted |= {digest for digest, inputs in owners.items() if len(inputs) > 1}
    if not tainted:
        return 0
    twins = {digest: sorted(owners[digest].values()) for digest in tainted}
    num = sum(_take_out(folder, index, twins) for index in range(num_parts))
    logger.warning("capture: %d rows share their last state with another input, and are kept out", num)
    return num


def table_of(part: Part) -> Shard:
    """The table of a cache's part."""
    (shard,) = [shard for shard in part.shards if shard.path.endswith(".parquet")]
    return shard


def _take_out(folder: Path, index: int, twins: Mapping[str, list[str]]) -> int:
    part = read_part(part_path(folder, index))
    table = _table(folder, part)
    out = pc.is_in(table.column("digest"), pa.array(list(twins)))
    rejects = [
        {
            "row_id": row["row_id"],
            "reason": REASON,
            "digest": row["digest"],
            "same_as": [row_id for row_id in twins[row["digest"]] if row_id != row["row_id"]],
        }
        for row in table.filter(out).to_pylist()
    ]
    if not rejects:
        return 0
    kept = table.filter(pc.invert(out))
    shard = _write(folder, table_of(part), kept)
    states = pc.sum(kept.column("num_states")).as_py() or 0
    replaced = part.model_copy(
        update={
            "shards": tuple(shard if old.path.endswith(".parquet") else old for old in part.shards),
            "rejects": (*part.rejects, *rejects),
            "counts": part.counts | {"rows": len(kept), "states": states},
        }
    )
    record(folder, index, replaced)
    (folder / table_of(part).path).unlink()
    return len(rejects)


def _write(folder: Path, old: Shard, table: pa.Table) -> Shard:
    """The table under a name of its own: until the record names it, the old one counts."""
    stem = old.path.removesuffix(".parquet")
    path = folder / f"{stem}-without-twins.parquet"
    temporary = folder / f".{path.name}.tmp"
    write_table(table)(temporary)
    fsync_file(temporary)
    publish(temporary, path)
    return describe_file(path, rows=len(table))


def _table(folder: Path, part: Part, columns: list[str] | None = None) -> pa.Table:
    return pq.read_table(folder / table_of(part).path, columns=columns)
