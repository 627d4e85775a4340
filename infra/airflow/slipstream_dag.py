"""Airflow 3: `slipstream` on a schedule, and as soon as an alarm or enough new traffic asks for it. Every task is one
command; what is decided is decided by the jobs. Put this file into the DAGs folder; Slipstream needs not be installed
beside Airflow. Settings, from the environment of Airflow's processes:

SLIPSTREAM_DAGS            JSON: name → arguments, for a pair of DAGs each: targets, workloads, groups of tenants
                           {"support": "--config /etc/slipstream/support.toml",
                            "retail": "--config /etc/slipstream/support.toml --group retail"}
SLIPSTREAM_COMMAND         what a stage's name and arguments are put behind; "slipstream" where it is installed, or
                           "ray job submit --submission-id {id} --working-dir /opt/slipstream -- python -m jobs.cli"
SLIPSTREAM_STOP            what ends a stage that took too long, beside its process: "ray job stop {id}"
SLIPSTREAM_STAGES          the stages, by commas: "collect,regenerate,stream,evaluate,promote,deploy"
SLIPSTREAM_SCHEDULE        cron, UTC, of the retraining
SLIPSTREAM_WATCH           the monitor's look at the fleet before that question; "" where it runs by itself
SLIPSTREAM_WATCH_SCHEDULE  cron, UTC, of the question whether one is due
SLIPSTREAM_STAGE_HOURS     JSON: stage → hours that a try of it may take
SLIPSTREAM_RETRIES, SLIPSTREAM_RETRY_MINUTES
"""

import ctypes
import json
import logging
import os
import re
import shlex
import signal
import subprocess
from datetime import datetime, timedelta

from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, CronTriggerTimetable, get_current_context, task
from airflow.sdk.exceptions import AirflowSkipException

logger = logging.getLogger("slipstream")

DAGS = json.loads(os.environ.get("SLIPSTREAM_DAGS", '{"default": "--config slipstream.toml"}'))
COMMAND = os.environ.get("SLIPSTREAM_COMMAND", "slipstream")
STOP = os.environ.get("SLIPSTREAM_STOP", "")
ALL_STAGES = "collect,regenerate,capture,train,speed,evaluate,promote,deploy"
STAGES = os.environ.get("SLIPSTREAM_STAGES", ALL_STAGES).split(",")
SCHEDULE = os.environ.get("SLIPSTREAM_SCHEDULE", "0 2 * * *")
WATCH = os.environ.get("SLIPSTREAM_WATCH", "watch --once")
WATCH_SCHEDULE = os.environ.get("SLIPSTREAM_WATCH_SCHEDULE", "*/15 * * * *")
HOURS = {"regenerate": 12, "capture": 12, "train": 24, "stream": 36}
HOURS |= json.loads(os.environ.get("SLIPSTREAM_STAGE_HOURS", "{}"))
RETRIES = {
    "retries": int(os.environ.get("SLIPSTREAM_RETRIES", "2")),
    "retry_delay": timedelta(minutes=float(os.environ.get("SLIPSTREAM_RETRY_MINUTES", "5"))),
}
DECLINED = 3  # a command's answer is no, and nothing is wrong: not due, or the gate let nothing through
GRACE_S = 60
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
BEGINNING = datetime(2026, 1, 1)


class Declined(Exception):
    """There is nothing to do; no failure."""


def call(stage: str, arguments: str, *, identity: str) -> None:
    """One command, its output in the task's log. Raises: Declined; RuntimeError when it failed."""
    command = [*shlex.split(COMMAND.replace("{id}", identity)), *stage.split(), *shlex.split(arguments)]
    logger.info("%s", shlex.join(command))
    airflows = signal.signal(signal.SIGTERM, _stopped)  # Airflow's own lets a command go on that nobody waits for
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_the_task,
    )
    declined = False
    try:
        for line in process.stdout:
            declined |= line.startswith("Declined: ")  # `ray job submit` has one status for all that is not 0
            logger.info("%s", line.rstrip())
        status = process.wait()
    except BaseException:  # this try's time is over, or someone ends it: nothing of it may go on
        end(process, identity)
        raise
    finally:
        signal.signal(signal.SIGTERM, airflows)
    if status == DECLINED or (status and declined):
        raise Declined(f"{stage}: nothing to do")
    if status:
        raise RuntimeError(f"{stage}: exit status {status}; the log above says why")


def end(process: subprocess.Popen, identity: str) -> None:
    """End a command, all that it started here, and its job in the cluster.

    Whoever marks a task as failed gives it five seconds: both are asked at once, and what ends the job outlives this.
    """
    stop = subprocess.Popen(shlex.split(STOP.replace("{id}", identity)), start_new_session=True) if STOP else None
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    if stop is not None:
        stop.wait(GRACE_S)


def _stopped(*_: object) -> None:
    raise KeyboardInterrupt("the task was ended")


def _end_with_the_task() -> None:
    """Have the kernel end the command where the task's process is killed outright."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def as_stage(stage: str, arguments: str, *, of_run: str = "--run") -> None:
    """A stage of this DAG run. Skipped, with all that comes after it, where there is nothing to do."""
    context = get_current_context()
    run = re.sub(r"[^\w.-]+", "-", f"{context['dag'].dag_id}-{context['dag_run'].run_id}")
    identity = f"{run}-{context['ti'].task_id}-{context['ti'].try_number}"
    try:
        call(stage, f"{arguments} {of_run} {run}", identity=identity)
    except Declined as no:
        raise AirflowSkipException(str(no))


def retraining(name: str, arguments: str, asked_for: Asset) -> DAG:
    """Due? → the stages, one after the other → what came of it."""
    schedule = AssetOrTimeSchedule(timetable=CronTriggerTimetable(SCHEDULE, timezone="UTC"), assets=[asked_for])
    with DAG(
        f"slipstream_{name}",
        schedule=schedule,
        start_date=BEGINNING,
        catchup=False,
        max_active_runs=1,
        default_args=RETRIES,
        tags=["slipstream"],
        doc_md="Begins only what `slipstream due` says is due. A verdict against the challenger skips the rest.",
    ) as dag:

        def stage_task(stage: str, task_id: str, **more: str):
            hours = HOURS.get(stage.split()[0], 2)
            work = task(task_id=task_id, execution_timeout=timedelta(hours=hours))(as_stage)
            return work(stage, arguments, **more)

        begin = stage_task("due", "due", of_run="--begin").as_setup()
        finish = stage_task("due", "end", of_run="--end").as_teardown(setups=begin)
        before = begin
        for stage in STAGES:
            work = stage_task(stage, stage.replace(" ", "_").replace("--", ""))
            before >> work
            before = work
        before >> finish
    return dag


def watching(name: str, arguments: str, asked_for: Asset) -> DAG:
    """The monitor's look at the fleet, and an event for the retraining's DAG where one is due."""
    with DAG(
        f"slipstream_{name}_watch",
        schedule=CronTriggerTimetable(WATCH_SCHEDULE, timezone="UTC"),
        start_date=BEGINNING,
        catchup=False,
        max_active_runs=1,
        tags=["slipstream"],
    ) as dag:

        @task(outlets=[asked_for], execution_timeout=timedelta(minutes=30))
        def watch() -> None:
            identity = f"{name}-watch-{get_current_context()['ti'].id}"
            try:
                if WATCH:
                    call(WATCH, arguments, identity=identity)
            except Declined:
                logger.info("an alarm")
            try:
                call("due", arguments, identity=f"{identity}-due")
            except Declined as no:
                raise AirflowSkipException(str(no))  # no event

        watch()
    return dag


for _name, _arguments in DAGS.items():
    _asked_for = Asset(f"slipstream_{_name}_due", uri=f"slipstream://{_name}/due")
    globals()[f"slipstream_{_name}"] = retraining(_name, _arguments, _asked_for)
    globals()[f"slipstream_{_name}_watch"] = watching(_name, _arguments, _asked_for)
