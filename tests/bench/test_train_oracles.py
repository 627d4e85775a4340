"""The trainer's bench oracles on toys: a run that was killed and gone on with, and two workers of uneven rows."""

import sys
from pathlib import Path

import pytest

from bench.oracles import resumed_runs
from bench.oracles.resumed_runs import resumed_at_random_steps
from bench.oracles.two_workers import uneven_workers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "drafter"))

import toys


@pytest.fixture
def site(tmp_path):
    toys.target_folder(tmp_path / "target")
    rows = [("train", toys.counting_row(3 * i, 18 + 7 * i, 3)) for i in range(7)]
    rows += [("validation", toys.counting_row(5 * i + 1, 20, 4)) for i in range(2)]
    settings = {"steps": 12, "checkpoint_every": 3, "anchors": "on_policy", "patience": None, "compute": "float32"}
    return tmp_path, toys.config(tmp_path, **settings), toys.cache(tmp_path, rows)


def test_a_run_killed_at_a_random_step_is_found_identical_and_a_tampered_one_is_not(site, monkeypatch):
    root, config, states = site
    found = resumed_at_random_steps(root / "runs", config, states, count=1, seed=3)
    assert found["n"] == 1 and 1 <= found["killed_at_steps"][0] < 12
    assert found["different_tensors"] == found["different_curves"] == 0 < found["tensors"]
    # the same runs, of which the killed one goes on from another place
    ends = resumed_runs._end_of
    tensors, curve = ends(root / "runs" / "killed-0")
    name = next(name for name in tensors if name.startswith("optimizer/"))
    tampered = {**tensors, name: tensors[name] + 1e-6}
    monkeypatch.setattr(
        resumed_runs, "_end_of", lambda folder: (tampered, curve) if "killed" in folder.name else ends(folder)
    )
    monkeypatch.setattr(resumed_runs, "_uninterrupted", lambda *a: 1.0)
    monkeypatch.setattr(resumed_runs, "_try", lambda *a: -9 if len(a) > 3 else 0)
    assert resumed_at_random_steps(root / "runs", config, states, count=1, seed=3)["different_tensors"] == 1


def test_workers_with_uneven_rows_finish_with_equal_steps(site):
    root, config, states = site
    found = uneven_workers(root / "workers", config, states)
    for parallel in ("ddp", "fsdp"):
        assert found[parallel]["finished"] == 2
        assert found[parallel]["steps"] == [12, 12]
        assert len(set(found[parallel]["empty_steps"])) == 1
        assert found[parallel]["largest_difference"] < 1e-4
