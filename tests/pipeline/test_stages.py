import fcntl
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.artifacts import PromptSet, artifact_dir, derivation_id
from pipeline.errors import SchemaError, StageError
from pipeline.stages import complete, current, exclusive, hold_for_reading, open_artifact, set_current


def stage(root, calls, *, version=1, parents=None, meaning=None, fail=False):
    def build(folder, derivation):
        calls.append(derivation)
        if fail:
            raise RuntimeError("no power")
        return PromptSet(derivation_id=derivation, parents=parents or {})

    return complete(
        root, PromptSet, stage="collect", version=version, parents=parents or {}, meaning=meaning or {}, build=build
    )


def test_the_same_work_is_found_instead_of_done_again(tmp_path):
    calls = []
    first, second = stage(tmp_path, calls), stage(tmp_path, calls)
    assert len(calls) == 1
    assert (first.id, first.folder) == (second.id, second.folder)


@pytest.mark.parametrize("change", [{"version": 2}, {"parents": {"prompts": "b"}}, {"meaning": {"seed": 1}}])
def test_another_version_parent_or_setting_is_other_work(tmp_path, change):
    calls = []
    assert stage(tmp_path, calls).id != stage(tmp_path, calls, **change).id
    assert len(calls) == 2


def test_the_order_of_settings_is_not_their_meaning():
    assert derivation_id("s", 1, {}, {"a": 1, "b": 2}) == derivation_id("s", 1, {}, {"b": 2, "a": 1})


def test_a_stage_that_failed_is_not_complete_and_is_done_on_the_next_try(tmp_path):
    calls = []
    with pytest.raises(RuntimeError, match="no power"):
        stage(tmp_path, calls, fail=True)
    with pytest.raises(SchemaError, match="no complete prompts artifact"):
        open_artifact(tmp_path, PromptSet, calls[0])
    assert stage(tmp_path, calls).id == calls[0]


def test_two_processes_do_not_build_the_same_artifact_at_once(tmp_path):
    derivation = derivation_id("collect", 1, {}, {})
    folder = artifact_dir(tmp_path, PromptSet, derivation)
    folder.parent.mkdir(parents=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StageError, match="another process is building"):
            stage(tmp_path, [])


def test_whoever_reads_what_another_process_builds_waits_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    caplog.set_level(logging.INFO, logger="slipstream")
    with ThreadPoolExecutor(1) as reading:
        with exclusive(tmp_path / "folder", "test"):
            held = reading.submit(hold_for_reading, tmp_path / "folder")
            with pytest.raises(TimeoutError):
                held.result(timeout=0.2)
        held.result(timeout=10).close()
    assert f"{tmp_path / 'folder'}: another process is building it; waiting" in caplog.text


def test_a_name_remembers_the_last_artifact_and_a_missing_one_names_those_there_are(tmp_path):
    first, second = stage(tmp_path, []), stage(tmp_path, [], version=2)
    set_current(tmp_path, "prompts", first)
    set_current(tmp_path, "prompts", second)
    set_current(tmp_path, "old", first)
    assert current(tmp_path, "prompts", PromptSet).id == second.id
    with pytest.raises(StageError, match=r"no report yet \(there are: old, prompts\)"):
        current(tmp_path, "report", PromptSet)
