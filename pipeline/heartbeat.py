"""A sign of life in a file: who waits for other processes learns that they failed, ended, or died without a word."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Self

from pipeline.errors import StageError

logger = logging.getLogger("slipstream")

PERIOD_S = 0.5
LOG_EVERY_S = 60.0


class Heartbeat:
    """Beats for as long as the block runs, or until ``end``; what ended it stays in the file."""

    def __init__(self, path: Path):
        self._path, self._beats, self._ended = path, 0, ""
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def ended(self) -> str:
        """Why it ended; empty while it goes on."""
        return self._ended

    def end(self, why: str) -> None:
        """Tell everyone who waits that nothing comes any more. The first reason stands."""
        with self._lock:
            if not self._ended:
                self._ended = why
                self._write()
        self._stopped.set()

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end("it is over")
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            with self._lock:
                if not self._ended:
                    self._beats += 1
                    self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps({"beats": self._beats, "pid": os.getpid(), "ended": self._ended}))
        os.replace(temporary, self._path)


class Watch:
    """What one waiting process sees of a heartbeat. Only changes count, so clocks need not agree."""

    def __init__(self, path: Path, *, timeout_s: float):
        self._path, self._timeout_s = path, timeout_s
        self._last: Any = None
        self._changed = self._started = self._logged = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._started

    def ended(self) -> str:
        """Why the other side ended, or empty while it is alive.

        Raises: StageError when it has given no sign of life for the timeout.
        """
        now = time.monotonic()
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            found = None
        if found and found["ended"]:
            return found["ended"]
        if found != self._last:
            self._last, self._changed = found, now
        if now - self._changed > self._timeout_s:
            raise StageError(
                f"{self._path}: no sign of life for {self._timeout_s:.0f} s from the process that leads this run "
                f"(pid {found['pid'] if found else 'unknown'}); it died. Run the stage again: what is there is used"
            )
        return ""

    def log(self, waiting_for: str) -> None:
        """Say now and then that one still waits."""
        if time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            logger.info("waiting for %s for %.0f s", waiting_for, self.waited_s)
