"""New records of logs that grow: each is read once, whatever is committed, renamed or restarted meanwhile.

A plain file is read on from a byte, a part at a time. A packed or sealed one can only be read from its beginning: it is
read again when it has grown, without the records that were there. Of a file that has changed, the beginning is hashed,
and no more, so that a look at gigabytes of old logs is cheap: one that begins otherwise is another file in the place of
one that was rotated away, and is read whole.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.collect_config import SourceConfig
from pipeline.errors import StageError
from pipeline.sources import Piece, Record, Unreadable, read_piece
from pipeline.sources.found import list_sources, whole_lines
from pipeline.sources.pieces import Range
from pipeline.sources.stores import Stored, committed_name, is_open, opened
from pipeline.sources.streams import opener_of

PART_BYTES = 32 << 20
_BEGINNING = 1024  # bytes of a plain file's first line, or of a packed file


@dataclass(frozen=True)
class Position:
    """How far a file was read."""

    size_bytes: int
    """Of the file, or of its whole lines."""
    records: int = 0
    """Read of a packed file."""
    beginning: str = ""
    """What it begins with: so many bytes, and their hash."""


@dataclass(frozen=True)
class Unread:
    """What is new in a file."""

    key: str
    """The file's place once it is committed: committing it changes nothing."""
    range: Range
    skip: int
    """Records at its beginning that were read before."""
    before: Position

    @property
    def is_packed(self) -> bool:
        """Whether it can only be read from its beginning."""
        return opener_of(self.range.name) is not None


Positions = Mapping[str, Position]


def unread(entries: Sequence[Path | str | SourceConfig], positions: Positions) -> list[Unread]:
    """What is new, the next part of every file, in the order of their names. Raises: ConfigError for a missing path."""
    found = []
    for stored, settings, name in list_sources(entries):
        key = committed_name(stored.location)
        known = positions.get(key, Position(0))
        is_packed = opener_of(name) is not None
        if stored.size_bytes == known.size_bytes or not (new := _new(stored, known, is_packed=is_packed)):
            continue
        known, end = new
        start, stop = (0, end) if is_packed else (known.size_bytes, min(known.size_bytes + PART_BYTES, end))
        place = Range(stored.location, name, settings, end, start, stop, 0)
        found.append(Unread(key, place, known.records, known))
    return found


def _new(stored: Stored, known: Position, *, is_packed: bool) -> tuple[Position, int] | None:
    """From where a file is new, and to where; None where nothing is.

    One that is shorter than it was and begins the same holds nothing new: its lines were cut.
    """
    try:
        end = stored.size_bytes if is_packed else whole_lines(stored)
        if known.beginning and not _begins_the_same(stored, known.beginning):
            known = Position(0)
        if end <= known.size_bytes:
            return None
        return Position(known.size_bytes, known.records, known.beginning or _beginning(stored, end, is_packed)), end
    except StageError:  # gone since it was listed, or not to be opened: reading it tells
        return known, stored.size_bytes


def _beginning(stored: Stored, end: int, is_packed: bool) -> str:
    with opened(stored.location, stop=min(end, _BEGINNING)) as file:
        head = file.read()
    head = head if is_packed else head.partition(b"\n")[0]
    return f"{len(head)}:{hashlib.sha256(head).hexdigest()}"


def _begins_the_same(stored: Stored, beginning: str) -> bool:
    """Whether it is the file that began so; a first line that was blanked says no other."""
    size, _, digest = beginning.partition(":")
    if stored.size_bytes < int(size):
        return False
    with opened(stored.location, stop=int(size)) as file:
        head = file.read()
    return hashlib.sha256(head).hexdigest() == digest or (int(size) > 0 and not head.strip(b" "))


def read(new: Unread, *, max_line_bytes: int) -> Iterator[Record | Unreadable]:
    """The new records of a part, and what cannot be read as one. Raises: StageError when the file is gone."""
    for number, record in enumerate(read_piece(Piece((new.range,)), max_line_bytes=max_line_bytes)):
        if number >= new.skip and not (is_cut(record) and is_open(new.range.location)):
            yield record


def is_cut(record: Record | Unreadable) -> bool:
    """Whether it is no record but the place where a packed file breaks off: what is added there is read later."""
    return isinstance(record, Unreadable) and record.reason == "file_cut"


def after(new: Unread, num_read: int) -> Position:
    """The position once all of a part was read: so many records."""
    return Position(new.range.stop, new.skip + num_read if new.is_packed else 0, new.before.beginning)


def broken_off(new: Unread, num_read: int) -> Position:
    """The position where reading a packed file failed after so many records: the next look goes on with the next."""
    return Position(new.before.size_bytes, new.skip + num_read, new.before.beginning)


def kept(positions: Positions, entries: Sequence[Path | str | SourceConfig]) -> dict[str, Position]:
    """The positions of files that are still there."""
    there = {committed_name(stored.location) for stored, _, _ in list_sources(entries)}
    return {key: position for key, position in positions.items() if key in there}
