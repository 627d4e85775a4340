"""A cache's files are read by Ray Data: rows as Parquet, states where the table says they are."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.session import ray_session
from tests.pipeline.test_states_with_other_readers import HIDDEN, LAYERS, small_cache


def test_ray_data_reads_rows_and_their_states(tmp_path):
    rows = small_cache(tmp_path, "bf16")

    def with_states(batch: pa.Table) -> pa.Table:
        found = []
        for row in batch.to_pylist():
            reader = pa.ipc.open_file(pa.memory_map(str(tmp_path / row["states_file"])))
            found.append(b"".join(reader.get_batch(row["states_batch"]).column("states").to_pylist()))
        return batch.select(["row_id", "num_states"]).append_column("states", pa.array(found, pa.large_binary()))

    with ray_session():
        import ray.data

        table = ray.data.read_parquet(str(tmp_path / "rows-00000.parquet"))
        found = table.map_batches(with_states, batch_format="pyarrow", batch_size=2).take_all()
        # The states alone, a value a position, as blocks of their own.
        tables = [pa.ipc.open_file(str(path)).read_all() for path in sorted(tmp_path.glob("*.arrow"))]
        positions = ray.data.from_arrow(tables)
        sizes = positions.map_batches(
            lambda batch: pa.table({"bytes": [sum(map(len, batch.column("states").to_pylist()))]}),
            batch_format="pyarrow",
        )
        num_positions, num_bytes = positions.count(), sizes.sum("bytes")
    assert {row["row_id"]: row["states"] for row in found} == {name: states.tobytes() for name, states in rows.items()}
    num_states = pq.read_table(tmp_path / "rows-00000.parquet").column("num_states").to_pylist()
    assert num_positions == sum(num_states)
    assert num_bytes == num_positions * LAYERS * HIDDEN * np.dtype(np.uint16).itemsize
