"""Taking subjects out of the tap's own logs on this machine, as far as they are committed and plain.

A record is blanked, byte for byte, in a copy of its file that takes the file's place: lines and offsets stay what they
were, so that windows which have read a part of it go on where they were. What is being written, sealed, packed or of
another's making is left alone, and told.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts import publish
from pipeline.canonical import named_subject
from pipeline.collect_config import SourceConfig
from pipeline.errors import ConfigError, SlipstreamError
from pipeline.sources import Record, Source, Unreadable, find_sources, read_records
from pipeline.sources.stores import is_open, is_remote
from pipeline.split import SplitKey
from pipeline.windows import forget_open

# As serving/tap/log_files.py calls them once they are committed.
_COMMITTED = re.compile(r"traffic-[A-Za-z0-9.-]+-\d+-\d{13}\.jsonl")

_WAIT = "it is being written: erase again when it is committed (SLIPSTREAM_TAP_FILE_MINUTES)"

logger = logging.getLogger("slipstream")


@dataclass
class Logs:
    """What was done to the logs."""

    records: int = 0
    """Taken out."""
    left: dict[str, int] = field(default_factory=dict)
    """File → records of these subjects that are still in it."""
    unread: list[str] = field(default_factory=list)
    """Files on this machine that could not be looked into, and object storage, which is not."""

    def lines(self) -> list[str]:
        """For people."""
        left = [
            f"{file}: {n} records; {_WAIT if is_open(file) else 'no log of the tap: erase them there'}"
            for file, n in sorted(self.left.items())
        ]
        return [
            *([f"{self.records} records blanked in the tap's logs"] if self.records else []),
            *left,
            *(f"{file}: not searched to its end; it goes by its own time to live" for file in self.unread),
        ]


def erase_from_logs(
    root: Path, sources: Sequence[Path | str | SourceConfig], key: SplitKey, subjects: Collection[str]
) -> Logs:
    """Blank the records of these subjects (keyed hashes) in the tap's committed logs.

    Killed at any line, the same call goes on. A window that was opened on a file which changes, and never finished, is
    opened anew by the next run.
    """
    places = [entry.path if isinstance(entry, SourceConfig) else entry for entry in sources]
    done = Logs(unread=[str(place) for place in places if is_remote(str(place))])
    for source in _found([entry for entry, place in zip(sources, places, strict=True) if not is_remote(str(place))]):
        if _COMMITTED.fullmatch(Path(source.location).name):
            done.records += _blank(Path(source.location), source.name, root, key, subjects)
        else:
            _look_into(source, key, subjects, done)
    return done


def _found(sources: Sequence[Path | str | SourceConfig]) -> list[Source]:
    found: dict[str, Source] = {}
    for entry in sources:
        try:
            found.update((source.location, source) for source in find_sources([entry]))
        except ConfigError as error:  # a folder that is gone, or empty, holds nothing of anybody
            logger.info("erase: %s", error)
    return list(found.values())


def _look_into(source: Source, key: SplitKey, subjects: Collection[str], done: Logs) -> None:
    count, is_whole = 0, True
    try:
        for one in read_records(source):
            is_whole &= not (isinstance(one, Unreadable) and one.reason == "file_cut")
            count += isinstance(one, Record) and _is_of(one.body, key, subjects)
    except SlipstreamError as error:  # gone since it was listed, or sealed with a key that is not here
        logger.warning("erase: %s", error)
        is_whole = False
    if count:
        done.left[source.location] = count
    if not is_whole:
        done.unread.append(source.location)


def _blank(path: Path, name: str, root: Path, key: SplitKey, subjects: Collection[str]) -> int:
    """Write the file anew where it holds records of these subjects; how many."""
    try:
        with open(path, "rb") as file:
            lines = [number for number, line in enumerate(file) if _is_of(_parsed(line), key, subjects)]
        if not lines:
            return 0
        forget_open(root, name)
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of a run that was killed
            leftover.unlink(missing_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with open(path, "rb") as file, open(temporary, "wb", opener=_closed) as copy:
            copy.writelines(_without(file, frozenset(lines)))
            copy.flush()
            os.fsync(copy.fileno())
        shutil.copystat(path, temporary)  # the tap deletes by age
        publish(temporary, path)
    except FileNotFoundError:  # the tap deletes what is older than its time to live
        return 0
    logger.info("erase: %s: %d records blanked", path, len(lines))
    return len(lines)


def _without(lines: Iterator[bytes], gone: frozenset[int]) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        yield b" " * (len(line) - 1) + b"\n" if number in gone else line


def _closed(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.strip(b"\0 \t\r\n"))  # as it is read: after a hole that a crash left
    except (ValueError, RecursionError):  # no record of the tap's: it reads what it writes
        return None


def _is_of(body: Any, key: SplitKey, subjects: Collection[str]) -> bool:
    if not isinstance(body, dict) or (named := named_subject(body)) is None:
        return False
    return key.hash("conversation", named) in subjects
