"""Runs in two processes on gloo end as one process's, whatever each has to do, and nobody waits for ever."""

import shutil

import pytest
import torch
from two_processes import Case, result, run_together, train_case

FSDP = {"parallel": "fsdp"}
SPLIT = {"tokens_per_pass": 24}  # a process with more tokens goes forward more often than the other

# Every case runs once in one process and once in two; one start of two processes serves them all.
SAME = [
    Case("rows for both"),
    Case("uneven rows", rows="uneven"),
    Case("a row a step", {"blocks_per_step": 4}, rows="uneven"),  # the second process never has anything to do
    Case("several passes", SPLIT, rows="uneven"),
    Case("matrices in turns", {"muon_turns": 3}),
    Case("sharded", FSDP),
    Case("sharded, uneven rows", FSDP, rows="uneven"),
    Case("sharded, a row a step", FSDP | {"blocks_per_step": 4}, rows="uneven"),
    Case("sharded, several passes", FSDP | SPLIT, rows="uneven"),
    Case("sharded, layers computed again", FSDP | {"activation_checkpointing": True}, rows="uneven"),
    Case("sharded, matrices in turns", FSDP | {"muon_turns": 3}, rows="uneven"),
    Case("sharded, adamw", FSDP | {"optimizer": "adamw"}),
    Case("in float32", rows="uneven", dtype="float32"),
    Case("sharded, in float32", FSDP, rows="uneven", dtype="float32"),
]
STRAIGHT = SAME[1]


def going_on(name, killed, settings):
    return Case(name, settings, rows="uneven", goes_on_from=f"{name} from {killed}")


KILLED = [Case("killed", rows="uneven", killed_after=3), Case("killed sharded", FSDP, rows="uneven", killed_after=3)]
RESUMED = [
    Case("replicated to sharded", FSDP, rows="uneven", goes_on_from="copy of killed to sharded"),
    Case("sharded to replicated", rows="uneven", goes_on_from="copy of killed sharded to replicated"),
    Case("replicated to replicated", rows="uneven", goes_on_from="copy of killed to replicated"),
]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder in which two processes have run every case, interrupted ones first."""
    root = tmp_path_factory.mktemp("together")
    (root / "first").mkdir()
    run_together(root / "first", [*SAME, *KILLED])
    for killed, to in (("killed", "sharded"), ("killed sharded", "replicated"), ("killed", "replicated")):
        shutil.copytree(root / "first" / f"{killed}-2", root / "second" / f"copy of {killed} to {to}")
    run_together(root / "second", RESUMED)
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process ends with, by case."""
    root = tmp_path_factory.mktemp("alone")
    return {case.name: train_case(case, root) for case in SAME}


def require_same(two, one, *, within=1e-9):
    assert two["step"] == one["step"] == 5
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).abs().max() < within, name
    for a, b in zip(one["curve"], two["curve"], strict=True):
        for key in ("step", "loss", "slot1_accuracy", "slot3_accuracy", "walk_acceptance_length", "gradient_norm"):
            assert (key in a) == (key in b)  # step 0 has no loss
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=within, abs=1e-6), key


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_two_processes_train_as_one(case, together, alone):
    for rank in (0, 1):
        within = 1e-9 if case.dtype == "float64" else 1e-5
        require_same(result(together / "first", case, rank), alone[case.name], within=within)


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_both_take_as_many_steps_and_an_empty_one_counts_once(case, together, alone):
    found = [result(together / "first", case, rank) for rank in (0, 1)]
    assert found[0]["steps_taken"] == found[1]["steps_taken"] == alone[case.name]["steps_taken"]
    assert found[0]["num_empty"] == found[1]["num_empty"] == alone[case.name]["num_empty"]
    assert found[0]["steps_taken"] + found[0]["num_empty"] == 5


def test_a_step_of_rows_without_room_is_empty_and_everyone_skips_it(alone):
    # one row a step and seven rows, two of them without a block: some of the five steps have nothing
    assert alone["a row a step"]["num_empty"] > 0


def test_each_process_holds_half_of_every_parameter_when_sharded(together):
    whole, *halves = (
        result(together / "first", Case(name), rank)["rows_held"]
        for name, rank in (("rows for both", 0), ("sharded", 0), ("sharded", 1))
    )
    for name, rows in whole.items():
        assert halves[0][name] == -(-rows // 2) and halves[0][name] + halves[1][name] == rows


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_a_run_goes_on_with_another_way_to_share_the_work(case, together, alone):
    for rank in (0, 1):
        found = result(together / "second", case, rank)
        assert found["steps_taken"] < alone[STRAIGHT.name]["steps_taken"], "it began anew"
        require_same(found, alone[STRAIGHT.name])


@pytest.mark.parametrize("killed", ["killed", "killed sharded"])
def test_a_run_of_two_goes_on_in_one(killed, together, alone, tmp_path):
    shutil.copytree(together / "first" / f"{killed}-2", tmp_path / "copy")
    found = train_case(Case("in one", rows="uneven", goes_on_from="copy"), tmp_path)
    assert found["steps_taken"] < alone[STRAIGHT.name]["steps_taken"], "it began anew"
    require_same(found, alone[STRAIGHT.name])


def test_what_is_saved_is_whole_and_does_not_tell_how_it_was_shared(together):
    a, b = (
        torch.load(together / "first" / f"{name}-2" / "resume.pt", weights_only=True)
        for name in ("killed", "killed sharded")
    )
    assert a["optimizer"].keys() == b["optimizer"].keys()
    for name, states in a["optimizer"].items():
        for key, value in states.items():
            assert (b["optimizer"][name][key] - value).abs().max() < 1e-9, (name, key)
