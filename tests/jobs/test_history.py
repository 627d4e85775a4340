import pytest

from jobs import history
from pipeline.config import Config
from pipeline.errors import StageError
from tests.jobs.test_alias_log import registry, three_versions  # noqa: F401
from tests.jobs.test_registry import MODEL


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"workload": "mails", "root": tmp_path, "target": {"model": "/models/toy"}})


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_table_tells_when_what_from_where_why_and_who(config, registry, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SLIPSTREAM_ACTOR", "ada")
    registry.set_alias(MODEL, "approved", "2", expected=None, reason="gate passed", decision="g1")
    registry.set_alias(MODEL, "champion", "2", expected="1", reason="deploy")
    head, *lines = history.run(config)
    assert cells(head) == ["when", "alias", "version", "from", "reason", "decision", "who"]
    assert [cells(line)[1:6] for line in lines] == [
        ["champion", "1", "-", "adopt", "-"],
        ["approved", "2", "-", "gate passed", "g1"],
        ["champion", "2", "1", "deploy", "-"],
    ]
    assert cells(lines[1])[6] == "ada"
    assert len(history.run(config, "approved")) == 2


def test_a_move_that_came_too_late_is_shown_on_request_with_the_reason(config, registry):  # noqa: F811
    real = registry.log._append

    def after_someone_else(model, move, source):
        if move.version == "3":
            registry.set_alias(MODEL, "champion", "2", expected="1")
        real(model, move, source)

    registry.log._append = after_someone_else
    with pytest.raises(StageError):
        registry.set_alias(MODEL, "champion", "3", expected="1", reason="deploy")
    assert len(history.run(config)) == 3
    assert "REFUSED: alias champion names version 2, expected version 1" in history.run(config, refused=True)[-1]


def test_an_alias_that_is_not_where_its_moves_put_it_is_named_below_the_table(config, registry):  # noqa: F811
    registry.mlflow.client.set_registered_model_alias(MODEL, "champion", "3")
    assert "moved by hand" in history.run(config)[-1]


def test_an_unknown_alias_names_those_that_exist_and_an_empty_root_stays_empty(config, registry, tmp_path):  # noqa: F811
    with pytest.raises(StageError, match=r"alias winner never was moved \(aliases: champion\)"):
        history.run(config, "winner")
    empty = config.model_copy(update={"root": tmp_path / "empty"})
    assert "nothing registered yet" in history.run(empty)[0]
    assert not (tmp_path / "empty").exists()
