"""Whom `approved` may name: one verdict after the other, two at once, and promoters that died."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs import promote, rollout
from jobs.adopt import first_champion
from jobs.registry import FAILED, PASSED, PENDING, AliasMoved, Registry
from pipeline.config import Config
from pipeline.errors import StageError
from tests.jobs.checkpoints import as_checkpoint
from tests.jobs.verdicts import make_decision


@pytest.fixture
def config(mlflow_root, tiny):
    return Config.model_validate({"workload": "mails", "root": mlflow_root, "target": {"model": tiny[0]}})


@pytest.fixture
def two(config, tiny):
    """Champion c0 as version 1, and two challengers that were both measured against it, each with its verdict."""
    first_champion(config, as_checkpoint(config.root, tiny[1][0], name="c0", role="champion"))
    lifts = {"d1": 1.2, "d2": 1.3}
    return [
        (make_decision(config.root, challenger=name, lift=lift), as_checkpoint(config.root, tiny[1][i], name=name))
        for i, (name, lift) in enumerate(lifts.items(), start=1)
    ]


def deployed(config, version, *, reason="deploy"):
    """What a deploy does to the registry once the fleet serves a version."""
    registry = Registry(None, config.root)
    rollout.require_passed(registry, config.model_name, version)
    registry.set_alias(config.model_name, "champion", version, reason=reason)


def approved(config):
    return Registry(None, config.root).alias(config.model_name, "approved")


def test_the_second_of_two_is_told_to_measure_again_with_both_figures(config, two):
    assert promote.run(config, *two[0]) == "2"
    with pytest.raises(AliasMoved) as refusal:
        promote.run(config, *two[1])
    for told in ("version 2 was approved by", "lift 1.200 (interval 1.100 to 1.300)", "version 3: lift 1.300", "again"):
        assert told in str(refusal.value)
    registry = Registry(None, config.root)
    assert (approved(config), registry.state(config.model_name, "3")) == ("2", PENDING)
    with pytest.raises(StageError, match="version 3 never was approved"):
        rollout.require_passed(registry, config.model_name, "3")


def test_of_two_at_once_one_is_approved_and_the_other_told_to_measure_again(config, two):
    roots = [config, config.model_copy()]

    def run(one, verdict):
        try:
            return promote.run(one, *verdict)
        except AliasMoved as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run, roots, two))
    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
    (loser,) = [outcome for outcome in outcomes if isinstance(outcome, AliasMoved)]
    assert approved(config) == winner
    assert f"version {winner} was approved by" in str(loser) and "measure version" in str(loser)
    assert len(Registry(None, config.root).history(config.model_name, "approved")) == 1


def test_a_champion_that_moves_between_the_check_and_the_move_wins(config, two, monkeypatch):
    promote.run(config, *two[0])
    deployed(config, "2")
    deployed(config, "1", reason="rollback")
    real = Registry.set_state

    def meanwhile(registry, model, version, state, *, reason):
        real(registry, model, version, state, reason=reason)
        if (version, state) == ("3", PASSED):
            deployed(config, "2")

    monkeypatch.setattr(Registry, "set_state", meanwhile)
    with pytest.raises(
        AliasMoved, match=r"compared with champion c0.*version 2 \(d1\) is champion now.*measure version 3"
    ):
        promote.run(config, *two[1])
    assert approved(config) == "2"
    assert Registry(None, config.root).state(config.model_name, "3") == PENDING


def test_round_after_round_each_challenger_follows_the_champion_it_was_measured_against(config, two):
    promote.run(config, *two[0])
    deployed(config, "2")
    assert promote.run(config, *two[0]) == "2"  # the stage is run again
    with pytest.raises(AliasMoved, match="compared with champion c0"):
        promote.run(config, *two[1])
    again = make_decision(config.root, champion="d1", challenger="d2")
    assert promote.run(config, again, two[1][1]) == "3"
    deployed(config, "3")
    moves = Registry(None, config.root).history(config.model_name, "approved")
    assert [(move.previous, move.version) for move in moves] == [(None, "2"), ("2", "3")]


def test_after_a_rollback_a_verdict_against_the_old_champion_holds_again(config, two):
    promote.run(config, *two[0])
    deployed(config, "2")
    deployed(config, "1", reason="rollback")
    assert promote.run(config, *two[0]) == "2"
    assert promote.run(config, *two[1]) == "3"
    assert approved(config) == "3"
    with pytest.raises(StageError, match=r"approved version 2 at .* already.*approves once"):
        promote.run(config, *two[0])


def test_an_approved_version_that_is_not_wanted_is_given_up_by_its_number(config, two):
    promote.run(config, *two[0])
    with pytest.raises(AliasMoved, match="--instead-of 2"):
        promote.run(config, *two[1], instead_of="1")
    assert promote.run(config, *two[1], instead_of="2") == "3"
    move = Registry(None, config.root).history(config.model_name, "approved")[-1]
    assert (move.previous, move.version, move.reason) == ("2", "3", "instead of version 2")


def test_a_later_verdict_withdraws_what_waits_and_never_what_has_served(config, two):
    registry, model = Registry(None, config.root), config.model_name
    decision, challenger = two[0]
    promote.run(config, decision, challenger)
    with pytest.raises(StageError, match="the gate says hold"):
        promote.run(config, make_decision(config.root, "hold"), challenger)
    assert registry.state(model, "2") == FAILED
    with pytest.raises(StageError, match=r"version 2 is failed now \(decision g-d1-c0-hold is hold\)"):
        rollout.require_passed(registry, model, "2")
    assert promote.run(config, decision, challenger) == "2"  # and a later pass lets it through
    deployed(config, "2")
    with pytest.raises(StageError, match="the gate says reject"):
        promote.run(config, make_decision(config.root, "reject"), challenger)
    assert registry.state(model, "2") == PASSED


STEPS = [
    ("log_artifact", 2),
    ("create_model_version", 1),  # the version
    ("set_model_version_tag", 1),
    ("log_batch", 1),
    ("create_model_version", 2),  # challenger moves
    ("set_registered_model_alias", 1),
    ("download_artifacts", 2),
    ("set_model_version_tag", 6),
    ("create_model_version", 3),  # approved moves
    ("set_registered_model_alias", 2),
]


@pytest.mark.parametrize(("step", "nth"), STEPS)
def test_a_promotion_that_was_killed_is_finished_by_the_next(config, two, step, nth):
    child = os.fork()
    if child == 0:
        client = type(Registry(None, config.root).mlflow.client)
        real, calls = getattr(client, step), []

        def then_die(*args, **kwargs):
            result = real(*args, **kwargs)
            calls.append(step)
            if len(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(client, step, then_die)
        promote.run(config, *two[0])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert promote.run(config, *two[0]) == "2"
    registry = Registry(None, config.root)
    assert (approved(config), registry.state(config.model_name, "2")) == ("2", PASSED)
    assert [move.version for move in registry.history(config.model_name, "approved")] == ["2"]
    assert registry.log.disagreements(config.model_name) == []
