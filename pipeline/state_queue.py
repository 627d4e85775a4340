"""Hidden states as a bounded queue on disk: engines put parts in, a trainer takes them out, each part once.

The parts have one order, which everyone knows. Engines do the earliest part that nobody is at, once there is room for
it; the trainer waits for the parts it needs next, and releases them from the front when a durable checkpoint covers
them. So the room that a part needs is never held by a later one, and neither side can wait for the other for ever.

    part-00007.json  rows-00007.parquet  states-00007-00.arrow    a committed part, as in a cache
    .claim-00007     locked while an engine is at the part; a byte for every try
    released.json    how many parts are done with, and what was counted and rejected in them
    heartbeat.json   of the process that leads the run

Everything survives a kill at any moment: committed parts are used, anything else is removed by ``recover``.
"""

import fcntl
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from pipeline.artifacts import Frozen, write_durably
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.heartbeat import Watch
from pipeline.shards import Part, part_path, read_part

MAX_TRIES = 3  # a part that has taken so many engines down is given up
POLL_S = 0.1
_PART_FILE = re.compile(r"-(\d{5,})\b")
_CLAIM = ".claim"


class Released(Frozen):
    """What has passed through: parts at the front of the order, their summed counts and their rejected rows."""

    parts: int = 0
    counts: dict[str, int] = {}
    rejects: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Admitted:
    """A part that an engine may do now."""

    index: int
    tries: int


@dataclass(frozen=True)
class StateQueue:
    """The queue in a folder; any number of processes may hold one. It is picklable.

    Its files, and what is promised to parts in the making, never take more than ``max_bytes``.
    """

    folder: Path
    max_bytes: int
    expected: Mapping[int, int]
    """Part → the bytes it will take at most, in the order that the parts are trained on."""
    timeout_s: float = 60.0
    """Without a sign of life for so long, the process that leads the run counts as dead."""

    def __post_init__(self) -> None:
        for index, expected in self.expected.items():
            if expected > self.max_bytes:
                raise ConfigError(
                    f"{self.folder}: part {index} takes about {expected} bytes of states, the queue has room for "
                    f"{self.max_bytes}; raise capture.max_bytes or lower regenerate.rows_per_part"
                )

    @property
    def heartbeat(self) -> Path:
        """The file that the leading process beats in."""
        return self.folder / "heartbeat.json"

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The parts as they are trained on."""
        return tuple(self.expected)

    def recover(self) -> None:
        """Remove what a killed run left that is no committed part. Only while nobody else is here.

        Committed parts stay as far as everything before them fits, too: the budget may be smaller than it was.

        Raises: StageError when an engine of the killed run lives on.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._wait_for_engines()
        keep, taken = {"released.json", "part-commits.lock", ".lock"}, 0
        for index in self.order[self.released().parts :]:
            part = self._whole_part(index)
            names = {part_path(self.folder, index).name, *(shard.path for shard in part.shards)} if part else set()
            taken += sum(_size(self.folder / name) for name in names) if part else self.expected[index]
            if taken > self.max_bytes:
                break
            keep |= names
        for path in self.folder.iterdir():
            if path.name not in keep:
                path.unlink()

    def missing(self) -> list[int]:
        """Parts that still have to be put in, in order."""
        return list(self._missing())

    def released(self) -> Released:
        """What has been released so far."""
        try:
            return Released.model_validate_json((self.folder / "released.json").read_text())
        except FileNotFoundError:
            return Released()

    @contextmanager
    def admitted(self) -> Iterator[Admitted | None]:
        """The earliest part that nobody is at, as soon as there is room; None where nothing is left or all has ended.

        Raises: StageError when the leading process died, or a part has taken too many engines down.
        """
        watch = Watch(self.heartbeat, timeout_s=self.timeout_s)
        while True:
            if watch.ended() or not (found := self._admit()):
                yield None
                return
            admitted, claim = found
            if admitted is not None:
                break
            watch.log("room in the queue of states")
            time.sleep(POLL_S)
        try:
            yield admitted
        finally:
            claim.close()

    def wait_for(self, parts: Sequence[int]) -> float:
        """Wait until all of these parts are in; the seconds it took.

        Raises: StageError when they cannot come any more: the engines gave up, or the leading process died.
        """
        watch = Watch(self.heartbeat, timeout_s=self.timeout_s)
        done = self.order[: self.released().parts]
        if gone := sorted(set(parts) & set(done)):
            raise StageError(f"{self.folder}: parts {gone} were trained on and removed; start this run anew without it")
        while missing := [index for index in parts if not part_path(self.folder, index).exists()]:
            if ended := watch.ended():
                raise StageError(f"{self.folder}: the states of parts {missing} will not come: {ended}")
            watch.log(f"the states of parts {missing}")
            time.sleep(POLL_S)
        return watch.waited_s

    def rejects_of(self, parts: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these committed parts that were rejected."""
        return [one for index in parts for one in read_part(part_path(self.folder, index)).rejects]

    def release(self, num_parts: int) -> None:
        """Remove the first so many parts. Only when a durable checkpoint covers every row of them.

        Parts that are not here, since somebody removed the queue, are taken for done with, too.
        """
        with self._locked():
            before = self.released()
            leaving = self.order[before.parts : num_parts]
            if leaving:
                parts = [part for index in leaving if (part := self._whole_part(index))]
                counts = Counter(before.counts)
                for part in parts:
                    counts.update(part.counts)
                rejects = (*before.rejects, *(reject for part in parts for reject in part.rejects))
                after = Released(parts=num_parts, counts=dict(counts), rejects=rejects)
                write_durably(self.folder / "released.json", after.model_dump_json().encode())
            # Whatever a release that was killed has left, too: it would take the room of what comes.
            done = set(self.order[: max(num_parts, before.parts)])
            self._remove(lambda _, index: index in done)

    def bytes_taken(self) -> dict[int, int]:
        """Part → bytes of its files or, while an engine is at it, what they may still come to."""
        at_work = [index for path, index in self._files() if path.name.startswith(_CLAIM) and _size(path)]
        # Before the sizes: a part that is committed in between is then counted under its promise, never too low.
        at_work = [index for index in at_work if not part_path(self.folder, index).exists()]
        found: Counter[int] = Counter()
        for path, index in self._files():
            found[index] += _size(path)
        return dict(found) | {index: max(found[index], self.expected[index]) for index in at_work}

    def _admit(self) -> tuple[Admitted | None, BinaryIO | None] | None:
        """The part and its claim; (None, None) where it must wait; None where no part is left to begin."""
        with self._locked():
            for index in self._missing():
                if (claim := self._claim(index)) is None:  # another engine is at it
                    continue
                self._remove(lambda path, of: of == index and not path.name.startswith(_CLAIM))  # noqa: B023
                others = sum(size for of, size in self.bytes_taken().items() if of != index)
                if others + self.expected[index] > self.max_bytes:
                    claim.close()
                    return None, None
                claim.write(b"x")
                claim.flush()
                if claim.tell() > MAX_TRIES:
                    claim.close()
                    raise StageError(
                        f"{self.folder}: part {index} was begun {MAX_TRIES} times and never finished; it takes engines "
                        "down, or they fail on it. Look at the engines' logs, then run the stage again"
                    )
                return Admitted(index, claim.tell()), claim
        return None

    def _claim(self, index: int) -> BinaryIO | None:
        """The part's claim, locked for as long as it is open; None where it is locked already."""
        claim = open(self.folder / f"{_CLAIM}-{index:05d}", "ab")  # noqa: SIM115
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            return None
        return claim

    def _wait_for_engines(self) -> None:
        """Ray ends the engines of a run whose leading process was killed, but not at once."""
        deadline = time.monotonic() + self.timeout_s
        for index in [index for path, index in self._files() if path.name.startswith(_CLAIM)]:
            while (claim := self._claim(index)) is None:
                if time.monotonic() > deadline:
                    raise StageError(
                        f"{self.folder}: an engine of an earlier run is still at part {index}; end it, then run again"
                    )
                time.sleep(POLL_S)
            claim.close()

    def _missing(self) -> Iterator[int]:
        return (i for i in self.order[self.released().parts :] if not part_path(self.folder, i).exists())

    def _whole_part(self, index: int) -> Part | None:
        try:
            return read_part(part_path(self.folder, index))
        except (FileNotFoundError, SchemaError, ValidationError):
            return None

    def _files(self) -> Iterator[tuple[Path, int]]:
        for path in self.folder.iterdir():
            if match := _PART_FILE.search(path.name):
                yield path, int(match.group(1))

    def _remove(self, unwanted: Callable[[Path, int], bool]) -> None:
        for path, index in list(self._files()):
            if unwanted(path, index):
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # renamed or removed in this moment
        return 0
