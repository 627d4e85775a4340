"""Ending what a supervisor started: its command, and everything else of its process group. Linux, standard library."""

import ctypes
import os
import signal
import subprocess
import time

GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def ended(child: subprocess.Popen[bytes]) -> int | None:
    """Its exit status; None where it outlived being asked to end."""
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    return child.poll()


def end_others() -> None:
    """End every process of this group but this one, which goes on hearing what it is asked."""
    _signal_others(signal.SIGTERM)
    time.sleep(0.2)
    _signal_others(signal.SIGKILL)


def end_with_the_parent() -> None:
    """In a new child: have the kernel end it where its parent is killed outright, and so cannot do it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_others(number: int) -> None:
    group = os.getpgrp()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != os.getpid() and os.getpgid(int(name)) == group:
                os.kill(int(name), number)
        except (ProcessLookupError, PermissionError):
            continue
