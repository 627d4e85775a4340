"""Run a command so that nothing of it outlives the process that asked for it.

``python serving/supervise.py COMMAND ...`` with a pipe as standard input: when the pipe closes (the asker
ended, however it ended), on SIGTERM, or when the command itself ends, the whole process group is ended.
A vLLM server whose front end is killed would otherwise leave its engine behind.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(command: list[str]) -> int:
    """The command's exit status. The caller has made this process the leader of a process group of its own."""
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    signal.signal(signal.SIGINT, lambda number, _: asked_to_end.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_the_supervisor)
    while child.poll() is None and not asked_to_end:
        readable, _, _ = select.select([sys.stdin.buffer.raw], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            break
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    status = child.poll()
    if os.getpgrp() == os.getpid():
        # The exit status must survive, so it is told before the group, this process included, is ended.
        print(f"supervise: the command ended with status {status}", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.2)
        _kill_others()
    return status if status is not None and status >= 0 else 1


def _end_with_the_supervisor() -> None:
    """Have the kernel end the command where this process is killed outright, and so cannot do it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_others() -> None:
    group = os.getpgrp()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != os.getpid() and os.getpgid(int(name)) == group:
                os.kill(int(name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
