import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import shards as parts
from pipeline.errors import SchemaError, StageError
from pipeline.shards import PartWriter, commit_part, read_tables, write_table

SCHEMA = pa.schema([("n", pa.int64())])


def write_part(folder, index, *, rejects=()):
    writer = PartWriter(folder)
    if writer.is_done(index):
        return False
    table = pa.table({"n": range(index * 10, index * 10 + 10)}, schema=SCHEMA)
    files = {f"rows-{index:05d}.parquet": (10, write_table(table))}
    writer.commit(index, files, rejects=rejects, counts={"rows": 10})
    return True


def state_of(folder):
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_a_second_run_does_what_is_missing_and_touches_nothing_that_is_done(tmp_path):
    assert [write_part(tmp_path, i) for i in range(4)] == [True] * 4
    before = state_of(tmp_path)
    assert [write_part(tmp_path, i) for i in range(10)] == [False] * 4 + [True] * 6
    after = state_of(tmp_path)
    assert {name: after[name] for name in before} == before
    assert [write_part(tmp_path, i) for i in range(10)] == [False] * 10
    assert state_of(tmp_path) == after


def test_rows_rejects_and_counts_of_all_parts_are_gathered_in_order(tmp_path):
    for index in (2, 0, 1):
        write_part(tmp_path, index, rejects=[{"row_id": f"r{index}", "reason": "odd" if index else "even"}])
    shards, rejects, counts = PartWriter(tmp_path).finish(3)
    assert [s.path for s in shards] == [
        "rows-00000.parquet",
        "rows-00001.parquet",
        "rows-00002.parquet",
        "rejects.jsonl",
    ]
    assert rejects == {"even": 1, "odd": 2}
    assert counts == {"rows": 30}
    assert read_tables(tmp_path, shards, SCHEMA)["n"].to_pylist() == list(range(30))


def test_an_unfinished_plan_is_refused_by_the_numbers_of_its_missing_parts(tmp_path):
    write_part(tmp_path, 1)
    with pytest.raises(StageError, match=r"parts \[0, 2\] are not committed"):
        PartWriter(tmp_path).finish(3)


# Commits parts 0, 1 and 2, then hangs inside part 3 with its first file written and its second half written.
_CRASHING = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from test_shards import write_part
from pipeline.shards import PartWriter
folder = Path({folder!r})
for index in range(3):
    write_part(folder, index)
def whole(path):
    path.write_bytes(b"written, but not committed")
def half(path):
    path.write_bytes(b"PAR1 half a file")
    (folder.parent / "ready").touch()
    time.sleep(600)
PartWriter(folder).commit(3, {{"rows-00003.parquet": (10, whole), "more-00003.bin": (1, half)}})
"""


def test_a_kill_in_the_middle_of_a_part_costs_that_part_alone_and_no_row_is_there_twice(tmp_path):
    folder, ready = tmp_path / "parts", tmp_path / "ready"
    here = Path(__file__).resolve()
    code = _CRASHING.format(path=[str(here.parent), str(here.parents[2])], folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ready.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left_over = list(folder.glob(".*-00003.*.tmp"))
    assert len(left_over) == 2
    (folder / "rows-00003.parquet").write_bytes(b"published, but not committed")

    writer = PartWriter(folder)
    assert [writer.is_done(i) for i in range(4)] == [True, True, True, False]
    assert not {*left_over, folder / "rows-00003.parquet"} & set(folder.iterdir())
    assert [write_part(folder, i) for i in range(5)] == [False] * 3 + [True] * 2
    shards, _, _ = PartWriter(folder).finish(5)
    assert sorted(read_tables(folder, shards, SCHEMA)["n"].to_pylist()) == list(range(50))


def test_what_an_engine_of_a_killed_run_is_committing_is_no_leftover(tmp_path, monkeypatch):
    published, may_record, record = threading.Event(), threading.Event(), parts.record

    def held_up(*arguments):
        published.set()
        assert may_record.wait(60)
        record(*arguments)

    monkeypatch.setattr(parts, "record", held_up)
    files = {"rows-00000.parquet": (10, write_table(pa.table({"n": range(10)}, schema=SCHEMA)))}
    engine = threading.Thread(target=commit_part, args=(tmp_path, 0, files))
    engine.start()
    assert published.wait(60)
    driver = threading.Thread(target=PartWriter, args=(tmp_path,))
    driver.start()
    driver.join(0.2)  # as long as it takes where it doesn't wait
    may_record.set()
    engine.join()
    driver.join()
    assert len(read_tables(tmp_path, PartWriter(tmp_path).finish(1)[0], SCHEMA)) == 10


@pytest.mark.parametrize("damage", [b"", b"PAR1 and then nothing that ends a file"], ids=["zero bytes", "no footer"])
def test_a_file_that_nobody_committed_is_removed_and_its_rows_are_made_again(tmp_path, damage):
    write_part(tmp_path, 0)
    (tmp_path / "rows-00001.parquet").write_bytes(damage)
    assert write_part(tmp_path, 1)
    shards, _, _ = PartWriter(tmp_path).finish(2)
    assert read_tables(tmp_path, shards, SCHEMA)["n"].to_pylist() == list(range(20))


@pytest.mark.parametrize("keep", [0, 40], ids=["zero bytes", "no footer"])
def test_a_committed_file_that_was_damaged_later_stops_writer_and_reader(tmp_path, keep):
    write_part(tmp_path, 0)
    shards, _, _ = PartWriter(tmp_path).finish(1)
    path = tmp_path / "rows-00000.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SchemaError, match=r"rows-00000\.parquet: damaged"):
        PartWriter(tmp_path)
    with pytest.raises(SchemaError, match=r"rows-00000\.parquet: not a whole Parquet file"):
        read_tables(tmp_path, shards, SCHEMA)


def test_a_table_with_other_columns_is_refused_with_both_lists(tmp_path):
    write_part(tmp_path, 0)
    shards, _, _ = PartWriter(tmp_path).finish(1)
    with pytest.raises(SchemaError, match=r"columns \['n'\], expected \['other'\]"):
        read_tables(tmp_path, shards, pa.schema([("other", pa.int64())]))


def test_no_shards_read_as_no_rows_of_the_right_type(tmp_path):
    assert read_tables(tmp_path, (), SCHEMA).schema == SCHEMA


def test_what_is_written_is_plain_parquet(tmp_path):
    write_part(tmp_path, 0)
    assert pq.read_table(tmp_path / "rows-00000.parquet")["n"].to_pylist() == list(range(10))
