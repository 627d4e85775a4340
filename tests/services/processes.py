"""A service's process, of which nothing outlives the tests, and free ports for it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SUPERVISOR = Path(__file__).resolve().parents[2] / "serving" / "supervise.py"
END_S = 30.0  # the supervisor's own grace and something more


@contextmanager
def running(
    command: Sequence[str],
    ready: Callable[[], bool],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    kill: bool = False,
) -> Iterator[None]:
    """The command, from the moment it is ready; afterwards it and all that it started are ended.

    ``kill`` ends it at once, for a service that leaves nothing outside its folder and takes long to say goodbye.
    The supervisor ends it too when the test run is killed: its standard input closes then.
    Raises: RuntimeError with the end of the log when it stops, or is not ready in ``timeout_s``.
    """
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-S", str(SUPERVISOR), *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    try:
        _wait(process, ready, f"{log}: {Path(command[0]).name}", timeout_s)
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{error}; the end of its log:\n{_tail(log)}") from None
    finally:
        if kill and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait(END_S)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on, all different: held open together until the last is known."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _wait(process: subprocess.Popen, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended before it was ready, status {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready in {timeout_s:g} s")
        time.sleep(0.1)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
