"""A sweep of learning rates: what is run, what is kept of it, and what it advises."""

import pytest
import toys

from drafter import sweep, train
from drafter.optim import Optimizer
from pipeline.artifacts import SweepReport, verify
from pipeline.config import Config
from pipeline.errors import StageError


def point(rate, accepted, **changes):
    return {
        "learning_rate": rate,
        "diverged": False,
        "loss": 1.0,
        "accepted_per_step": accepted,
        "best_step": 9,
    } | changes


def report(points, start, best):
    return SweepReport(
        derivation_id="s", parents={}, points=points, start_accepted_per_step=start, best_learning_rate=best
    )


def test_each_rate_has_a_run_of_its_own_whole_schedule(tmp_path):
    base = toys.config(tmp_path, steps=400, checkpoint_every=100).model_dump()
    config = Config.model_validate(base | {"sweep": {"learning_rates": [2e-3, 5e-4, 2e-3], "steps": 60}})
    found = sweep.trials(config)
    assert list(found) == [5e-4, 2e-3]
    for rate, one in found.items():
        assert (one.train.learning_rate, one.train.steps, one.train.checkpoint_every) == (rate, 60, 60)


@pytest.mark.parametrize(
    ("accepted", "start", "best", "words"),
    [
        ([0.8, 1.2, 1.0], 0.7, 1e-3, ["learning_rate = 0.001"]),
        ([1.3, 1.2, 1.0], 0.7, 5e-4, ["learning_rate = 0.0005", "lowest rate of the sweep", "0.00025"]),
        ([0.8, 0.9, 1.0], 0.7, 2e-3, ["learning_rate = 0.002", "highest rate of the sweep", "0.004"]),
        ([0.6, 0.7, 0.5], 0.7, None, ["No rate came above the drafter that all runs start from"]),
    ],
    ids=["inside", "at the low edge", "at the high edge", "none"],
)
def test_the_advice_names_the_rate_to_set_and_warns_at_the_edges(accepted, start, best, words):
    points = [point(rate, value) for rate, value in zip((5e-4, 1e-3, 2e-3), accepted, strict=True)]
    said = "\n".join(sweep.advice(report(points, start, best)))
    assert all(word in said for word in words) and ("edge" in said or "Sweep again" in said) == (len(words) == 3)


def test_a_highest_rate_is_no_edge_where_one_above_it_diverged():
    points = [point(5e-4, 0.8), point(1e-3, 1.2), {"learning_rate": 1.0, "diverged": True}]
    assert sweep.advice(report(points, 0.7, 1e-3)) == ["Set it in [train]:  learning_rate = 0.001"]


def test_a_sweep_in_which_every_rate_diverged_says_so(tmp_path):
    with pytest.raises(StageError, match=r"diverged at every rate \(0\.5, 1\).*lower sweep\.learning_rates"):
        sweep.run(toys.config(tmp_path), {1.0: None, 0.5: None})


def test_a_sweep_that_was_interrupted_goes_on_and_is_judged_by_the_walk(tmp_path, monkeypatch):
    toys.target_folder(tmp_path / "target")
    rows = [("train", toys.counting_row(3 * i, 18 + i, 3)) for i in range(6)]
    rows += [("validation", toys.counting_row(5 * i + 1, 20, 4)) for i in range(3)]
    states = toys.cache(tmp_path, rows)
    settings = {"steps": 25, "checkpoint_every": 25, "learning_rate": 0.05}
    start = train.run(toys.config(tmp_path, **settings), states, start=None, role="champion")
    base = toys.config(tmp_path).model_dump()
    config = Config.model_validate(base | {"sweep": {"learning_rates": [1e-5, 2e-2, 5e-2], "steps": 6}})
    taken, step = [], Optimizer.step

    def stepping(self, scale, number):
        if len(taken) == 8:
            taken.append(scale)
            raise KeyboardInterrupt
        taken.append(scale)
        step(self, scale, number)

    def all_runs():
        return {rate: train.run(one, states, start=start, role="sweep") for rate, one in sweep.trials(config).items()}

    monkeypatch.setattr(Optimizer, "step", stepping)
    with pytest.raises(KeyboardInterrupt):
        all_runs()
    runs = all_runs()
    assert len(taken) == 3 * 6 + 1, "the first run was finished, and of the second two steps were in its checkpoint"
    made = sweep.run(config, runs)
    verify(made.folder, made.manifest)
    walks = {rate: one.manifest.walk for rate, one in runs.items()}
    for one in made.manifest.points:
        walk = walks[one["learning_rate"]]
        assert one["accepted_per_step"] == pytest.approx(walk["num_accepted_tokens"] / walk["num_drafts"])
        assert one["accepted_per_step"] >= made.manifest.start_accepted_per_step, "the start is among what is selected"
    table = (made.folder / sweep.TABLE).read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["(start)", "1e-05", "0.02", "0.05"]
    assert sweep.run(config, runs).id == made.id
