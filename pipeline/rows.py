"""Some rows of a table that lies in several Parquet files, without reading the others."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.artifacts import Shard
from pipeline.errors import SchemaError


def num_rows(shards: Sequence[Shard]) -> int:
    """Rows of an artifact's tables."""
    return sum(shard.rows for shard in tables(shards))


def tables(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """An artifact's Parquet files, in order."""
    return tuple(shard for shard in shards if shard.path.endswith(".parquet"))


def read_rows(folder: Path, shards: Sequence[Shard], schema: pa.Schema, start: int, stop: int) -> pa.Table:
    """Rows ``start`` to ``stop`` of an artifact's tables, as if they were one.

    Raises: SchemaError when a file is not a whole Parquet file, or has other columns or rows than its manifest says.
    """
    found, first = [], 0
    for shard in tables(shards):
        begin, end = max(start - first, 0), min(stop - first, shard.rows)
        if begin < end:
            found.append(_read(Path(folder) / shard.path, shard.rows, schema, begin, end))
        first += shard.rows
    return pa.concat_tables(found) if found else schema.empty_table()


def ids_of_rows(table: pa.Table, *columns: str) -> Iterator[np.ndarray]:  # int32 [n] a row
    """Each row's token ids, those of several list columns one after the other, without a Python object an id."""
    lists = [table.column(name).combine_chunks() for name in columns]
    ends = [(array.offsets.to_numpy(), array.values.to_numpy()) for array in lists]
    for row in range(len(table)):
        yield np.concatenate([values[offsets[row] : offsets[row + 1]] for offsets, values in ends])


def _read(path: Path, rows: int, schema: pa.Schema, begin: int, end: int) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            if file.schema_arrow.names != schema.names or file.metadata.num_rows != rows:
                raise SchemaError(
                    f"{path}: {file.metadata.num_rows} rows of {file.schema_arrow.names}, expected {rows} of "
                    f"{schema.names}; remove {path.parent} and run the stage again"
                )
            groups, first, skipped = [], 0, 0
            for number in range(file.num_row_groups):
                size = file.metadata.row_group(number).num_rows
                if first + size <= begin:
                    skipped += size
                elif first < end:
                    groups.append(number)
                first += size
            return file.read_row_groups(groups).slice(begin - skipped, end - begin).cast(schema)
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(f"{path}: not a whole Parquet file ({error}); remove {path.parent} and run the stage again")
