"""Whose turn it is: one run at a time, dead owners told from live ones."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline import lease, stages
from pipeline.artifacts import PromptSet
from pipeline.errors import StageError

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_run(monkeypatch):
    monkeypatch.delenv(lease.RUN, raising=False)


def other_process(root, code):
    """A process that has taken a lease on the root and says so; it goes on until its standard input ends."""
    body = f"import sys\nfrom pipeline import lease\n{code}\nprint('taken', flush=True)\nsys.stdin.read()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", body, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    assert process.stdout.readline() == "taken\n"
    return process


def ended(process, *, kill=False):
    if kill:
        process.kill()
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def test_of_two_processes_one_has_its_turn_and_the_other_is_told_whose_it_is(tmp_path):
    first = other_process(tmp_path, "lease.take(sys.argv[1], 'theirs')")
    with pytest.raises(StageError, match="run theirs is under way"):
        lease.take(tmp_path, "ours")
    ended(first)


def test_a_run_that_was_killed_blocks_nobody_on_its_machine(tmp_path):
    first = other_process(tmp_path, "lease.take(sys.argv[1], 'theirs', seconds=3600)")
    assert lease.holder(tmp_path).run == "theirs"
    ended(first, kill=True)
    assert lease.holder(tmp_path) is None
    assert lease.take(tmp_path, "ours").run == "ours"


def test_a_process_of_the_same_number_that_began_later_is_not_the_owner(tmp_path):
    mine = lease.take(tmp_path, "ours")
    path = tmp_path / "retrainings" / "lease.json"
    path.write_text(mine.model_copy(update={"began": mine.began - 1, "until": time.time() + 3600}).model_dump_json())
    assert lease.holder(tmp_path) is None


def test_on_another_machine_only_time_tells_and_a_renewed_lease_holds(tmp_path):
    away = lease.Lease(run="theirs", host="elsewhere pid:[1]", pid=1, began=1, until=time.time() + 3600)
    path = tmp_path / "retrainings" / "lease.json"
    path.parent.mkdir()
    path.write_text(away.model_dump_json())
    with pytest.raises(StageError, match="theirs is under way on elsewhere,"):
        lease.take(tmp_path, "ours")
    path.write_text(away.model_copy(update={"until": time.time() - 1}).model_dump_json())
    assert lease.take(tmp_path, "ours").run == "ours"


def test_a_scheduled_runs_lease_outlives_the_process_that_took_it(tmp_path):
    ended(other_process(tmp_path, "lease.take(sys.argv[1], 'dag', seconds=60, with_process=False)"))
    assert lease.holder(tmp_path).run == "dag"


def test_it_is_renewed_while_its_stages_work_and_once_more_at_their_end(tmp_path, monkeypatch):
    lease.take(tmp_path, "dag", seconds=0.5, with_process=False)
    monkeypatch.setenv(lease.RUN, "dag")
    with lease.stage_of_a_run(tmp_path, seconds=0.5):
        time.sleep(1.2)
        assert lease.holder(tmp_path).run == "dag"
        before = lease.holder(tmp_path).until
    assert lease.holder(tmp_path).until >= before


def test_a_stage_by_hand_is_refused_during_a_run_and_its_result_is_not_made_current(tmp_path):
    lease.take(tmp_path, "dag", with_process=False)
    with pytest.raises(StageError, match="run dag is under way"), lease.stage_of_a_run(tmp_path):
        pass
    artifact = stages.Artifact(tmp_path, PromptSet(derivation_id="p1", parents={}))
    with pytest.raises(StageError, match="run dag is under way"):
        stages.set_current(tmp_path, "prompts", artifact)
    assert stages.current_names(tmp_path) == {}


def test_a_rollback_waits_for_no_run(tmp_path):
    lease.take(tmp_path, "dag", with_process=False)
    stages.set_current(tmp_path, "champion", stages.Artifact(tmp_path, PromptSet(derivation_id="c1", parents={})))
    assert stages.current_names(tmp_path) == {"champion": "c1"}


def test_a_stage_of_a_run_that_lost_its_turn_is_refused(tmp_path, monkeypatch):
    lease.take(tmp_path, "new", with_process=False)
    monkeypatch.setenv(lease.RUN, "old")
    with pytest.raises(StageError, match="run old has no lease; it is the turn of new"):
        lease.renew(tmp_path, "old")
    with pytest.raises(StageError, match="run new is under way"):
        stages.set_current(tmp_path, "prompts", stages.Artifact(tmp_path, PromptSet(derivation_id="p1", parents={})))


def test_what_waits_for_no_run_keeps_its_own_runs_turn_and_asks_nothing_by_hand(tmp_path, monkeypatch):
    lease.take(tmp_path, "dag", seconds=0.5, with_process=False)
    with lease.kept(tmp_path):  # by hand, during somebody's run
        pass
    monkeypatch.setenv(lease.RUN, "dag")
    with lease.kept(tmp_path, seconds=0.5):
        time.sleep(1.2)
        assert lease.holder(tmp_path).run == "dag"


def test_a_turn_ends_with_its_block_also_by_an_error_and_leaves_no_lease(tmp_path):
    with pytest.raises(ValueError, match="stop"), lease.turn(tmp_path) as run:
        assert os.environ[lease.RUN] == run == lease.holder(tmp_path).run
        raise ValueError("stop")
    assert lease.holder(tmp_path) is None
    assert lease.RUN not in os.environ


def test_a_run_is_released_by_its_own_name_alone(tmp_path):
    lease.take(tmp_path, "dag", with_process=False)
    assert lease.release(tmp_path, "other") is False
    assert lease.release(tmp_path, "dag") is True
    assert lease.holder(tmp_path) is None


def test_a_lease_that_cannot_be_read_says_what_to_do(tmp_path):
    path = tmp_path / "retrainings" / "lease.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(StageError, match="not a readable lease; remove it"):
        lease.take(tmp_path, "ours")


def put(root, **more):
    away = lease.Lease(run="theirs", host="elsewhere pid:[1]", pid=1, began=1, until=time.time() + 1.5)
    path = root / "retrainings" / "lease.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(away.model_copy(update=more).model_dump_json())


def test_a_lease_of_a_process_that_died_elsewhere_is_outlived(tmp_path):
    assert lease.outlive(tmp_path) is True
    put(tmp_path)
    assert lease.outlive(tmp_path, period_s=0.05) is True


def test_one_that_is_renewed_is_not_and_a_schedulers_is_not_waited_for(tmp_path):
    put(tmp_path, until=time.time() + 3600)
    renewal = threading.Timer(0.3, put, [tmp_path], {"until": time.time() + 7200})
    renewal.start()
    assert lease.outlive(tmp_path, period_s=0.05) is False
    renewal.join()
    put(tmp_path, pid=None, until=time.time() + 3600)
    assert lease.outlive(tmp_path) is False
