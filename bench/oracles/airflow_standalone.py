"""A real Airflow with its scheduler, on SQLite in a folder of its own: started, asked, ended."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
AIRFLOW = CHECKOUT / ".venv-airflow" / "bin" / "airflow"
SUPERVISOR = CHECKOUT / "serving" / "supervise.py"
TRIES, TIMEOUT_S = 5, 60.0
_USER = "admin"


@dataclass(frozen=True)
class Airflow:
    """The address of one, and the token of its one user."""

    url: str
    token: str

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None) -> Any:
        """What the API answers; one that is busy is asked again. Raises: OSError."""
        request = urllib.request.Request(
            f"{self.url}/api/v2/{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"authorization": f"Bearer {self.token}", "content-type": "application/json"},
        )
        for tries_left in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                    return json.loads(reply.read() or b"null")
            except urllib.error.HTTPError:
                raise
            except OSError:
                if not tries_left:
                    raise
        raise AssertionError("every try returns or raises")

    def unpause(self, dag: str) -> None:
        """Let the scheduler begin a DAG's runs."""
        self.ask(f"dags/{dag}", {"is_paused": False}, method="PATCH")

    def fail(self, dag: str, run: str) -> None:
        """Mark a run as failed, as people do to stop one."""
        self.ask(f"dags/{dag}/dagRuns/{urllib.parse.quote(run, safe='')}", {"state": "failed"}, method="PATCH")

    def runs(self, dag: str) -> list[dict[str, Any]]:
        """A DAG's runs, as the API tells them."""
        return self.ask(f"dags/{dag}/dagRuns")["dag_runs"]

    def tasks(self, dag: str, run: str) -> list[dict[str, Any]]:
        """The tasks of a run, as the API tells them."""
        return self.ask(f"dags/{dag}/dagRuns/{urllib.parse.quote(run, safe='')}/taskInstances")["task_instances"]


@contextmanager
def standalone(
    home: Path, dags: Path, settings: Mapping[str, str], *, airflow: Path = AIRFLOW, timeout_s: float = 900.0
) -> Iterator[Airflow]:
    """One with the DAGs of a folder, from the moment it is healthy and has read them; afterwards nothing of it is left.

    ``settings`` are set in its environment, and so in the tasks'.

    Raises: RuntimeError with the end of its log where it does not come up.
    """
    home.mkdir(parents=True, exist_ok=True)
    ports = _free_ports(3)
    password, log = secrets.token_hex(8), home / "standalone.log"
    (home / "passwords.json").write_text(json.dumps({_USER: password}))
    path = f"{airflow.parent}:{os.environ['PATH']}"  # its parts are found there
    environment = {**_clean_environment(), "PATH": path, **_own_settings(home, dags, ports), **settings}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-S", str(SUPERVISOR), str(airflow), "standalone"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=home,
            start_new_session=True,
        )
    try:
        yield _healthy(f"http://127.0.0.1:{ports[0]}", password, process, log, time.monotonic() + timeout_s)
    finally:
        process.stdin.close()
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _own_settings(home: Path, dags: Path, ports: list[int]) -> dict[str, str]:
    return {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{_USER}:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{ports[0]}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(ports[0]),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "AIRFLOW__CORE__FERNET_KEY": "",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(ports[1]),
        "AIRFLOW__TRIGGERER__TRIGGER_LOG_SERVER_PORT": str(ports[2]),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(ports[2]),
        # A busy machine is no dead one.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        "AIRFLOW__WORKERS__EXECUTION_API_RETRIES": "10",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "300",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "1200",
        "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "600",
        "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "300",
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "2",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON"))}


def _healthy(url: str, password: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> Airflow:
    while time.monotonic() < deadline and process.poll() is None:
        try:
            found = Airflow(url, _token(url, password))
            parts = found.ask("monitor/health")
            are_healthy = all(parts[part]["status"] == "healthy" for part in ("scheduler", "dag_processor"))
            if are_healthy and found.ask("dags")["total_entries"]:
                return found
        except (OSError, KeyError, ValueError):
            pass
        time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise RuntimeError(f"{log}: Airflow did not come up (status {process.poll()}); the end of its log:\n{tail}")


def _token(url: str, password: str) -> str:
    body = json.dumps({"username": _USER, "password": password}).encode()
    request = urllib.request.Request(f"{url}/auth/token", data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())["access_token"]


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
