"""Records that are the same prompt become one row, which counts how often it was served, for whom, and when last.

The row that stands for all is the smallest by conversation and by what the record says, so that it doesn't matter which
files records lie in, in what order, or how these are cut: its sampling and its served reply are that record's, what
others drew with differently only adds to the weight.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_FIRST = ("row_id", "conversation", "record")


def without_repeats(table: pa.Table) -> pa.Table:
    """Records that are there once: one with an id and a time that says the same of the same prompt as another is that
    one, in a log that was copied or shipped twice."""
    keys = ["row_id", "conversation", "record"]
    places = table.select([*keys, "identified"]).append_column("place", pa.array(np.arange(len(table))))
    named = places.filter(places["identified"]).group_by(keys).aggregate([("place", "min")])["place_min"]
    kept = pa.concat_arrays([*named.chunks, *places.filter(pc.invert(places["identified"]))["place"].chunks])
    return table.take(kept)


def merged(tables: Sequence[pa.Table], *, order: Sequence[str] = _FIRST) -> pa.Table:
    """One row for each distinct value of the first column of ``order``: the first by the others.

    ``weight`` and ``served`` are sums, ``last_seen`` is the latest; ``subjects`` and ``subject_weights`` list who
    asked, and how often.
    """
    table = pa.concat_tables(tables).combine_chunks()
    if not len(table):
        return table
    table = table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in order]))
    starts = _starts(table.column(order[0]))
    first = table.take(pa.array(starts))
    sums = {name: np.add.reduceat(table.column(name).to_numpy(), starts) for name in ("weight", "served")}
    seen = table.column("last_seen").to_numpy(zero_copy_only=False)  # NaN where a record has no time
    latest = np.fmax.reduceat(seen, starts)
    who, how_often = _subjects(table, starts)
    columns = {
        **{name: pa.array(values, table.schema.field(name).type) for name, values in sums.items()},
        "last_seen": pa.array(latest, pa.float64(), from_pandas=True),
        "subjects": who,
        "subject_weights": how_often,
    }
    for name, column in columns.items():
        first = first.set_column(first.schema.get_field_index(name), first.schema.field(name), column)
    return first


def _starts(ids: pa.ChunkedArray) -> np.ndarray:  # int64 [groups]
    """Where each run of equal ids begins."""
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy()
    return np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]])


def _subjects(table: pa.Table, starts: np.ndarray) -> tuple[pa.Array, pa.Array]:
    """By row: its subjects in the order of their hashes, and their requests."""
    lists = table.column("subjects").combine_chunks()
    rows = np.searchsorted(starts, lists.value_parent_indices().to_numpy(), side="right") - 1
    flat = pa.table(
        {
            "row": rows,
            "subject": lists.flatten(),
            "weight": table.column("subject_weights").combine_chunks().flatten(),
        }
    )
    counted = flat.group_by(["row", "subject"]).aggregate([("weight", "sum")]).sort_by(
        [("row", "ascending"), ("subject", "ascending")]
    )  # fmt: skip
    ends = np.searchsorted(counted.column("row").to_numpy(), np.arange(len(starts) + 1))
    offsets = pa.array(ends, pa.int32())
    subjects = pa.ListArray.from_arrays(offsets, counted.column("subject").combine_chunks())
    weights = counted.column("weight_sum").combine_chunks().cast(pa.int32())
    return subjects, pa.ListArray.from_arrays(offsets, weights)
