"""New records of logs that grow: each is read once, whatever is committed, renamed or restarted meanwhile.

A plain file is read on from a byte, a part at a time. A packed or sealed one can only be read from its beginning: it is
read again when it has grown, without the records that were there. Nothing is hashed, so that a look at gigabytes of old
logs is cheap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.collect_config import SourceConfig
from pipeline.sources import Piece, Record, Unreadable, read_piece
from pipeline.sources.found import list_sources, whole_lines
from pipeline.sources.pieces import Range
from pipeline.sources.stores import committed_name
from pipeline.sources.streams import opener_of

PART_BYTES = 32 << 20


@dataclass(frozen=True)
class Position:
    """How far a file was read."""

    size_bytes: int
    """Of the file, or of its whole lines."""
    records: int = 0
    """Read of a packed file."""


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
        end = stored.size_bytes if is_packed else whole_lines(stored)
        # A file that was blanked or cut keeps its lines' places; one that is shorter holds nothing new.
        if end <= known.size_bytes:
            continue
        start, stop = (0, end) if is_packed else (known.size_bytes, min(known.size_bytes + PART_BYTES, end))
        place = Range(stored.location, name, settings, end, start, stop, 0)
        found.append(Unread(key, place, known.records, known))
    return found


def read(new: Unread, *, max_line_bytes: int) -> Iterator[Record | Unreadable]:
    """The new records of a part, and what cannot be read as one. Raises: StageError when the file is gone."""
    for number, record in enumerate(read_piece(Piece((new.range,)), max_line_bytes=max_line_bytes)):
        if number >= new.skip and not _is_end_of_open_file(record, new):
            yield record


def after(new: Unread, num_read: int) -> Position:
    """The position once all of a part was read: so many records."""
    return Position(new.range.stop, new.skip + num_read if new.is_packed else 0)


def broken_off(new: Unread, num_read: int) -> Position:
    """The position where reading a packed file failed after so many records: the next look goes on with the next."""
    return Position(new.before.size_bytes, new.skip + num_read)


def kept(positions: Positions, entries: Sequence[Path | str | SourceConfig]) -> dict[str, Position]:
    """The positions of files that are still there."""
    there = {committed_name(stored.location) for stored, _, _ in list_sources(entries)}
    return {key: position for key, position in positions.items() if key in there}


def _is_end_of_open_file(record: Record | Unreadable, new: Unread) -> bool:
    """A packed file breaks off where it goes on being written: that is no damage, and no record of it."""
    return isinstance(record, Unreadable) and record.reason == "file_cut" and new.is_packed
