"""Which process it is, and whether it is still there: what a file that names its owner has to say of it."""

import os
import socket
from pathlib import Path


def here() -> str:
    """This machine, and the space that its process ids are told apart in: a container has its own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def began(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None where there is no such process, or a dead one.

    Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if told[0] in "ZX" else int(told[19])
