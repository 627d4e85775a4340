"""The log's files: one at a time a process, open under one name and, once whole, committed under another by rename.

    traffic-HOST-PID-MILLISECONDS.open.jsonl    being written, or left by a writer that died
    traffic-HOST-PID-MILLISECONDS.jsonl         whole

and .sealed instead of .jsonl where there is a key. Every complete line (or chunk) of either can be read. The time in
the name is when the file was begun, and what its time to live counts from: no record lives longer, nor does a copy
(.NAME.PID.tmp) that an erasure was killed over. A writer holds a lock on the file it writes, so whoever gets the lock
of an open file knows that its writer is dead.
"""

import errno
import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from serving.tap.sealing import MAGIC, SALT_BYTES, Seal
from serving.tap.settings import LogSettings

FIRST_PAUSE_S, LAST_PAUSE_S = 30.0, 600.0
SWEEP_EVERY_S = 600.0
_OURS = re.compile(r"\.?traffic-[A-Za-z0-9.-]+-\d+-(?P<ms>\d{13})(?P<open>\.open)?\.(jsonl|sealed)(\.\d+\.tmp)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_BYTES = 1 << 20


class TrafficLog:
    """Appends records; a file is begun with the first of them. ``on_event`` gets the names of metrics.EVENTS."""

    def __init__(self, settings: LogSettings, *, on_event: Callable[[str], None], first_pause_s: float = FIRST_PAUSE_S):
        self.settings, self.on_event, self.first_pause_s = settings, on_event, first_pause_s
        self.fd, self.path = -1, None
        self.size = 0
        """Bytes of the open file that are whole records."""
        self._seal: Seal | None = None
        self._begun = self._swept = self._paused_until = 0.0
        self._pause_s = first_pause_s
        self.sweep()

    def write(self, line: bytes) -> str:
        """The outcome (metrics.OUTCOMES) of appending one line, its end included."""
        if time.monotonic() < self._paused_until:
            return "dropped_stopped"
        try:
            if self.fd < 0:
                self._begin()
            self._append(self._seal.chunk(line) if self._seal else line)
            if self.size >= self.settings.file_bytes:
                self.commit()
        except OSError as error:
            self._stop(error)
            return "dropped_disk_full" if error.errno in _FULL else "dropped_write_error"
        self._pause_s = self.first_pause_s
        return "written"

    def tick(self) -> None:
        """Commit a file that is old enough, and sweep the folder from time to time."""
        if self.fd >= 0 and time.monotonic() - self._begun >= self.settings.file_s:
            self.close()
        if time.monotonic() - self._swept >= min(SWEEP_EVERY_S, self.settings.ttl_s / 4):
            self.sweep()

    def commit(self) -> None:
        """Close the open file under its final name. Raises: OSError."""
        if self.fd < 0:
            return
        if self._seal:
            self._append(self._seal.chunk(b""))
        os.fsync(self.fd)
        _rename(self.path, _committed(self.path))
        self._close()
        self.on_event("file_committed")

    def close(self) -> None:
        """Commit what is there, or leave it to be recovered."""
        try:
            self.commit()
        except OSError as error:
            self._stop(error)

    def sweep(self) -> None:
        """Delete the folder's own files that are past their time, and close those that dead writers left open."""
        self._swept = time.monotonic()
        oldest_ms = (time.time() - self.settings.ttl_s) * 1000
        try:
            for path in sorted(self.settings.folder.iterdir()):
                found = _OURS.fullmatch(path.name)
                if found is None or path == self.path:
                    continue
                if int(found["ms"]) < oldest_ms:
                    path.unlink(missing_ok=True)
                    self.on_event("file_expired")
                elif found["open"] and not path.name.startswith(".") and recover(path):
                    self.on_event("file_recovered")
        except OSError:
            self.on_event("sweep_failed")

    def _begin(self) -> None:
        kind = "sealed" if self.settings.key else "jsonl"
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64] or "host"
        name = f"traffic-{host}-{os.getpid()}-{time.time_ns() // 1_000_000}.open.{kind}"
        self.path = self.settings.folder / name
        hidden = self.path.with_name("." + name)
        self.fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # some mounts have no locks; nobody can take the file for a dead writer's there either
            fcntl.flock(self.fd, fcntl.LOCK_EX)
        os.rename(hidden, self.path)  # only now may others come upon it
        self.size, self._begun = 0, time.monotonic()
        self.on_event("file_opened")
        if self.settings.key:
            self._seal = Seal(self.settings.key)
            self._append(self._seal.head)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fd, rest) :]
        self.size += len(data)

    def _stop(self, error: OSError) -> None:
        """Take back a part of a record, commit the file as it is, and write nothing for a while."""
        self.on_event("stopped")
        why = errno.errorcode.get(error.errno, "error")
        print(f"tap: {why}; nothing is written for {self._pause_s:g} s", file=sys.stderr, flush=True)
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        if self.fd >= 0:
            with suppress(OSError):  # readers take whole records alone
                os.ftruncate(self.fd, self.size)  # needs no room
            path = self.path
            self._close()
            with suppress(OSError):  # else a sweep does it later
                if recover(path):
                    self.on_event("file_recovered")

    def _close(self) -> None:
        os.close(self.fd)
        self.fd, self.path, self._seal = -1, None, None


def recover(path: Path) -> bool:
    """Whether an open file was a dead writer's: cut to its whole records and committed, or deleted if it has none."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its writer lives
            return False
        if not os.path.samestat(os.fstat(fd), path.stat()):
            return False
        whole = _whole_chunks(fd) if path.suffix == ".sealed" else _whole_lines(fd)
        if not whole:
            path.unlink()
            return True
        os.ftruncate(fd, whole)
        os.fsync(fd)
        _rename(path, _committed(path))
        return True
    except FileNotFoundError:  # another process was first
        return False
    finally:
        os.close(fd)


def _whole_lines(fd: int) -> int:
    """Bytes up to the last line end."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _READ_BYTES)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _whole_chunks(fd: int) -> int:
    """Bytes up to the end of the last whole chunk, 0 without one. No end mark is made up: readers see the cut."""
    size = os.fstat(fd).st_size
    id_bytes = os.pread(fd, 1, len(MAGIC))
    at = len(MAGIC) + 1 + (id_bytes[0] if id_bytes else 0) + SALT_BYTES
    head = at
    while len(length := os.pread(fd, 4, at)) == 4:
        next_at = at + 4 + int.from_bytes(length, "big")
        if next_at > size or next_at < at + 4 + 16:
            break
        at = next_at
    return at if at > head else 0


def _committed(path: Path) -> Path:
    return path.with_name(path.name.replace(".open.", ".", 1))


def _rename(path: Path, final: Path) -> None:
    os.rename(path, final)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
