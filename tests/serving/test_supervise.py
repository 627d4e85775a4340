"""Nothing that a supervised command started outlives the process that asked for it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISOR = Path(__file__).resolve().parents[2] / "serving" / "supervise.py"
# Starts a child that ignores SIGTERM, says both pids, then sleeps.
COMMAND = """
import os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is looked at
        return False


def gone(pids, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def start(seconds="600"):
    process = subprocess.Popen(
        [sys.executable, "-S", str(SUPERVISOR), sys.executable, "-c", COMMAND, seconds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("how", ["pipe closes", "terminated", "command ends", "command is killed"])
def test_the_whole_group_ends(how):
    process, pids = start("0.5" if how == "command ends" else "600")
    if how == "pipe closes":
        process.stdin.close()
    elif how == "terminated":
        process.terminate()
    elif how == "command is killed":
        os.kill(pids[0], 9)
    assert gone(pids) and process.wait(60) == (0 if how == "command ends" else 1)


def test_the_group_ends_when_the_asking_process_is_killed():
    asker = subprocess.Popen(
        [sys.executable, "-c", ASKER, str(SUPERVISOR), COMMAND], stdout=subprocess.PIPE, start_new_session=True
    )
    pids = [int(pid) for pid in asker.stdout.readline().split()]
    assert all(alive(pid) for pid in pids)
    asker.kill()
    asker.wait()
    assert gone(pids)


def test_the_command_ends_when_the_supervisor_itself_is_killed_outright():
    process, (command, deaf) = start()
    try:
        process.kill()
        assert gone([command])
    finally:
        os.kill(deaf, 9)  # what the command started is the command's to end


ASKER = """
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-S", sys.argv[1], sys.executable, "-c", sys.argv[2], "600"],
                           stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""
