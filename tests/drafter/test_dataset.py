import mmap
import os

import pytest
import torch
import toys

from drafter.dataset import CachedRow, collate, read_rows
from pipeline.errors import SchemaError


def test_rows_come_back_bit_for_bit_in_stored_order_and_by_split(tmp_path):
    rows = [toys.row(9 + i, 3, seed=i, slice="ab"[i % 2]) for i in range(4)]
    splits = ["train", "gate", "train", "validation"]
    cache = toys.cache(tmp_path, list(zip(splits, rows, strict=True)))
    found = read_rows(cache, "train")
    assert [row.row_id for row in found] == ["row-0", "row-2"]
    for a, b in zip(found, (rows[0], rows[2]), strict=True):
        assert torch.equal(a.ids, b.ids) and a.num_prompt_tokens == 3 and a.slice == b.slice
        assert torch.equal(a.states.view(torch.int16), b.states.view(torch.int16))
    assert [row.row_id for row in read_rows(cache, "validation")] == ["row-3"]


def test_bfloat16_values_that_float16_cannot_hold_survive(tmp_path):
    values = torch.tensor([1.0, 3.0e38, 1e-39, -0.0, -1e-40, 0.1]).to(torch.bfloat16)
    words = values.view(torch.int16).tolist()
    assert words[3] == -(1 << 15), "negative zero"
    assert words[2] != 0, "subnormal"
    row = CachedRow("r", "s", torch.arange(3), 1, values.repeat(2, 5))
    (found,) = read_rows(toys.cache(tmp_path, [("train", row)]), "train")
    assert found.states.dtype == torch.bfloat16
    assert found.states.view(torch.int16).tolist() == [words * 5] * 2


def test_states_are_the_mapped_file_and_not_a_copy(tmp_path):
    rows = [("train", toys.row(2000, 3, seed=i, width=300)) for i in range(3)]
    cache = toys.cache(tmp_path, rows)
    found = read_rows(cache, "train")
    mapped = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("states-00000.arrow"):
                low, high = (int(x, 16) for x in line.split()[0].split("-"))
                mapped.append((low, high))
    assert mapped and os.path.getsize(cache.folder / "states-00000.arrow") > mmap.PAGESIZE
    for row in found:
        assert any(low <= row.states.data_ptr() < high for low, high in mapped), row.row_id


def test_a_state_that_is_not_finite_is_refused_by_the_rows_name():
    rows = [toys.row(12, 3, seed=i) for i in range(3)]
    for bad in (float("nan"), float("inf")):
        rows[1].states[4, 7] = bad
        with pytest.raises(SchemaError, match="row-1"):
            collate(rows, [torch.tensor([8])] * 3, 4, torch.float32)


@pytest.mark.parametrize("changes", [{"num_states": 7}, {"ids": [1, 2, 3]}])
def test_a_table_that_does_not_fit_the_states_is_refused(tmp_path, changes):
    cache = toys.cache(tmp_path, [("train", toys.row(12, 3))], **changes)
    with pytest.raises(SchemaError, match="row-0 has 11 states"):
        read_rows(cache, "train")


def test_a_batch_pads_rows_and_marks_what_is_real():
    rows = [toys.row(12, 3, seed=1), toys.row(30, 4, seed=2), toys.row(9, 2, seed=3)]
    anchors = [torch.tensor([3, 8]), torch.tensor([20]), torch.empty(0, dtype=torch.int64)]
    batch = collate(rows, anchors, 4, torch.float32)
    assert batch.states.shape == (3, 20, 30) and batch.is_real.tolist() == [[True, True], [True, False], [False, False]]
    assert torch.equal(batch.states[0, :11], rows[0].states.float()) and not batch.states[0, 11:].any()
    assert batch.anchor_ids[0].tolist() == rows[0].ids[[3, 8]].tolist()
    assert batch.labels[1, 0].tolist() == rows[1].ids[21:24].tolist()
    assert batch.num_blocks == 3
