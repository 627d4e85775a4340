"""A cache's files are read by what others have: plain pyarrow and datasets (Ray Data: tests/jobs)."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.quantize import quantize
from pipeline.schemas import CACHE
from pipeline.shards import commit_part, write_table
from pipeline.states import StateShards

LAYERS, HIDDEN = 2, 100


def words(n, seed):
    return np.random.default_rng(seed).integers(1, 0x7F00, (n, LAYERS, HIDDEN)).astype(np.uint16)


def small_cache(folder, states_format):
    """A part of six rows in several states files; the words of each row."""
    rows = {f"row-{n}": words(10 + n, n) for n in range(6)}
    shape = {"num_layers": LAYERS, "hidden_size": HIDDEN}
    with StateShards(folder, 0, **shape, states_format=states_format, shard_bytes=9_000) as sink:
        table = []
        for row_id, states in rows.items():
            captured = sink.add(row_id, states, num_states=len(states))
            place = {"states_file": captured.states_file, "states_batch": captured.states_batch}
            ids = list(range(len(states) + 1))
            table.append({"row_id": row_id, "ids": ids, "num_states": len(states), "num_prompt_tokens": 3, **place})
        rows_file = write_table(pa.Table.from_pylist(table, schema=CACHE))
        part = commit_part(folder, 0, sink.files() | {"rows-00000.parquet": (6, rows_file)})
    assert len(part.shards) > 3
    return rows


def test_plain_pyarrow_reads_rows_and_their_states(tmp_path):
    rows = small_cache(tmp_path, "bf16")
    for row in pq.read_table(tmp_path / "rows-00000.parquet").to_pylist():
        with pa.memory_map(str(tmp_path / row["states_file"])) as file:
            batch = pa.ipc.open_file(file).get_batch(row["states_batch"])
            values = batch.column("states").to_pylist()
        assert len(values) == row["num_states"] == len(row["ids"]) - 1
        assert np.frombuffer(b"".join(values), np.uint16).tobytes() == rows[row["row_id"]].tobytes()


def test_plain_pyarrow_and_numpy_read_the_8_bit_form_by_what_its_schema_says(tmp_path):
    rows = small_cache(tmp_path, "int8")
    for row in pq.read_table(tmp_path / "rows-00000.parquet").to_pylist():
        reader = pa.ipc.open_file(str(tmp_path / row["states_file"]))
        told = {key.decode(): value.decode() for key, value in reader.schema.metadata.items()}
        assert told == {"format": "int8", "dtype": "bfloat16", "shape": f"[{LAYERS}, {HIDDEN}]", "group_size": "64"}
        batch = reader.get_batch(row["states_batch"])
        shape = (row["num_states"], LAYERS, -1)
        codes = np.frombuffer(b"".join(batch.column("codes").to_pylist()), np.int8).reshape(shape)
        scales = np.frombuffer(b"".join(batch.column("scales").to_pylist()), np.uint16).reshape(shape)
        assert (codes.tobytes(), scales.tobytes()) == tuple(a.tobytes() for a in quantize(rows[row["row_id"]]))
        steps = (scales.astype(np.uint32) << 16).view(np.float32)
        numbers = codes * np.repeat(steps, int(told["group_size"]), axis=2)[:, :, :HIDDEN]
        true = (rows[row["row_id"]].astype(np.uint32) << 16).view(np.float32)
        assert np.abs(numbers / true.max() - true / true.max()).max() < 1 / 127


@pytest.mark.parametrize(("states_format", "columns"), [("bf16", ["states"]), ("int8", ["codes", "scales"])])
def test_datasets_reads_rows_and_states(tmp_path, monkeypatch, states_format, columns):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import load_dataset

    rows = small_cache(tmp_path / "cache", states_format)
    settings = {"split": "train", "cache_dir": str(tmp_path / "datasets")}
    table = load_dataset("parquet", data_files=str(tmp_path / "cache" / "rows-00000.parquet"), **settings)
    assert table["row_id"][:] == list(rows)
    files = sorted({str(tmp_path / "cache" / name) for name in table["states_file"]})
    states = load_dataset("arrow", data_files=files, **settings).with_format("arrow")
    assert states.column_names == columns and len(states) == sum(table["num_states"])
    # A value a position: rows follow each other as files and record batches do, which is the table's order here.
    start = 0
    for row in table:
        found = [b"".join(states[start : start + row["num_states"]][name].to_pylist()) for name in columns]
        true = rows[row["row_id"]]
        expected = [true.tobytes()] if columns == ["states"] else [array.tobytes() for array in quantize(true)]
        assert found == expected
        start += row["num_states"]
