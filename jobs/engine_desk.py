"""Where engines report: which parts they have begun, and how to reach them, so that none outlives its run."""

import os
import time
from dataclasses import dataclass
from typing import Any

import ray

# A killed engine gives its memory back in about a second; one that has not after this long is said to be left.
GONE_WITHIN_S = 30.0


@dataclass(frozen=True)
class Present:
    """An engine's actor, and the process that it is in."""

    actor: Any
    node_id: str
    pid: int


class Desk:
    """The record of one run, in an actor of its own: it outlives the engines that report to it."""

    def __init__(self) -> None:
        self._tries: dict[int, int] = {}
        self._faults: dict[int, str] = {}
        self._present: list[Present] = []

    def greet(self, actor: Any, node_id: str, pid: int) -> None:
        """An engine's process has begun."""
        self._present.append(Present(actor, node_id, pid))

    def tries(self, part: int) -> int:
        """How many engines have begun this part."""
        return self._tries.get(part, 0)

    def begin(self, part: int) -> tuple[int, str]:
        """An engine begins a part: how many have by now, and what the one before said when it gave up."""
        self._tries[part] = self._tries.get(part, 0) + 1
        return self._tries[part], self._faults.get(part, "the process ended without a word")

    def fault(self, part: int, message: str) -> None:
        """An engine gives up over a part."""
        self._faults[part] = message

    def present(self) -> list[Present]:
        """All engines that ever greeted."""
        return self._present


def open_desk() -> Any:
    """A new desk, as a Ray actor of this driver."""
    return ray.remote(num_cpus=0)(Desk).remote()


def end_engines(desk: Any) -> list[int]:
    """End every engine of a desk and wait for its memory; the ids of processes on this machine that are still there."""
    try:
        present = ray.get(desk.present.remote())
    except ray.exceptions.RayError:  # its machine is gone: its engines end as Ray Data lets go of them
        return []
    for actor in {one.actor for one in present}:
        ray.kill(actor)
    ray.kill(desk)
    here = ray.get_runtime_context().get_node_id()
    pids = {one.pid for one in present if one.node_id == here}
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := [pid for pid in pids if _is_there(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:  # an ended process that nobody has waited for yet holds no memory
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
