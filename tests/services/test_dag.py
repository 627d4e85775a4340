"""The DAG in real Airflow: parsed by it, and run by its scheduler with a scripted command in Slipstream's place."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.oracles.airflow_standalone import AIRFLOW, standalone

CHECKOUT = Path(__file__).resolve().parents[2]
DAGS = CHECKOUT / "infra" / "airflow"
STAGES = ["collect", "regenerate", "capture", "train", "speed", "evaluate", "promote", "deploy"]


def parsed(tmp_path, **settings):
    """What Airflow's own Python reads in the folder of DAGs."""
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", **settings}
    probe = [str(AIRFLOW.with_name("python")), str(Path(__file__).with_name("airflow_probe.py")), str(DAGS)]
    done = subprocess.run(probe, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {}
    return found["dags"]


def test_each_stage_is_a_task_with_tries_and_a_timeout_one_run_at_a_time_begun_by_the_clock_or_an_event(
    tmp_path,
):
    dag = parsed(tmp_path)["slipstream_default"]
    assert (dag["max_active_runs"], dag["catchup"]) == (1, False)
    assert (dag["cron"], dag["assets"]) == (["0 2 * * *", "UTC"], ["slipstream_default_due"])
    tasks = dag["tasks"]
    order = ["due", *STAGES]
    assert {name: tasks[name]["after"] for name in STAGES} == {
        after: [before] for before, after in zip(order, STAGES, strict=False)
    }
    assert set(tasks["end"]["after"]) == {"due", "deploy"}
    assert {name: task["kind"] for name, task in tasks.items() if task["kind"] != "work"} == {
        "due": "setup",
        "end": "teardown",
    }
    assert {(task["retries"], task["retry_minutes"]) for task in tasks.values()} == {(2, 5.0)}
    hours = {name: task["timeout_hours"] for name, task in tasks.items()}
    assert (hours["train"], hours["regenerate"], hours["deploy"], min(hours.values())) == (24, 12, 2, 2)


def test_each_workload_target_or_group_has_its_own_pair_of_dags_and_its_own_event(tmp_path):
    dags = parsed(
        tmp_path,
        SLIPSTREAM_DAGS='{"support": "--config s.toml", "retail": "--config s.toml --group retail"}',
        SLIPSTREAM_STAGES="collect,regenerate,stream,train --role control,evaluate,promote,deploy",
        SLIPSTREAM_STAGE_HOURS='{"stream": 48}',
    )
    names = ["slipstream_retail", "slipstream_retail_watch", "slipstream_support", "slipstream_support_watch"]
    assert sorted(dags) == names
    assert dags["slipstream_retail"]["assets"] == ["slipstream_retail_due"]
    assert dags["slipstream_retail_watch"]["tasks"]["watch"]["emits"] == ["slipstream_retail_due"]
    assert dags["slipstream_support"]["tasks"]["stream"]["timeout_hours"] == 48
    assert "train_role_control" in dags["slipstream_support"]["tasks"]


# In Slipstream's place: it writes down how it is called, and does what a file of its case says for its stage and try.
SCRIPT = """
import os, pathlib, sys, time
stage, *arguments = sys.argv[1:]
at = arguments.index("--case")
case, arguments = pathlib.Path(arguments[at + 1]), arguments[:at] + arguments[at + 2:]
with open(case / "calls", "a") as file:
    file.write(" ".join([stage, *arguments]) + "\\n")
with open(case / "submissions", "a") as file:
    file.write(os.environ["SUBMISSION"] + "\\n")
tries = sum(line.startswith(stage + " ") for line in (case / "calls").read_text().splitlines())
plan = case / stage
words = plan.read_text().split() if plan.exists() else ["0"]
word = words[min(tries, len(words)) - 1]
if word == "hang":
    (case / "hangs").write_text(str(os.getpid()))
    time.sleep(600)
if word == "ray":  # as `ray job submit` tells of a job that declined
    print("Declined: the gate says hold", flush=True)
sys.exit(1 if word == "ray" else int(word))
"""


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """Airflow with a pair of DAGs for each case, all paused."""
    home = tmp_path_factory.mktemp("airflow")
    cases = {name: home / name for name in ("good", "gate", "ray", "failing", "hanging", "stopped", "idle", "event")}
    for folder in cases.values():
        folder.mkdir()
    (home / "slipstream.py").write_text(SCRIPT)
    settings = {
        "SLIPSTREAM_DAGS": json.dumps({name: f"--case {folder}" for name, folder in cases.items()}),
        "SLIPSTREAM_COMMAND": f"env SUBMISSION={{id}} {sys.executable} {home / 'slipstream.py'}",
        "SLIPSTREAM_STOP": f"touch {home}/stopped-{{id}}",
        "SLIPSTREAM_SCHEDULE": "0 0 1 1 *",
        "SLIPSTREAM_WATCH_SCHEDULE": "* * * * *",
        "SLIPSTREAM_RETRIES": "1",
        "SLIPSTREAM_RETRY_MINUTES": "0.01",
        "SLIPSTREAM_STAGE_HOURS": '{"capture": 0.002}',
    }
    with standalone(home / "home", DAGS, settings) as airflow:
        yield airflow, cases


def run_of(scheduler, case, *, timeout_s=900):
    """The tasks' states and the state of a DAG's run that begins now, and the calls of its commands."""
    airflow, cases = scheduler
    dag = f"slipstream_{case}"
    airflow.unpause(dag)  # the clock's last moment has passed: the scheduler begins one run
    deadline = time.monotonic() + timeout_s
    while not (ended := [one for one in airflow.runs(dag) if one["state"] in ("success", "failed")]):
        assert time.monotonic() < deadline, airflow.runs(dag)
        time.sleep(1)
    states = {task["task_id"]: task["state"] for task in airflow.tasks(dag, ended[0]["dag_run_id"])}
    calls = (cases[case] / "calls").read_text().splitlines()
    return ended[0]["state"], states, calls


def test_the_stages_run_one_after_the_other_as_stages_of_one_run_which_ends(scheduler):
    state, states, calls = run_of(scheduler, "good")
    assert state == "success" and set(states.values()) == {"success"}
    assert [call.split()[0] for call in calls] == ["due", *STAGES, "due"]
    runs = {call.split()[-1] for call in calls}
    assert len(runs) == 1 and runs.pop().startswith("slipstream_good-scheduled__")
    assert [call.split()[-2] for call in calls] == ["--begin", *["--run"] * 8, "--end"]
    submissions = (scheduler[1]["good"] / "submissions").read_text().split()
    assert len(set(submissions)) == len(submissions) == 10  # Ray refuses an id that was submitted before


@pytest.mark.parametrize(("case", "word"), [("gate", "3"), ("ray", "ray")])
def test_a_verdict_against_the_challenger_skips_the_deploy_and_is_no_failure(scheduler, case, word):
    (scheduler[1][case] / "promote").write_text(word)
    state, states, calls = run_of(scheduler, case)
    assert (state, states["evaluate"], states["promote"], states["deploy"]) == (
        "success", "success", "skipped", "skipped",
    )  # fmt: skip
    assert calls[-1].split()[0] == "due" and "--end" in calls[-1]


def test_a_stage_that_fails_is_tried_again_and_then_ends_the_run_as_failed_with_its_lease_given_back(scheduler):
    (scheduler[1]["failing"] / "regenerate").write_text("1 0")
    (scheduler[1]["failing"] / "train").write_text("1 1 1")
    state, states, calls = run_of(scheduler, "failing")
    assert (state, states["regenerate"], states["train"], states["deploy"]) == (
        "failed", "success", "failed", "upstream_failed",
    )  # fmt: skip
    named = [call.split()[0] for call in calls]
    assert (named.count("regenerate"), named.count("train"), named.count("deploy")) == (2, 2, 0)
    assert "--end" in calls[-1]


def test_a_stage_that_hangs_is_ended_with_its_process_and_its_job(scheduler):
    folder = scheduler[1]["hanging"]
    (folder / "capture").write_text("hang 0")
    state, states, _ = run_of(scheduler, "hanging")
    assert (state, states["capture"]) == ("success", "success")
    assert not Path(f"/proc/{(folder / 'hangs').read_text()}").exists()
    (stopped,) = folder.parent.glob("stopped-slipstream_hanging-*")
    assert stopped.name.endswith("-capture-1")


def test_a_stage_whose_run_is_marked_as_failed_is_ended_with_its_job(scheduler):
    airflow, cases = scheduler
    folder, dag = cases["stopped"], "slipstream_stopped"
    (folder / "collect").write_text("hang")
    airflow.unpause(dag)
    wait_for(lambda: (folder / "hangs").exists() and (folder / "hangs").read_text(), "the stage has not begun")
    (run,) = airflow.runs(dag)
    airflow.fail(dag, run["dag_run_id"])
    wait_for(lambda: not Path(f"/proc/{(folder / 'hangs').read_text()}").exists(), "it goes on")
    wait_for(lambda: list(folder.parent.glob("stopped-slipstream_stopped-*-collect-1")), "its job goes on")


def wait_for(is_so, what, *, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_where_nothing_is_due_every_stage_is_skipped_and_none_is_called(scheduler):
    folder = scheduler[1]["idle"]
    (folder / "due").write_text("3")
    state, states, calls = run_of(scheduler, "idle")
    assert state == "success" and set(states.values()) == {"skipped"}
    assert len(calls) == 1


def test_the_one_that_watches_begins_a_retraining_by_an_event_when_one_is_due(scheduler):
    airflow, cases = scheduler
    (cases["event"] / "watch").write_text("3")  # an alarm
    airflow.unpause("slipstream_event")
    airflow.unpause("slipstream_event_watch")
    runs = lambda: [run["run_type"] for run in airflow.runs("slipstream_event")]  # noqa: E731
    wait_for(lambda: "asset_triggered" in runs(), "no run was begun by an event")
    assert any(call.startswith("watch --once") for call in (cases["event"] / "calls").read_text().splitlines())
