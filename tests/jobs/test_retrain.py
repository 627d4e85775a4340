"""A retraining as cron starts it: due or not, one at a time, tried again, ended in time, on record."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from jobs import deploy, due, promote, retrain, session
from pipeline import lease, retrainings
from pipeline.artifacts import DrafterCheckpoint, artifact_dir, commit
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.stages import Artifact, set_current

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A root with a champion and traffic, so that the first retraining is due."""
    monkeypatch.delenv(lease.RUN, raising=False)
    (tmp_path / "log.jsonl").write_text('{"prompt": "a"}\n')
    config = Config.model_validate(
        {
            "root": tmp_path / "root",
            "target": {"model": tmp_path / "model"},
            "collect": {"sources": [tmp_path / "log.jsonl"]},
        }
    )
    remember_champion(config, "c0")
    return config


def remember_champion(config, name):
    made = DrafterCheckpoint(derivation_id=name, parents={}, role="champion", block_size=4, mask_token_id=2)
    folder = artifact_dir(config.root, DrafterCheckpoint, name)
    commit(folder, made)
    set_current(config.root, "champion", Artifact(folder, made))


def loop_that(config, *, ends=(0,), waits_s=0.0):
    """A command in the loop's place: each try writes its run and process down, waits, and ends with its status."""
    notes = config.root / "tries"
    notes.mkdir(parents=True, exist_ok=True)
    code = (
        "import os, pathlib, sys, time\n"
        f"notes = pathlib.Path({str(notes)!r}); number = len(list(notes.iterdir()))\n"
        "(notes / str(number)).write_text(os.environ['SLIPSTREAM_RUN'] + ' ' + str(os.getpid()))\n"
        f"time.sleep({waits_s})\n"
        f"sys.exit({list(ends)!r}[number])\n"
    )
    return [sys.executable, "-c", code], lambda: [p.read_text().split() for p in sorted(notes.iterdir())]


def with_retrain(config, **settings):
    return config.model_copy(update={"retrain": config.retrain.model_copy(update=settings)})


def test_a_run_is_on_record_with_its_reason_and_the_lease_is_free_again(config):
    loop, tries = loop_that(config)
    record = retrain.run(config, loop)
    assert [run for run, _ in tries()] == [record.run]
    assert record.reasons == ("first: no retraining came to a verdict yet",)
    assert retrainings.on_record(config.root) == [record]
    assert lease.holder(config.root) is None


def test_where_nothing_is_due_the_loop_does_not_begin_unless_it_is_asked_for(config):
    loop, tries = loop_that(config, ends=(0, 0))
    retrain.run(config, loop)
    answer = retrain.run(config, loop)
    assert (answer.due, answer.waits is None, len(tries())) == (False, False, 1)
    assert retrain.run(config, loop, now=True).reasons[0] == "asked: begun by hand"
    assert len(tries()) == 2


def test_a_run_that_failed_or_was_killed_is_tried_again_as_the_same_run(config):
    loop, tries = loop_that(config, ends=(1, 137, 0))
    record = retrain.run(with_retrain(config, tries=3), loop, pause_s=0)
    assert [run for run, _ in tries()] == [record.run] * 3


def test_the_last_try_that_fails_is_an_error_and_the_lease_is_free_again(config):
    loop, tries = loop_that(config, ends=(1, 1, 0))
    with pytest.raises(StageError, match="failed in 2 tries"):
        retrain.run(with_retrain(config, tries=2), loop, pause_s=0)
    assert len(tries()) == 2
    assert lease.holder(config.root) is None
    assert retrainings.on_record(config.root)[0].outcome == "failed"


def test_until_the_next_run_begins_a_failed_one_stays_an_error_for_a_scheduler_that_tries_again(config):
    loop, tries = loop_that(config, ends=(1, 0))
    config = with_retrain(config, tries=1)
    with pytest.raises(StageError, match="failed in 1 tries"):
        retrain.run(config, loop)
    with pytest.raises(StageError, match=r"failed, and the next waits: the last run began at .* and failed"):
        retrain.run(config, loop)
    assert len(tries()) == 1
    assert retrain.run(config, loop, now=True).outcome == "unfinished"
    assert retrain.run(config, loop).due is False


def test_a_gate_that_says_no_is_no_failure_and_not_tried_again(config):
    loop, tries = loop_that(config, ends=(3,))
    assert retrain.run(with_retrain(config, tries=3), loop, pause_s=0).outcome == "unfinished"
    assert len(tries()) == 1


def test_a_run_that_hangs_is_ended_after_its_time_and_nothing_of_it_is_left(config):
    loop, tries = loop_that(config, ends=(0, 0), waits_s=600)
    began = time.monotonic()
    with pytest.raises(StageError, match="failed in 1 tries"):
        retrain.run(with_retrain(config, tries=1, timeout_hours=2 / 3600), loop)
    assert time.monotonic() - began < 60
    ((_, pid),) = tries()
    assert not Path(f"/proc/{pid}").exists()


def test_while_one_run_is_under_way_another_does_not_begin(config):
    loop, tries = loop_that(config)
    lease.take(config.root, "theirs", with_process=False)
    assert retrain.run(config, loop).waits.startswith("run theirs is under way")
    with pytest.raises(StageError, match="run theirs is under way"):
        retrain.run(config, loop, now=True)
    assert tries() == []


def test_a_killed_retrain_takes_its_loop_with_it_and_blocks_nobody(config):
    loop, tries = loop_that(config, ends=(0, 0), waits_s=600)
    code = (
        "import json, sys\nfrom jobs import retrain\nfrom pipeline.config import Config\n"
        "retrain.run(Config.model_validate(json.loads(sys.argv[1])), sys.argv[2:])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, config.model_dump_json(), *loop], cwd=CHECKOUT)
    wait_for(lambda: len(tries()) == 1, "the loop has not begun")
    assert lease.holder(config.root) is not None
    process.kill()
    process.wait(60)
    ((_, pid),) = tries()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the loop outlives what began it")
    assert lease.holder(config.root) is None
    quick, _ = loop_that(config, ends=(0, 0))
    record = retrain.run(config, quick)  # and it is gone on with at once
    assert [one.ended is None for one in retrainings.on_record(config.root)] == [True, False]
    assert record.number == 2


def test_a_run_that_somebody_interrupts_is_gone_on_with_at_once(config, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(retrain, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        retrain.run(config, ["loop"])
    assert lease.RUN not in os.environ
    assert lease.holder(config.root) is None
    assert due.run(config).due


def test_of_many_schedulers_that_ask_at_the_same_moment_one_begins(config):
    answers, ready = [], threading.Barrier(8)

    def ask(number):
        ready.wait(60)
        try:
            answers.append(due.begin(config, f"dag-{number}", seconds=60).due)
        except StageError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers.count(True) == 1 and len(answers) == 8
    assert all(one is True or one is False or "is under way" in one for one in answers)
    assert len(retrainings.on_record(config.root)) == 1


def test_a_scheduler_that_was_killed_between_lease_and_record_begins_the_same_run_again(config):
    lease.take(config.root, "dag-1", seconds=60, with_process=False)
    assert due.begin(config, "dag-1", seconds=60).due
    assert [one.run for one in retrainings.on_record(config.root)] == ["dag-1"]


def test_a_run_that_is_not_due_leaves_no_lease_also_where_asking_fails(config, monkeypatch):
    answers = iter([due.Due(due=True), due.Due(due=False)])  # what asked for it was answered in between
    monkeypatch.setattr(due.due, "run", lambda *_, **__: next(answers))
    assert due.begin(config, "dag-1", seconds=60).due is False
    assert lease.holder(config.root) is None
    answers = iter([due.Due(due=True)])
    with pytest.raises(StopIteration):
        due.begin(config, "dag-1", seconds=60)
    assert lease.holder(config.root) is None


@pytest.mark.parametrize("stage", [deploy, promote])
def test_a_promotion_or_a_deploy_of_a_run_that_lost_its_turn_is_refused(config, monkeypatch, stage):
    lease.take(config.root, "new", with_process=False)
    monkeypatch.setenv(lease.RUN, "old")
    parser = argparse.ArgumentParser()
    stage.add_arguments(parser)
    with pytest.raises(StageError, match="run old has no lease; it is the turn of new"):
        stage.main(config, parser.parse_args([]))


def wait_for(is_so, what):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def slipstream(config, *arguments, **environment):
    toml = config.root / "s.toml"
    toml.write_text(
        f'root = "{config.root}"\n[target]\nmodel = "{config.target.model}"\n'
        f'[collect]\nsources = ["{config.collect.sources[0]}"]\nredaction = "none"\nconsent = "allow_all"\n'
    )
    command = [sys.executable, "-m", "jobs.cli", arguments[0], "--config", str(toml), *arguments[1:]]
    environment = {**os.environ, "RAY_ADDRESS": "", **environment}
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, env=environment, timeout=300)


def test_due_prints_one_line_of_json_and_its_exit_status_says_it_too(config):
    done = slipstream(config, "due")
    assert (done.returncode, json.loads(done.stdout)["due"]) == (0, True)
    assert lease.holder(config.root) is None
    lease.take(config.root, "theirs", with_process=False)
    done = slipstream(config, "due")
    assert (done.returncode, json.loads(done.stdout)["due"]) == (3, False)
    assert "Traceback" not in done.stderr


def test_between_begin_and_end_the_runs_own_stages_work_and_others_refuse(config, monkeypatch):
    assert slipstream(config, "due", "--begin", "dag-1").returncode == 0
    assert lease.holder(config.root).run == "dag-1"
    other = slipstream(config, "due", "--begin", "dag-2")
    assert (other.returncode, json.loads(other.stdout)["waits"].split(" on ")[0]) == (3, "run dag-1 is under way")
    by_hand = slipstream(config, "collect")
    assert by_hand.returncode == 1
    assert "run dag-1 is under way" in by_hand.stderr
    monkeypatch.setattr(session, "ray_session", nullcontext)
    monkeypatch.setenv(lease.RUN, "dag-1")  # job_main sets it, and nothing of it may stay
    worked = []
    job = ["--config", str(config.root / "s.toml"), "--run", "dag-1"]
    session.job_main("a stage", lambda *_: worked.append(lease.holder(config.root).run), argv=job)
    assert worked == ["dag-1"]
    ended = slipstream(config, "due", "--end", "dag-1")
    assert (ended.returncode, json.loads(ended.stdout)["outcome"]) == (0, "unfinished")
    assert lease.holder(config.root) is None
    assert due.begin(config, "dag-1", seconds=60).due  # its failed tasks were cleared: the same run goes on


def test_the_same_run_may_be_begun_twice_and_is_one(config):
    first = due.begin(config, "dag-1", seconds=60)
    again = due.begin(config, "dag-1", seconds=60)
    assert first.due and again.due
    assert len(retrainings.on_record(config.root)) == 1
