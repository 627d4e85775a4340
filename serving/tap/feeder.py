"""Passes exchanges to the writer's process, and starts another one where it dies. Nobody waits for it.

The writer is a process of its own because parsing holds the interpreter's lock: in a thread, it would hold up the
event loop that streams tokens. It gets frames through a pipe and answers each with one line, the outcome; what it was
given and hasn't answered when it dies is counted as lost with it.
"""

import atexit
import contextlib
import fcntl
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from serving.errors import TapError
from serving.tap.exchange import Budget, Exchange, taken
from serving.tap.metrics import Metrics
from serving.tap.sealing import Seal
from serving.tap.settings import TapSettings

logger = logging.getLogger("vllm.slipstream")

QUEUE_SIZE = 1024
PIPE_BYTES = 1 << 20
CHECKOUT = Path(__file__).resolve().parents[2]
FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 1.0, 60.0


class Feeder:
    """A bounded queue and the thread that empties it into the writer. Raises: TapError for a folder it can't make."""

    def __init__(self, settings: TapSettings, metrics: Metrics, budget: Budget):
        self.settings, self.metrics, self.budget = settings, metrics, budget
        _make_folder(settings.log.folder)
        if settings.log.key:
            Seal(settings.log.key)  # says now what is missing
        self.queue: queue.Queue[Exchange | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self.writer: Writer | None = None
        self._not_before, self._back_off_s = 0.0, FIRST_BACK_OFF_S
        self._closing = threading.Event()
        self._start_writer()
        self.thread = threading.Thread(target=self._run, name="slipstream-tap", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def put(self, exchange: Exchange) -> bool:
        """Whether there was room in the queue."""
        if self._closing.is_set():
            return False
        try:
            self.queue.put_nowait(exchange)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Pass on what is queued and have it written, within a bound; what does not fit into it is counted."""
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(None)  # the thread looks at the event too
        self.thread.join(timeout_s)
        lost = 0
        if self.writer:
            stuck = self.thread.is_alive()
            lost = self.writer.num_unanswered if stuck else self.writer.end(deadline - time.monotonic())
        with contextlib.suppress(queue.Empty):
            while True:
                lost += self.queue.get_nowait() is not None
        self.metrics.outcome("dropped_at_shutdown", lost)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not (self._closing.is_set() and self.queue.empty()):
            try:
                exchange = self.queue.get(timeout=0.5)
            except queue.Empty:
                exchange = None
            if self.writer and self.writer.died:
                self._bury_writer()
            if exchange is not None:
                self._pass_on(exchange)
            elif self.writer is None and time.monotonic() >= self._not_before and not self._closing.is_set():
                self._start_writer()

    def _pass_on(self, exchange: Exchange) -> None:
        while self.writer is None and not self._closing.wait(max(0.0, self._not_before - time.monotonic())):
            self._start_writer()
        if self.writer is None:
            self.metrics.outcome("dropped_at_shutdown")
        elif not self.writer.write(pickle.dumps(taken(exchange), pickle.HIGHEST_PROTOCOL)):
            self._bury_writer()
        exchange.generations.clear()  # tasks that outlive the request hold its context, and so this list
        self.budget.released += exchange.size

    def _start_writer(self) -> None:
        try:
            self.writer = Writer(self.settings, self.metrics)
        except OSError:
            self._postpone()

    def _bury_writer(self) -> None:
        if self.writer.num_answered:
            self._back_off_s = FIRST_BACK_OFF_S
        lost = self.writer.end(1.0)
        self.metrics.outcome("dropped_writer_died", lost)
        status, wait_s = self.writer.process.returncode, self._back_off_s
        logger.warning("tap: its writer ended (status %s) with %d records; another in %g s", status, lost, wait_s)
        self.writer = None
        self._postpone()

    def _postpone(self) -> None:
        self._not_before = time.monotonic() + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, LAST_BACK_OFF_S)


class Writer:
    """One writer process, seen from the server. Raises: OSError where it cannot be started."""

    def __init__(self, settings: TapSettings, metrics: Metrics):
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serving.tap.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
        with contextlib.suppress(OSError):  # a system may allow less
            fcntl.fcntl(self.process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.metrics, self.num_sent, self.num_answered = metrics, 0, 0
        self.answers = threading.Thread(target=self._hear, args=(self.process.stdout,), daemon=True)
        self.answers.start()
        metrics.event("writer_started")
        self._send(pickle.dumps(settings))

    @property
    def died(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    @property
    def num_unanswered(self) -> int:
        """Exchanges that no outcome is known of."""
        return self.num_sent - self.num_answered

    def write(self, frame: bytes) -> bool:
        """Whether an exchange's frame went into the pipe; waits while that is full."""
        self.num_sent += 1
        return self._send(frame)

    def end(self, timeout_s: float) -> int:
        """Close the pipe and wait; the number of exchanges that no outcome is known of."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, timeout_s))
        self.answers.join(1.0 if self.died else 0.0)
        return self.num_unanswered

    def _send(self, frame: bytes) -> bool:
        rest = memoryview(len(frame).to_bytes(8, "big") + frame)
        try:
            while rest:
                rest = rest[os.write(self.process.stdin.fileno(), rest) :]
        except OSError:
            return False
        return True

    def _hear(self, answers: IO[bytes]) -> None:
        """Count outcomes, one a line, and events, whose lines begin with a +."""
        for line in _lines(answers):
            if line.startswith("+"):
                self.metrics.event(line[1:])
            else:
                self.num_answered += 1
                self.metrics.outcome(line)


def _lines(stream: IO[bytes]) -> Iterator[str]:
    rest = b""
    while piece := stream.read(4096):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)


def _make_folder(folder: Path) -> None:
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
            folder.chmod(0o700)
        elif folder.stat().st_mode & 0o077:
            logger.warning("tap: %s is open to others than its owner; expected mode 0700", folder)
    except OSError as error:
        raise TapError(f"SLIPSTREAM_TAP_DIR {folder}: {type(error).__name__}; expected a folder that can be written to")
