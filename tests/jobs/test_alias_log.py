"""Alias moves on a real MLflow: two at once, killed ones, lost answers, and hands that reach past the log."""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs.registry import PASSED, AliasMoved, Registry
from jobs.registry.alias_log import log_of
from pipeline.errors import StageError
from tests.jobs.test_registry import MODEL, make_checkpoint


@pytest.fixture(scope="module")
def three_versions(tmp_path_factory, empty_database):
    """A database with three passed versions, of which version 1 is champion; made once and copied."""
    root = tmp_path_factory.mktemp("three")
    shutil.copy(empty_database, root / "mlflow.db")
    registry = Registry(None, root)
    for name in ("d1", "d2", "d3"):
        registry.set_state(MODEL, registry.register(MODEL, make_checkpoint(root, name)), PASSED, reason="a test")
    registry.set_alias(MODEL, "champion", "1", expected=None, reason="adopt")
    return root / "mlflow.db"


@pytest.fixture
def registry(tmp_path, three_versions):
    """A registry of its own for every test."""
    shutil.copy(three_versions, tmp_path / "mlflow.db")
    return Registry(None, tmp_path)


def told(registry, alias="champion", **more):
    return [(move.version, move.previous, move.reason) for move in registry.history(MODEL, alias, **more)]


@pytest.mark.parametrize("roots", ["one root", "a root each"])
def test_of_two_who_move_an_alias_from_the_same_place_one_is_told(registry, tmp_path, roots):
    registries = [registry if roots == "one root" else Registry(registry.uri, tmp_path / f"r{i}") for i in range(2)]

    def move(one, version):
        try:
            return one.set_alias(MODEL, "champion", version, expected="1")
        except AliasMoved as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(move, registries, ("2", "3")))
    refused = [outcome for outcome in outcomes if isinstance(outcome, AliasMoved)]
    assert len(refused) == 1 and "expected version 1" in str(refused[0]) and "slipstream history" in str(refused[0])
    assert outcomes.count("1") == 1
    assert registry.alias(MODEL, "champion") == registry.history(MODEL, "champion")[-1].version


def test_both_append_and_the_later_one_loses_even_when_it_looked_before(registry):
    real = registry.log._append

    def after_someone_else(model, move, source):
        if move.version == "3":
            registry.set_alias(MODEL, "champion", "2", expected="1", reason="faster")
        real(model, move, source)

    registry.log._append = after_someone_else
    with pytest.raises(AliasMoved, match="alias champion names version 2, expected version 1"):
        registry.set_alias(MODEL, "champion", "3", expected="1", reason="slower")
    assert registry.alias(MODEL, "champion") == "2"
    assert told(registry) == [("1", None, "adopt"), ("2", "1", "faster")]
    assert told(registry, refused=True)[-1] == ("3", "2", "slower")


def test_a_move_that_rests_on_another_alias_is_refused_when_that_one_moved(registry):
    registry.set_alias(MODEL, "champion", "2", expected="1")
    with pytest.raises(AliasMoved, match="alias champion names version 2, expected version 1"):
        registry.set_alias(MODEL, "approved", "3", expected=None, given={"champion": "1"})
    registry.set_alias(MODEL, "approved", "3", expected=None, given={"champion": "2"})


def test_moving_an_alias_to_where_it_is_leaves_no_trace(registry):
    assert registry.set_alias(MODEL, "champion", "1", expected="1") == "1"
    assert len(registry.history(MODEL)) == 1


def killed(registry, step, *, before):
    """A process that moves champion to version 2 and is killed before or after a call of MLflow's client."""
    child = os.fork()
    if child == 0:
        client = type(registry.mlflow.client)
        real = getattr(client, step)

        def die(self, name, *args, **kwargs):
            if not before:
                real(self, name, *args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(client, step, die)
        Registry(registry.uri, registry.root).set_alias(MODEL, "champion", "2", expected="1", reason="deploy")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


STEPS = ["create_model_version", "set_registered_model_alias", "set_model_version_tag"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_a_move_whose_process_was_killed_happened_or_did_not_and_the_next_finishes_it(registry, step, before):
    killed(registry, step, before=before)
    appended = (step, before) != ("create_model_version", True)
    if not appended:
        assert registry.alias(MODEL, "champion") == "1"
    elif (step, before) in (("create_model_version", False), ("set_registered_model_alias", True)):
        assert "not finished" in registry.log.disagreements(MODEL)[0]
    if appended:
        with pytest.raises(AliasMoved, match="names version 2, expected version 1"):
            registry.set_alias(MODEL, "champion", "3", expected="1")
        assert registry.alias(MODEL, "champion") == "2"
    registry.set_alias(MODEL, "champion", "2", expected="2" if appended else "1", reason="deploy")
    assert registry.alias(MODEL, "champion") == "2"
    assert told(registry) == [("1", None, "adopt"), ("2", "1", "deploy")]
    assert registry.log.disagreements(MODEL) == []


@pytest.mark.parametrize("arrived", [True, False])
def test_case_86_an_append_whose_answer_was_lost_is_found_and_not_repeated(registry, arrived):
    from mlflow.exceptions import MlflowException

    real, calls = registry.mlflow.client.create_model_version, []

    def times_out_once(*args, **kwargs):
        calls.append(args)
        if arrived or len(calls) > 1:
            real(*args, **kwargs)
        if len(calls) == 1:
            raise MlflowException("504 gateway time-out")

    registry.mlflow.client.create_model_version = times_out_once
    assert registry.set_alias(MODEL, "champion", "2", expected="1", reason="deploy") == "1"
    assert len(calls) == (1 if arrived else 2)
    assert told(registry, refused=True) == [("1", None, "adopt"), ("2", "1", "deploy")]


@pytest.mark.parametrize("found", ["3", None])
def test_an_alias_that_was_moved_by_hand_is_reported_and_left_as_it_is(registry, found):
    if found:
        registry.mlflow.client.set_registered_model_alias(MODEL, "champion", found)
    else:
        registry.mlflow.client.delete_registered_model_alias(MODEL, "champion")
    with pytest.raises(StageError, match=r"moved by hand.*set it back to version 1"):
        registry.set_alias(MODEL, "champion", "2", expected="1")
    assert registry.alias(MODEL, "champion") == found
    assert len(registry.history(MODEL)) == 1
    assert "moved by hand" in registry.log.disagreements(MODEL)[0]
    registry.set_alias(MODEL, "challenger", "2")  # the other aliases go on
    registry.mlflow.client.set_registered_model_alias(MODEL, "champion", "1")
    registry.set_alias(MODEL, "champion", "2", expected="1")


def test_a_hand_that_moved_an_alias_after_a_killed_mover_is_seen_too(registry):
    killed(registry, "create_model_version", before=False)
    registry.mlflow.client.set_registered_model_alias(MODEL, "champion", "3")
    with pytest.raises(StageError, match="moved by hand"):
        registry.set_alias(MODEL, "champion", "2")
    assert registry.alias(MODEL, "champion") == "3"


def test_a_log_with_a_deleted_entry_is_not_trusted(registry):
    registry.set_alias(MODEL, "champion", "2", expected="1")
    registry.mlflow.client.delete_model_version(log_of(MODEL), "1")
    with pytest.raises(StageError, match=r"entries \[1\] are missing.*backup"):
        registry.history(MODEL)


def test_a_late_projection_of_an_older_move_is_put_right(registry):
    """A slow mover sets the alias to its own version after another has moved on; it looks again, and corrects it."""
    real, others = registry.mlflow.client.set_registered_model_alias, []

    def slow(model, alias, version):
        if version == "2" and not others:
            others.append(Registry(registry.uri, registry.root).set_alias(MODEL, "champion", "3", expected="2"))
        real(model, alias, version)

    registry.mlflow.client.set_registered_model_alias = slow
    registry.set_alias(MODEL, "champion", "2", expected="1")
    assert others == ["2"]
    assert registry.alias(MODEL, "champion") == "3"
    assert [move.version for move in registry.history(MODEL, "champion")] == ["1", "2", "3"]


def test_who_moved_it_is_the_named_actor_or_the_user_at_the_machine(registry, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_ACTOR", "ada")
    registry.set_alias(MODEL, "champion", "2", decision="g1")
    monkeypatch.delenv("SLIPSTREAM_ACTOR")
    registry.set_alias(MODEL, "champion", "3")
    named, own = registry.history(MODEL, "champion")[1:]
    assert (named.actor, named.decision, own.decision) == ("ada", "g1", None)
    assert own.actor.count("@") == 1
