import mmap
import os
import resource
import shutil
import time

import pytest
import torch
import toys

from drafter.dataset import WINDOW_BYTES, CachedRow, read_part, read_rows, shard_sizes, staging_of, window_rows
from drafter.deal import Deal
from drafter.disk_states import OPEN_FILES, DiskStates, unpack
from drafter.packing import pack
from pipeline.artifacts import commit
from pipeline.disk import sweep
from pipeline.errors import SchemaError
from pipeline.stages import Artifact
from pipeline.storage import move_part


def numbers(row, end=None):
    """A row's states as a batch gets them, float32 [end, F]."""
    states = row.states[: len(row.states) if end is None else end]
    into = torch.full((len(states), states.shape[1]), float("nan"))
    states.copy_into(into)
    return into


def packed(rows, anchors):
    """These rows as a pass in float32 gets them, with blocks of 4."""
    return pack([Deal(row, some, 1.0) for row, some in zip(rows, anchors, strict=True)], 4, torch.float32)


def files_mapped(folder):
    """Addresses of each states file of a folder that this process maps."""
    found = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip().split(maxsplit=5)[-1]
            if path.startswith(str(folder)) and path.split(" ")[0].endswith(".arrow"):
                low, high = (int(x, 16) for x in line.split()[0].split("-"))
                found.setdefault(os.path.basename(path.split(" ")[0]), []).append((low, high))
    return found


def test_rows_come_back_bit_for_bit_in_stored_order_and_by_split(tmp_path):
    rows = [toys.row(9 + i, 3, seed=i, slice="ab"[i % 2]) for i in range(4)]
    splits = ["train", "gate", "train", "validation"]
    cache = toys.cache(tmp_path, list(zip(splits, rows, strict=True)))
    found = read_rows(cache, "train")
    assert [row.row_id for row in found] == ["row-0", "row-2"]
    for a, b in zip(found, (rows[0], rows[2]), strict=True):
        assert torch.equal(a.ids, b.ids) and a.num_prompt_tokens == 3 and a.slice == b.slice
        assert torch.equal(a.states.mapped().view(torch.int16), b.states.view(torch.int16))
        assert torch.equal(numbers(a), b.states.float())
    assert [row.row_id for row in read_rows(cache, "validation")] == ["row-3"]


def test_a_part_is_read_before_there_is_a_manifest(tmp_path):
    rows = [toys.row(9 + i, 3, seed=i) for i in range(3)]
    cache = toys.cache(tmp_path, [("train", rows[0]), ("gate", rows[1]), ("train", rows[2])])
    (cache.folder / "manifest.json").unlink()
    found = read_part(cache.folder, 0)
    assert [row.row_id for row in found] == ["row-0", "row-1", "row-2"]
    assert all(torch.equal(numbers(a), b.states.float()) for a, b in zip(found, rows, strict=True))


def test_bfloat16_values_that_float16_cannot_hold_survive(tmp_path):
    values = torch.tensor([1.0, 3.0e38, 1e-39, -0.0, -1e-40, 0.1]).to(torch.bfloat16)
    words = values.view(torch.int16).tolist()
    assert words[3] == -(1 << 15), "negative zero"
    assert words[2] != 0, "subnormal"
    row = CachedRow("r", "s", torch.arange(3), 1, values.repeat(2, 5))
    (found,) = read_rows(toys.cache(tmp_path, [("train", row)]), "train")
    assert found.states.mapped().view(torch.int16).tolist() == [words * 5] * 2
    into = torch.zeros(2, 30, dtype=torch.bfloat16)
    found.states.copy_into(into)
    assert into.view(torch.int16).tolist() == [words * 5] * 2


def test_states_are_the_mapped_file_and_not_a_copy(tmp_path):
    rows = [("train", toys.row(2000, 3, seed=i, width=300)) for i in range(3)]
    cache = toys.cache(tmp_path, rows)
    (name,) = [shard.path for shard in cache.manifest.shards if shard.path.endswith(".arrow")]
    assert os.path.getsize(cache.folder / name) > mmap.PAGESIZE
    found = read_rows(cache, "train")
    assert not files_mapped(cache.folder), "nothing is opened before it is asked for"
    for row in found:
        address = row.states.mapped().data_ptr()
        assert any(low <= address < high for low, high in files_mapped(cache.folder)[name]), row.row_id


def test_a_cache_of_more_files_than_may_be_open_is_read(tmp_path):
    rows = [toys.row(20, 3, seed=i) for i in range(3 * OPEN_FILES)]
    cache = toys.cache(tmp_path, [("train", row) for row in rows], shard_bytes=1)
    found = read_rows(cache, "train")
    assert len({row.states.name for row in found}) == len(rows)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + OPEN_FILES + 8, hard))
        for a, b in zip(found, rows, strict=True):
            assert torch.equal(numbers(a), b.states.float())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(files_mapped(cache.folder)) <= OPEN_FILES


def test_removed_files_give_up_their_bytes_when_the_last_row_goes(tmp_path):
    cache = toys.cache(tmp_path, [("train", toys.row(2000, 3, width=300))])
    rows = read_part(cache.folder, 0)
    numbers(rows[0])
    shutil.rmtree(cache.folder)
    assert files_mapped(cache.folder)
    del rows
    assert not files_mapped(cache.folder)


@pytest.mark.parametrize("hidden", [10, 64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_8_bit_form_comes_out_as_codes_times_scales_of_the_positions_asked_for(tmp_path, hidden, dtype):
    row = toys.row(40, 3, width=3 * hidden)
    (found,) = read_rows(toys.cache(tmp_path, [("train", row)], states_format="int8"), "train")
    codes, scales = found.states.files.open(found.states.name).codes(0)
    steps = torch.from_numpy(scales.view("int16").copy()).view(torch.bfloat16).double()
    into = torch.full((17, 3 * hidden), 99.0, dtype=dtype)
    found.states[:17].copy_into(into)
    for position, layer, channel in [(0, 0, 0), (16, 2, hidden - 1), (5, 1, min(64, hidden - 1)), (9, 2, hidden // 2)]:
        expected = float(codes[position, layer, channel]) * float(steps[position, layer, channel // 64])
        got = into[position, layer * hidden + channel].item()
        assert got == torch.tensor(expected, dtype=torch.float32).to(dtype).item()
    error = (into.float() - row.states[:17].float()).norm() / row.states[:17].float().norm()
    assert error < 0.012
    with pytest.raises(SchemaError, match="int8, read as bf16"):
        found.states.mapped()


def test_both_forms_are_packed_the_same_but_for_rounding(tmp_path):
    rows = [toys.row(30 + i, 4, seed=i) for i in range(3)]
    anchors = [torch.tensor([5, 20]), torch.empty(0, dtype=torch.int64), torch.tensor([9])]
    batches = {}
    for form in ("bf16", "int8"):
        cache = toys.cache(tmp_path / form, [("train", row) for row in rows], states_format=form)
        batches[form] = packed(read_rows(cache, "train"), anchors)
    memory = packed(rows, anchors)
    assert torch.equal(batches["bf16"].states, memory.states)
    assert batches["int8"].states.shape == memory.states.shape
    assert 0 < (batches["int8"].states - memory.states).norm() / memory.states.norm() < 0.012
    for name in ("anchors", "anchor_ids", "labels", "weights"):
        assert torch.equal(getattr(batches["int8"], name), getattr(memory, name))


def test_a_cut_row_reads_what_is_left_of_it(tmp_path):
    (found,) = read_rows(toys.cache(tmp_path, [("train", toys.row(12, 3))]), "train")
    assert len(found.states) == 11 and found.states.shape == (11, 30)
    cut = found.states[:7]
    assert isinstance(cut, DiskStates) and cut.shape == (7, 30) and len(cut[:100]) == 7
    assert torch.equal(cut.mapped(), found.states.mapped()[:7])
    with pytest.raises(IndexError, match="first position"):
        found.states[2:]


def test_a_state_that_is_not_finite_is_refused_by_the_rows_name(tmp_path):
    rows = [toys.row(12, 3, seed=i) for i in range(3)]
    for bad in (float("nan"), float("inf")):
        rows[1].states[4, 7] = bad
        with pytest.raises(SchemaError, match="row-1"):
            packed(rows, [torch.tensor([8])] * 3)
    # And so is one that went bad on disk, after capture had judged it.
    cache = toys.cache(tmp_path, [("train", toys.row(12, 3, seed=i)) for i in range(2)])
    path = cache.folder / "states-00000-00.arrow"
    body = path.read_bytes()
    word = toys.row(12, 3, seed=1).states[4].view(torch.int16).numpy().tobytes()
    assert body.count(word) == 1
    path.write_bytes(body.replace(word, b"\x80\x7f" + word[2:]))
    with pytest.raises(SchemaError, match=r"rows \['row-1'\]: cached states are not finite"):
        packed(read_rows(cache, "train"), [torch.tensor([8])] * 2)


@pytest.mark.parametrize("changes", [{"num_states": 7}, {"ids": [1, 2, 3]}])
def test_a_table_that_does_not_fit_its_ids_is_refused_at_once(tmp_path, changes):
    cache = toys.cache(tmp_path, [("train", toys.row(12, 3))], **changes)
    with pytest.raises(SchemaError, match=r"row row-0 has (11|7) states and (3|12) ids"):
        read_rows(cache, "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_states": 7, "ids": list(range(8))}, "has 11 states, 7 in the table"),
        ({"states_batch": 4}, "no record batch 4, there are 1"),
        ({"states_file": "states-00009-00.arrow"}, "not among the recorded files"),
        ({"states_file": "../../elsewhere.arrow"}, "not among the recorded files"),
    ],
)
def test_a_table_that_does_not_fit_the_states_is_refused_when_they_are_read(tmp_path, changes, message):
    cache = toys.cache(tmp_path, [("train", toys.row(12, 3))], **changes)
    with pytest.raises(SchemaError, match=message):
        packed(read_rows(cache, "train"), [torch.tensor([4])])


@pytest.mark.parametrize("keep", [0, 100, None], ids=["zero bytes", "cut", "gone"])
def test_a_states_file_that_is_not_what_was_committed_is_refused_at_once(tmp_path, keep):
    cache = toys.cache(tmp_path, [("train", toys.row(12, 3))])
    path = cache.folder / "states-00000-00.arrow"
    body = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(body[:keep])
    with pytest.raises(SchemaError, match=rf"{path.name}: {keep} bytes, {len(body)} are recorded"):
        read_rows(cache, "train")


def test_states_that_are_on_storage_are_staged_within_the_budget_as_batches_need_them(tmp_path):
    rows = [toys.row(50, 3, seed=i) for i in range(6)]
    cache = toys.cache(tmp_path / "root", [("train", row) for row in rows], shard_bytes=1)
    (tmp_path / "bucket").mkdir()
    uri = f"file://{tmp_path}/bucket"
    move_part(cache.folder, 0, uri)
    commit(cache.folder, cache.manifest.model_copy(update={"storage": uri}))
    moved = Artifact(cache.folder, cache.manifest.model_copy(update={"storage": uri}))
    largest = max(shard.bytes for shard in cache.manifest.shards)
    found = read_rows(moved, "train", staging_bytes=2 * largest)
    for start in (0, 3, 0):
        batch = packed(found[start : start + 3], [torch.tensor([40])] * 3)
        expected = packed(rows[start : start + 3], [torch.tensor([40])] * 3)
        assert torch.equal(batch.states, expected.states)
        staged = list((tmp_path / "root" / "staged").iterdir())
        assert 0 < sum(path.stat().st_size for path in staged) <= 2 * largest
    assert staging_of(found).num_stalls > 6, "the budget holds two files, and one was needed again"
    assert window_rows(found) == 1, "half the budget is one file, of one row"
    staging_of(found).ahead([found[5].states.name])
    deadline = time.monotonic() + 30
    while not list((tmp_path / "root" / "staged").glob(f"*{found[5].states.name}")) and time.monotonic() < deadline:
        time.sleep(0.02)
    stalls = staging_of(found).num_stalls
    assert torch.equal(numbers(found[5]), rows[5].states.float()) and staging_of(found).num_stalls == stalls


def test_rows_of_one_file_are_told_to_the_order_together(tmp_path):
    rows = [("train", toys.row(50, 3, seed=i)) for i in range(5)]
    file_bytes = 2 * 49 * 30 * 2 + 2000
    cache = toys.cache(tmp_path, rows, shard_bytes=file_bytes)
    found = read_rows(cache, "train")
    assert shard_sizes(found) == [2, 2, 1]
    assert shard_sizes([found[0], found[2], found[3]]) == [1, 2]
    assert shard_sizes([row for _, row in rows]) == [5] and shard_sizes([]) == []
    assert window_rows([row for _, row in rows]) == 5 and staging_of(found) is None
    assert window_rows(found) * file_bytes / 2 == pytest.approx(WINDOW_BYTES, rel=0.2)


def test_unpacking_writes_into_a_slice_of_a_batch():
    codes = torch.randint(-127, 128, (4, 2, 70), dtype=torch.int8)
    scales = torch.rand(4, 2, 2).to(torch.bfloat16)
    batch = torch.zeros(2, 9, 140)
    unpack(codes, scales, 64, batch[1, :4])
    assert not batch[0].any() and not batch[1, 4:].any()
    assert batch[1, 3, 70 + 65].item() == pytest.approx(codes[3, 1, 65].item() * scales[3, 1, 1].float().item())


def test_a_cache_stays_for_as_long_as_its_rows_are_held(tmp_path):
    cache = toys.cache(tmp_path, [("train", toys.row(12, 3))])
    rows = read_rows(cache, "train")
    assert sweep(tmp_path, max_bytes=1, ttl_hours=None) == []
    assert torch.equal(numbers(rows[0]), toys.row(12, 3).states.float())
    del rows
    assert sweep(tmp_path, max_bytes=1, ttl_hours=None) == ["cache"]
    with pytest.raises(SchemaError, match="removed meanwhile"):
        read_rows(cache, "train")
