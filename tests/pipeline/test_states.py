"""States files: bit for bit or within a stated error, bounded, whole or refused; only sound rows enter."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bench.oracles.trainers import resident
from pipeline.errors import SchemaError, StageError
from pipeline.shards import PartWriter, commit_part
from pipeline.states import StatesFile, StateShards, StatesWriter

LAYERS, HIDDEN = 2, 4


def bf16_words(values):
    """The words that torch stores for these numbers."""
    return torch.as_tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def random_words(n, *, layers=LAYERS, hidden=HIDDEN, seed=0):
    return bf16_words(torch.randn(n, layers, hidden, generator=torch.Generator().manual_seed(seed)))


def shards(folder, *, index=3, hidden=HIDDEN, layers=LAYERS, **settings):
    return StateShards(folder, index, num_layers=layers, hidden_size=hidden, **settings)


def write_file(path, rows, states_format="bf16"):
    _, layers, hidden = rows[0].shape
    writer = StatesWriter(path, num_layers=layers, hidden_size=hidden, states_format=states_format)
    numbers = [writer.append(writer.batch(words)) for words in rows]
    assert numbers == list(range(len(rows)))
    return writer.close()


def test_bf16_words_survive_bit_for_bit(tmp_path):
    values = [1.0, 3.0e38, 1e-39, -0.0]  # the second overflows float16, the third is subnormal
    states = torch.tensor([[values, values[::-1]], [values[::-1], values]]).to(torch.bfloat16)
    assert torch.isfinite(states).all()
    words = states.view(torch.int16).numpy().view(np.uint16)
    with shards(tmp_path) as sink:
        assert [sink.add(f"r{n}", words[: 2 - n], num_states=2 - n).states_batch for n in range(2)] == [0, 1]
        commit_part(tmp_path, 3, sink.files())
    file = StatesFile(tmp_path / "states-00003-00.arrow")
    assert (len(file), file.num_layers, file.hidden_size, file.states_format) == (2, 2, 4, "bf16")
    assert file.words(0).tobytes() == words.tobytes() and file.words(1).tobytes() == words[:1].tobytes()
    back = torch.from_numpy(file.words(0).view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(back.view(torch.int16), states.view(torch.int16))
    assert np.array_equal(file.read(0), states.float().numpy())
    schema = pa.ipc.open_file(str(file.path)).schema
    assert schema.metadata == {b"format": b"bf16", b"dtype": b"bfloat16", b"shape": b"[2, 4]"}
    assert schema.field("states").type == pa.binary(2 * 4 * 2)


@pytest.mark.parametrize("states_format", ["bf16", "int8"])
@pytest.mark.parametrize("limit", [1 << 16, 20_000])
def test_a_file_ends_below_its_bound_and_a_row_that_alone_passes_it_has_one_to_itself(tmp_path, states_format, limit):
    lengths = [
        90,
        90,
        90,
        90,
        4000,
        90,
        90,
        90,
    ]  # 7 rows that pass the smaller bound together, and one that alone passes both
    rows = [random_words(n, layers=5, hidden=8, seed=i) for i, n in enumerate(lengths)]
    with shards(tmp_path, layers=5, hidden=8, states_format=states_format, shard_bytes=limit) as sink:
        where = [sink.add(f"row-{i}", words, num_states=len(words)) for i, words in enumerate(rows)]
        part = commit_part(tmp_path, 3, sink.files())
    big = where[4]
    assert [w.states_file for w in where].count(big.states_file) == 1 and big.states_batch == 0
    for shard in part.shards:
        assert shard.bytes <= limit or shard.path == big.states_file
        assert hashlib.sha256((tmp_path / shard.path).read_bytes()).hexdigest() == shard.sha256
        assert len(StatesFile(tmp_path / shard.path)) == shard.rows
    assert sum(shard.rows for shard in part.shards) == len(rows)
    if states_format == "bf16":
        names = [shard.path for shard in part.shards]
        assert names == [f"states-00003-{n:02d}.arrow" for n in range(len(names))] and len(names) > 2
        for captured, words in zip(where, rows, strict=True):
            found = StatesFile(tmp_path / captured.states_file).words(captured.states_batch)
            assert found.tobytes() == words.tobytes()
        # Another row would not have fitted: files are not cut short without need.
        row_bytes = 90 * 5 * 8 * 2
        followed = [s for s, after in zip(part.shards, part.shards[1:], strict=False) if after.path != big.states_file]
        assert all(s.bytes + row_bytes > limit for s in followed)


def test_what_is_not_committed_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), shards(tmp_path, shard_bytes=3000) as sink:
        for n in range(5):
            sink.add(f"row-{n}", random_words(60, seed=n), num_states=60)
        assert len(os.listdir(tmp_path)) > 1
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_no_rows_make_no_files_and_none_can_be_added_to_files_that_were_handed_over(tmp_path):
    with shards(tmp_path) as sink:
        assert sink.files() == {}
        with pytest.raises(StageError, match="row late came after"):
            sink.add("late", random_words(3), num_states=3)


def test_two_writers_of_one_part_do_not_mix(tmp_path):
    """An engine that was taken for dead, and the one that did its part again."""
    with shards(tmp_path) as first, shards(tmp_path) as second:
        first.add("a", random_words(5, seed=1), num_states=5)
        second.add("a", random_words(5, seed=2), num_states=5)
        kept = commit_part(tmp_path, 3, second.files())
        assert commit_part(tmp_path, 3, first.files()) == kept
    assert StatesFile(tmp_path / "states-00003-00.arrow").words(0).tobytes() == random_words(5, seed=2).tobytes()
    assert PartWriter(tmp_path).is_done(3)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".arrow", ".json", ".lock"]


_KILLED = """
import sys, time
from pathlib import Path
from tests.pipeline.test_states import random_words, shards
folder = Path(sys.argv[1])
with shards(folder, hidden=64, shard_bytes=30_000) as sink:
    for n in range(4):
        sink.add(f"row-{n}", random_words(80, hidden=64, seed=n), num_states=80)
    sink._writer._file.flush()  # the second file is half written
    (folder.parent / "writing").touch()
    time.sleep(600)
"""


def test_a_kill_amid_a_file_leaves_nothing_that_counts_and_the_part_is_made_again(tmp_path):
    folder = tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(folder)], cwd=Path(__file__).resolve().parents[2])
    deadline = time.monotonic() + 120
    while not (tmp_path / "writing").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = list(folder.iterdir())
    assert len(left) > 1 and all(path.name.startswith(".") and path.stat().st_size for path in left)
    assert not PartWriter(folder).is_done(3)
    assert [path.name for path in folder.iterdir()] == ["part-commits.lock"]
    with shards(folder, hidden=64, shard_bytes=30_000) as sink:
        where = [sink.add(f"row-{n}", random_words(80, hidden=64, seed=n), num_states=80) for n in range(4)]
        commit_part(folder, 3, sink.files())
    for n, captured in enumerate(where):
        words = StatesFile(folder / captured.states_file).words(captured.states_batch)
        assert words.tobytes() == random_words(80, hidden=64, seed=n).tobytes()


def test_a_full_disk_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(StateShards, "_temporary", lambda self, number: Path("/dev/full"))
    sink = shards(tmp_path, layers=5, hidden=64)
    with pytest.raises(StageError, match=r"no space left.*int8"):
        for n in range(20):
            sink.add(f"row-{n}", random_words(500, layers=5, hidden=64, seed=n), num_states=500)


def test_a_cut_or_empty_states_file_is_refused(tmp_path):
    write_file(tmp_path / "s.arrow", [np.ones((3, 2, 4), np.uint16)])
    whole = (tmp_path / "s.arrow").read_bytes()
    for cut in (0, len(whole) // 2, len(whole) - 1):
        (tmp_path / "s.arrow").write_bytes(whole[:cut])
        with pytest.raises(SchemaError, match="not a whole Arrow file"):
            StatesFile(tmp_path / "s.arrow")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "s.arrow")
    with pytest.raises(SchemaError, match="not a whole Arrow file"):
        StatesFile(tmp_path / "s.arrow")


@pytest.mark.parametrize("metadata", [None, {"format": "fp4", "shape": "[2, 4]"}])
def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path, metadata):
    schema = pa.schema([("states", pa.binary(16))], metadata=metadata)
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema):
        pass
    with pytest.raises(SchemaError, match=r"format ('fp4'|None), this Slipstream reads bf16, int8"):
        StatesFile(tmp_path / "s.arrow")


def test_a_file_is_not_read_as_what_it_is_not(tmp_path):
    write_file(tmp_path / "s.arrow", [random_words(3)], "int8")
    with pytest.raises(SchemaError, match="format int8, read as bf16"):
        StatesFile(tmp_path / "s.arrow").words(0)
    with pytest.raises(SchemaError, match="no record batch 1, there are 1"):
        StatesFile(tmp_path / "s.arrow").codes(1)
    with pytest.raises(SchemaError, match=r"expected uint16 words \[n, 2, 4\], n > 0"):
        write_file(tmp_path / "t.arrow", [random_words(3), random_words(3, hidden=5)])


def test_mapped_rows_are_not_copies_and_cannot_be_written(tmp_path):
    write_file(tmp_path / "s.arrow", [random_words(300, hidden=64)])
    words = StatesFile(tmp_path / "s.arrow").words(0)
    assert not words.flags.writeable and not words.flags.owndata


def test_what_was_read_stays_no_part_of_the_process(tmp_path):
    one = random_words(4000, layers=4, hidden=512)  # 16 MB
    write_file(tmp_path / "s.arrow", [one])
    file = StatesFile(tmp_path / "s.arrow")
    words, copied = file.words(0), one[:1000].copy()
    before = resident("RssFile")
    assert np.array_equal(words, one)
    assert resident("RssFile") - before > 12e6
    file.leave(words, copied)
    assert resident("RssFile") - before < 4e6
    assert np.array_equal(words, one) and np.array_equal(copied, one[:1000])


@pytest.mark.parametrize("states_format", ["bf16", "int8"])
def test_a_digest_is_of_the_last_position_and_the_same_when_read_again(tmp_path, states_format):
    one = random_words(9, seed=1)
    early, late = one.copy(), one.copy()
    early[0, 0, 0] ^= 0x40
    late[-1, -1, -1] ^= 0x40
    with shards(tmp_path, states_format=states_format) as sink:
        captured = [sink.add(str(n), words, num_states=9) for n, words in enumerate((one, early, late))]
        commit_part(tmp_path, 3, sink.files())
    digests = [c.digest for c in captured]
    assert digests[0] == digests[1] != digests[2]
    file = StatesFile(tmp_path / captured[0].states_file)
    assert [file.digest(c.states_batch) for c in captured] == digests


def test_a_faulty_row_is_not_written_and_says_why(tmp_path):
    with shards(tmp_path) as sink:
        fault = sink.add("bad", random_words(4) * 0, num_states=4)
        assert (fault.reason, fault.states_file, fault.states_batch) == ("zero_states", "", -1)
        assert sink.add("good", random_words(4), num_states=4).states_batch == 0
        assert [rows for rows, _ in sink.files().values()] == [1]
