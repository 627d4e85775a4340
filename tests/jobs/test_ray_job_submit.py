"""``ray job submit`` against a real Ray head on loopback."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from pipeline.artifacts import PromptSet
from pipeline.stages import current

CHECKOUT = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")
PORTS = (
    "port",
    "dashboard-port",
    "ray-client-server-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "node-manager-port",
    "object-manager-port",
)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def head():
    """The environment in which jobs can be submitted to a head that this fixture starts and ends."""
    temporary = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets need a short path
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "HOME": str(temporary),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(32).hex(),
    }
    command = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
    command += ["--include-dashboard=true", "--num-cpus=2", "--object-store-memory=100000000"]
    command += [f"--temp-dir={temporary}", *(f"--{name}={port}" for name, port in ports.items())]
    with open(temporary / "head.log", "wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_the_tests
        )
    url = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        wait_for(f"{url}/api/version", process, environment["RAY_AUTH_TOKEN"], temporary / "head.log")
        yield {**environment, "RAY_API_SERVER_ADDRESS": url}
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)


def end_with_the_tests():
    """The head gets SIGTERM when the test process dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_for(url, process, token, log):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no Ray head at {url}:\n{log.read_text()}")


@pytest.fixture
def config(tmp_path):
    """A config file outside the working directory, with one shared prompt log."""
    record = {"model": "m", "messages": [{"role": "user", "content": "Where is my parcel?"}]}
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text("".join(json.dumps({"id": str(i), "ts": i, **record}) + "\n" for i in range(3)))
    path = tmp_path / "slipstream.toml"
    path.write_text(
        f'root = "{tmp_path / "run"}"\n[target]\nmodel = "{tmp_path / "model"}"\n'
        f'[collect]\nsources = ["{traffic}"]\nconsent = "allow_all"\nredaction = "none"\n'
    )
    return path


def submit(environment, *command):
    return subprocess.run(
        [RAY, "job", "submit", "--working-dir", ".", "--", sys.executable, *command],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_a_submitted_job_does_its_work_on_the_cluster(head, config, tmp_path):
    done = submit(head, "jobs/collect.py", "--config", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    prompts = current(tmp_path / "run", "prompts", PromptSet)
    assert sum(shard.rows for shard in prompts.manifest.shards if shard.path.endswith(".parquet")) == 1
    assert "Connecting to existing Ray cluster" in done.stdout + done.stderr


def test_a_job_that_fails_says_why_and_fails_its_submission(head, config):
    done = submit(head, "jobs/promote.py", "--config", str(config))
    assert done.returncode == 1
    assert "StageError" in done.stdout and "no challenger yet" in done.stdout
