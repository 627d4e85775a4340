"""Rows of many Parquet files: any range, as if they were one, and nothing that the manifest did not say."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.artifacts import describe_file
from pipeline.errors import SchemaError
from pipeline.rows import ids_of_rows, num_rows, read_rows

SCHEMA = pa.schema([("n", pa.int32())])


@pytest.fixture
def files(tmp_path):
    """0 to 19 in files of 7, 0, 12 and 1 rows, in row groups of 3; and a file that is no table."""
    shards, first = [], 0
    for number, size in enumerate((7, 0, 12, 1)):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"n": range(first, first + size)}, schema=SCHEMA), path, row_group_size=3)
        shards.append(describe_file(path, rows=size))
        first += size
    (tmp_path / "rejects.jsonl").write_text("{}")
    return tmp_path, [*shards, describe_file(tmp_path / "rejects.jsonl", rows=1)]


def test_any_range_is_that_of_the_rows_in_order(files):
    folder, shards = files
    assert num_rows(shards) == 20
    for start in range(22):
        for stop in range(start, 22):
            found = read_rows(folder, shards, SCHEMA, start, stop).column("n").to_pylist()
            assert found == list(range(20))[start:stop], (start, stop)


def test_a_file_that_is_cut_or_another_is_refused(files):
    folder, shards = files
    (folder / "0.parquet").write_bytes((folder / "0.parquet").read_bytes()[:-4])
    with pytest.raises(SchemaError, match="not a whole Parquet file"):
        read_rows(folder, shards, SCHEMA, 0, 3)
    assert read_rows(folder, shards, SCHEMA, 7, 9).column("n").to_pylist() == [7, 8], "what is not read is not opened"
    pq.write_table(pa.table({"n": range(5)}, schema=SCHEMA), folder / "0.parquet")
    with pytest.raises(SchemaError, match=r"5 rows of \['n'\], expected 7"):
        read_rows(folder, shards, SCHEMA, 0, 3)


def test_the_ids_of_a_row_are_those_of_its_columns_in_a_row_in_slices_too():
    table = pa.table(
        {"a": [[1, 2], [], [3]], "b": [[4], [5, 6], []]},
        schema=pa.schema([("a", pa.list_(pa.int32())), ("b", pa.list_(pa.int32()))]),
    )
    assert [ids.tolist() for ids in ids_of_rows(table, "a", "b")] == [[1, 2, 4], [5, 6], [3]]
    assert [ids.tolist() for ids in ids_of_rows(table.slice(1), "a", "b")] == [[5, 6], [3]]
