"""Whose turn it is under a run root: one retraining at a time, on whatever machine, by whatever scheduler.

A lease is a small file with the time until which it holds. Who works renews it; who died stops doing so. On the machine
where a process took it, that process is looked at as well, so that a run which was killed there blocks nobody.

The clocks of the machines that share a root must agree to within a minute.
"""

import fcntl
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from pipeline.artifacts import Frozen, write_durably
from pipeline.errors import StageError

RUN = "SLIPSTREAM_RUN"
"""Environment variable: the run that a command is a stage of."""
RENEWED_S = 300.0
"""What a working process asks for at a time; it renews five times as often."""

logger = logging.getLogger("slipstream")


class Lease(Frozen):
    """One run's turn."""

    run: str
    host: str
    """The machine, and on it the space that process ids are told apart in: a container has one of its own."""
    pid: int | None
    """The process that the run lives and dies with; None for one whose stages are processes of a scheduler."""
    began: int = 0
    """When that process began, in clock ticks since the machine did: its number may be another's by now."""
    until: float
    """Seconds since 1970. After it the lease is anybody's."""

    @property
    def is_over(self) -> bool:
        """Whether its time has come, or its process is known to have ended."""
        gone = self.pid is not None and self.host == _here() and _began(self.pid) != self.began
        return gone or time.time() > self.until


def holder(root: Path) -> Lease | None:
    """The lease that holds now; None where it is nobody's turn."""
    found = _read(_path(root))
    return None if found is None or found.is_over else found


def take(root: Path, run: str, *, seconds: float = RENEWED_S, with_process: bool = True) -> Lease:
    """The lease of a run, taken or taken again. ``with_process``: it ends with this process, however that ends.

    Raises: StageError when it is another run's turn: whose, and until when.
    """
    with _locked(root):
        found = _read(_path(root))
        if found is not None and found.run != run:
            if not found.is_over:
                raise StageError(_taken(root, found))
            logger.warning("the run %s on %s ended without a word; %s takes its place", found.run, found.host, run)
        pid = os.getpid() if with_process else None
        began = _began(pid) if pid is not None else 0
        lease = Lease(run=run, host=_here(), pid=pid, began=began or 0, until=time.time() + seconds)
        _write(root, lease)
    return lease


def renew(root: Path, run: str, *, seconds: float = RENEWED_S) -> None:
    """Have a run's lease hold for so long from now, or as long as its process is due to renew it.

    Raises: StageError when it is not, or no longer, its turn.
    """
    with _locked(root):
        found = _read(_path(root))
        if found is None or found.run != run:
            now = f"; it is the turn of {found.run}" if found else ""
            raise StageError(f"{root}: run {run} has no lease{now}. Begin a new run: it uses what is complete")
        if found.pid is not None:
            seconds = min(seconds, RENEWED_S)
        _write(root, found.model_copy(update={"until": max(found.until, time.time() + seconds)}))


def release(root: Path, run: str) -> bool:
    """End a run's turn; whether it was its turn."""
    with _locked(root):
        found = _read(_path(root))
        if found is None or found.run != run:
            return False
        _path(root).unlink()
        return True


def outlive(root: Path, *, period_s: float = 1.0) -> bool:
    """Whether nobody has a lease: neither now, nor once one has run out whose process died on another machine.

    False as soon as it is renewed; and at once for a scheduler's run, which may be quiet for long.
    """
    first = found = holder(root)
    if first is None or first.pid is None:
        return first is None
    logger.info("run %s has a lease; waiting for a sign of life, %.0f s at most", first.run, first.until - time.time())
    while found is not None:
        if (found.run, found.until) != (first.run, first.until):
            return False
        time.sleep(period_s)
        found = holder(root)
    return True


def require_turn(root: Path) -> None:
    """Raises: StageError when it is the turn of another run than this process is a stage of."""
    found = holder(root)
    if found is not None and found.run != os.environ.get(RUN):
        raise StageError(_taken(root, found))


@contextmanager
def turn(root: Path, *, seconds: float = RENEWED_S) -> Iterator[str]:
    """A run's turn for as long as the block runs: this process's own, or the one that it is a stage of.

    Raises: StageError when it is another run's turn.
    """
    if run := os.environ.get(RUN):
        with _renewing(root, run, seconds=seconds):
            yield run
        return
    run = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    take(root, run, seconds=seconds)
    os.environ[RUN] = run
    try:
        with _renewing(root, run, seconds=seconds):
            yield run
    finally:
        del os.environ[RUN]
        release(root, run)


@contextmanager
def stage_of_a_run(root: Path, *, seconds: float = RENEWED_S) -> Iterator[None]:
    """A stage that is run by hand, when it is nobody's turn, or as a part of the run that SLIPSTREAM_RUN names.

    Raises: StageError when it is another run's turn.
    """
    if RUN not in os.environ:
        require_turn(root)
    with kept(root, seconds=seconds):
        yield


@contextmanager
def kept(root: Path, *, seconds: float = RENEWED_S) -> Iterator[None]:
    """A command that waits for no run; the one that SLIPSTREAM_RUN names, if any, keeps its turn meanwhile.

    Raises: StageError when that run has lost its turn.
    """
    if run := os.environ.get(RUN):
        with _renewing(root, run, seconds=seconds):
            yield
    else:
        yield


@contextmanager
def _renewing(root: Path, run: str, *, seconds: float) -> Iterator[None]:
    renew(root, run, seconds=seconds)
    stopped = threading.Event()

    def again() -> None:
        while not stopped.wait(seconds / 5):
            try:
                renew(root, run, seconds=seconds)
            except (OSError, StageError) as error:  # set_current refuses what comes of it
                logger.error("%s", error)

    thread = threading.Thread(target=again, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with suppress(StageError):  # for the next stage of the run; the thread has said what is wrong
            renew(root, run, seconds=seconds)


def _taken(root: Path, lease: Lease) -> str:
    left = max(0, lease.until - time.time())
    return (
        f"{root}: run {lease.run} is under way on {lease.host.split()[0]}, and its lease holds for {left:.0f} s unless "
        f"it is renewed. Wait for it; if it is known to be dead: slipstream due --end {lease.run}"
    )


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    folder = _path(root).parent
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lease.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _path(root: Path) -> Path:
    return Path(root) / "retrainings" / "lease.json"


def _read(path: Path) -> Lease | None:
    try:
        return Lease.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
    except (ValidationError, ValueError):
        raise StageError(f"{path}: not a readable lease; remove it if no run is under way")


def _write(root: Path, lease: Lease) -> None:
    write_durably(_path(root), lease.model_dump_json(indent=1).encode())


def _here() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _began(pid: int) -> int | None:
    """When a process of this machine began; None where there is none of this number."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            told = file.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if told[0] == "Z" else int(told[19])
