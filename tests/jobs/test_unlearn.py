"""Versions that learned from what was erased: who gets a deadline, and where training begins then."""

import json
import shutil
from datetime import UTC, datetime

import pytest

from jobs import erase, expire, status, unlearn
from jobs.adopt import first_champion
from jobs.registry import Registry
from pipeline import collect
from pipeline.artifacts import DrafterCheckpoint
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError
from pipeline.stages import open_artifact
from pipeline.tombstones import read_tombstones
from tests.jobs.checkpoints import as_checkpoint

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def built(tmp_path, empty_database, tiny):
    """Version 1 from general prompts, and version 2 from it and what was collected of anna and berta."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(empty_database, root / "mlflow.db")
    log = tmp_path / "traffic.jsonl"
    texts = {"anna": "the violet lighthouse", "berta": "a question of berta's"}
    log.write_text(
        "".join(
            json.dumps({"consent": "recorded", "subject": name, "ts": 1.7e9, "prompt": text}) + "\n"
            for name, text in texts.items()
        )
    )
    config = Config.model_validate(
        {"root": root, "target": {"model": tiny[0]}, "collect": {"sources": [log], "redaction": "none"}}
    )
    first = as_checkpoint(root, tiny[1][0], name="c0", role="champion", parents={"states": "general"})
    first_champion(config, first)
    prompts = collect.run(config)
    second = as_checkpoint(root, tiny[1][1], name="d1", parents={"prompts": prompts.id, "start": "c0"})
    registry = Registry(None, root)
    tags = {"slipstream.data.prompts": prompts.id}
    assert registry.register(config.model_name, second, tags=tags) == "2"
    return config, second


def tags_of(config, version):
    return Registry(None, config.root).tags(config.model_name, version)


def test_an_erasure_gives_the_versions_that_learned_a_deadline_and_no_other(built):
    config, _ = built
    done = erase.run(config, ["anna"], now=NOW)
    assert done.tagged == {"2": "2026-03-31"}
    assert tags_of(config, "2")["slipstream.unlearn_by"] == "2026-03-31"
    assert tags_of(config, "2")["slipstream.unlearn_why"] == "erasure"
    assert "slipstream.unlearn_by" not in tags_of(config, "1")
    assert len(done.removed.rows) == 1
    assert [one.at for one in read_tombstones(config.root)] == [NOW] * 3
    assert not any(b"violet lighthouse" in path.read_bytes() for path in config.root.rglob("*") if path.is_file())


def test_a_second_erasure_does_not_put_the_deadline_off(built):
    config, _ = built
    erase.run(config, ["anna"], now=NOW)
    later = erase.run(config, ["berta"], now=NOW.replace(month=6))
    assert later.tagged == {"2": "2026-03-31"}


def test_a_run_that_was_killed_after_the_tags_removes_the_rows_when_it_is_run_again(built, monkeypatch):
    config, _ = built
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.erase.erase", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            erase.run(config, ["anna"], now=NOW)
    done = erase.run(config, ["anna"], now=NOW)
    assert (done.tagged, len(done.removed.rows)) == ({"2": "2026-03-31"}, 1)


def test_training_begins_anew_from_the_last_version_that_learned_nothing_of_it(built):
    config, second = built
    assert unlearn.clean_start(config, second) is second
    erase.run(config, ["anna"], now=NOW)
    start = unlearn.clean_start(config, second)
    assert (start.id, start.folder.name) == ("c0", "c0")
    first = open_artifact(config.root, DrafterCheckpoint, "c0")
    assert unlearn.clean_start(config, first) is first


def test_without_a_clean_ancestor_the_message_says_to_begin_anew(built):
    config, second = built
    registry = Registry(None, config.root)
    for version in ("1", "2"):
        registry.tag(config.model_name, version, "slipstream.unlearn_by", "2026-03-31")
    with pytest.raises(StageError, match=r"version 2, the champion, learned .*slipstream init-drafter"):
        unlearn.clean_start(config, second)


def test_status_says_when_a_version_has_to_be_out_of_service(built):
    config, _ = built
    registry = Registry(None, config.root)
    registry.set_state(config.model_name, "2", "passed", reason="a test")
    registry.set_alias(config.model_name, "champion", "2", reason="a test")
    erase.run(config, ["anna"], now=NOW)
    assert any("learned from what was erased: out of service by 2026-03-31" in line for line in status.run(config))


def test_what_expires_is_tagged_only_where_the_policy_says_so(built):
    config, _ = built
    with pytest.raises(ConfigError, match=r"retention\.ttl_days is not set"):
        expire.run(config, now=NOW)
    keeps = config.model_copy(update={"retention": config.retention.model_copy(update={"ttl_days": 10.0})})
    done = expire.run(keeps, now=NOW)
    assert (len(done.removed.rows), done.tagged) == (2, {})
    assert "slipstream.unlearn_by" not in tags_of(config, "2")


def test_nobody_to_erase_is_an_error_and_not_a_quiet_success(built):
    with pytest.raises(ConfigError, match="no subject given"):
        erase.run(built[0], [" "])
