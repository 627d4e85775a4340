"""Who is in charge of a fleet's rollouts: one process at a time, whatever machine it is on.

Each term is a numbered file under the run root, made by a hard link, which only one of two can win. Its owner keeps a
counter in it going. A term is over when its process said so, is gone (on the machine where that can be seen), or left
its counter as it is for a while. An owner who was taken for dead finds a newer term before it writes again.

Whose turn it is to retrain is another question, with another answer (pipeline/lease.py says why there are two).
"""

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.registry.alias_log import actor
from pipeline.artifacts import write_durably
from pipeline.errors import StageError
from pipeline.processes import began, here

logger = logging.getLogger("slipstream")

PERIOD_S = 1.0
SILENT_S = 15.0
"""On another machine: a counter that stands for so long belongs to a dead process."""


class InChargeError(StageError):
    """Another process is in charge."""


@dataclass(frozen=True)
class Term:
    """One process's turn."""

    path: Path
    number: int

    def require(self) -> None:
        """Raises: StageError when another process has taken over."""
        if (newest := _newest(self.path.parent)) != self.number:
            raise StageError(
                f"{self.path.parent}: term {newest} has begun, another process took this one (term {self.number}) for "
                "dead and goes on with the rollout; this one stops here"
            )


@contextmanager
def in_charge(root: Path, what: str, *, gives_way: bool = False, wait_s: float = 0.0) -> Iterator[Term]:
    """This process's term, for as long as the block runs.

    A term that ``gives_way`` is waited for by others, for ``wait_s`` at most. Raises: InChargeError naming who is in
    charge.
    """
    folder = Path(root) / "in_charge"
    folder.mkdir(parents=True, exist_ok=True)
    newest = _newest_that_is_over(folder, wait_s)
    term = Term(_path(folder, newest + 1), newest + 1)
    body = {"what": what, "actor": actor(), "host": here(), "pid": os.getpid(), "began": began(os.getpid())}
    body |= {"at": datetime.now(UTC).isoformat(timespec="seconds"), "beats": 0, "over": False}
    body["gives_way"] = gives_way
    _make(term.path, body)
    for path in folder.glob("*.json"):
        if path.stem.isdigit() and int(path.stem) < newest:
            path.unlink(missing_ok=True)
    stopped = threading.Event()
    thread = threading.Thread(target=_beat, args=(term, body, stopped), name="in charge", daemon=True)
    thread.start()
    try:
        yield term
    finally:
        stopped.set()
        thread.join()
        with contextlib.suppress(OSError):  # a full disk: the process is gone soon, and that is seen as well
            _write(term.path, {**body, "over": True})


def who_is_in_charge(root: Path) -> str | None:
    """Who has a term under a root, in words; None where nobody has said so, or died on this machine."""
    owner = _present(Path(root) / "in_charge")
    return None if owner is None else _told(owner)


def sign_of_life(root: Path) -> tuple[int, int] | None:
    """What differs from look to look, some seconds apart, while who is in charge is alive; None where nobody is."""
    folder = Path(root) / "in_charge"
    owner = _present(folder)
    return None if owner is None else (_newest(folder), owner["beats"])


def _present(folder: Path) -> dict[str, Any] | None:
    """The newest term, unless it is over, or its process gone from this machine."""
    newest = _newest(folder)
    owner = _owner(_path(folder, newest)) if newest else None
    return None if owner is None or owner["over"] or _is_gone(owner) else owner


def _newest_that_is_over(folder: Path, wait_s: float) -> int:
    """The number of the last term, 0 before the first. Raises: InChargeError while it goes on."""
    deadline, told = time.monotonic() + wait_s, False
    while True:
        newest = _newest(folder)
        owner = _owner(_path(folder, newest)) if newest else None
        if owner is None or not _is_alive(_path(folder, newest), owner):
            return newest
        if not owner["gives_way"] or time.monotonic() >= deadline:
            raise InChargeError(_refusal(owner))
        if not told:
            logger.info("deploy: %s; waiting until it has ended", _told(owner))
        told = True
        time.sleep(PERIOD_S / 4)


def _beat(term: Term, body: dict[str, Any], stopped: threading.Event) -> None:
    beats = 0
    while not stopped.wait(PERIOD_S):
        beats += 1
        try:
            _write(term.path, {**body, "beats": beats})
        except OSError as error:
            logger.warning("deploy: %s could not be written (%s)", term.path, error)


def _is_alive(path: Path, owner: dict[str, Any]) -> bool:
    if owner["over"] or _is_gone(owner):
        return False
    if owner["host"] == here():
        return True
    logger.info("deploy: %s; waiting %.0f s for a sign of life", _told(owner), SILENT_S)
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(PERIOD_S / 4)
        now = _owner(path)
        if now is None or now["over"]:
            return False
        if now["beats"] != owner["beats"]:
            return True
    logger.warning("deploy: %s gave no sign of life; going on in its place", _told(owner))
    return False


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether it is known to have ended: its machine is this one, and it is not there."""
    return owner["host"] == here() and began(owner["pid"]) != owner["began"]


def _refusal(owner: dict[str, Any]) -> str:
    return (
        f"{_told(owner)}; `slipstream deploy --pause`, `--resume` and `--abort` reach it, `slipstream status` shows "
        "how far it is"
    )


def _told(owner: dict[str, Any]) -> str:
    return (
        f"{owner['what']}: another process is in charge, pid {owner['pid']} on {owner['host'].split()[0]}, started by "
        f"{owner['actor']} at {owner['at']}"
    )


def _newest(folder: Path) -> int:
    return max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()), default=0)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _make(path: Path, body: dict[str, Any]) -> None:
    temporary = _temporary(path)
    write_durably(temporary, json.dumps(body).encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        owner = _owner(path)
        raise InChargeError(_refusal(owner) if owner else f"{path}: taken in this moment; run the command again")
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, body: dict[str, Any]) -> None:
    temporary = _temporary(path)
    temporary.write_text(json.dumps(body))
    os.replace(temporary, path)


def _temporary(path: Path) -> Path:
    """Two containers may share a disk and have the same process id."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")


def _owner(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise StageError(f"{path}: not readable; remove it if no deploy is running")
