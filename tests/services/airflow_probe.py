"""Run by Airflow's own Python: the DAGs of a folder as Airflow parses them, as one line of JSON."""

import json
import sys
from datetime import timedelta
from typing import Any

from airflow.dag_processing.dagbag import DagBag


def parsed(folder: str) -> dict[str, Any]:
    """Every DAG's schedule, limits and tasks, and what could not be imported."""
    bag = DagBag(dag_folder=folder)
    return {"errors": bag.import_errors, "dags": {name: told(dag) for name, dag in bag.dags.items()}}


def told(dag: Any) -> dict[str, Any]:
    """What is checked of a DAG."""
    clock = getattr(dag.timetable, "timetable", dag.timetable)
    assets = dag.timetable.asset_condition
    return {
        "cron": [clock.expression, clock.timezone],
        "assets": sorted(asset.name for asset in assets.objects) if assets else [],
        "max_active_runs": dag.max_active_runs,
        "catchup": dag.catchup,
        "tasks": {task.task_id: of_task(task) for task in dag.tasks},
    }


def of_task(task: Any) -> dict[str, Any]:
    """What is checked of a task."""
    return {
        "after": sorted(task.upstream_task_ids),
        "retries": task.retries,
        "retry_minutes": task.retry_delay / timedelta(minutes=1),
        "timeout_hours": task.execution_timeout / timedelta(hours=1) if task.execution_timeout else None,
        "kind": "setup" if task.is_setup else "teardown" if task.is_teardown else "work",
        "emits": sorted(asset.name for asset in task.outlets),
    }


if __name__ == "__main__":
    print(json.dumps(parsed(sys.argv[1])))
