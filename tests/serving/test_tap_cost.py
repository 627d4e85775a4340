"""The bench's own arithmetic: a ratio that is known comes out, with an interval that holds it."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))
from bench.oracles.tap_cost import Gaps, chunk_cost, ratio_of, ratio_of_medians


def blocks(scale, *, seed, pairs=12):
    draw = np.random.default_rng(seed)
    drift = np.random.default_rng(99).uniform(0.8, 1.2, size=pairs)  # of the machine: the same on both sides of a pair
    return [list(scale * slow * draw.gamma(20, 1 / 20, size=400)) for slow in drift]


@pytest.mark.parametrize("scale", [1.0, 1.1])
@pytest.mark.parametrize("compare", [ratio_of_medians, lambda gaps: ratio_of(gaps, 99)], ids=["median", "p99"])
def test_a_known_slowdown_is_found_and_lies_in_its_interval(scale, compare):
    low, ratio, high = compare(Gaps(off=blocks(1.0, seed=1), on=blocks(scale, seed=2)))
    assert low < ratio < high
    assert ratio == pytest.approx(scale, rel=0.05)
    assert low <= scale * 1.02 and high >= scale * 0.98


def test_equal_blocks_are_a_ratio_of_one_without_width():
    same = blocks(1.0, seed=1)
    assert ratio_of(Gaps(off=same, on=same), 99) == ratio_of_medians(Gaps(off=same, on=same)) == (1.0, 1.0, 1.0)


def test_the_cost_of_a_chunk_is_printed_by_where_it_falls(tmp_path):
    figures = chunk_cost(tmp_path, chunks=20, exchanges=3, rounds=2)
    names = {"tap_cost.loop_us_per_chunk", "tap_cost.thread_us_per_chunk", "tap_cost.process_us_per_chunk"}
    assert set(figures) == names and all(figure["met"] is None for figure in figures.values())
    lines = [line for path in (tmp_path / "chunks").glob("*.jsonl") for line in path.read_bytes().splitlines()]
    assert len(lines) == 3 * 3, "every tapped exchange was written: the cost is the whole cost"
