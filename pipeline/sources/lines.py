"""The lines of a range of a file, each with its number and where it begins, in memory for one line."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 32 << 20
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line, with its line end. ``number`` counts from 1 in the whole file, ``offset`` bytes before it."""

    number: int
    offset: int
    raw: bytes | None
    """None: longer than the limit."""
    is_whole: bool
    """Whether it has a line end: the last one of a file may have none."""


def lines(file: BinaryIO, *, start: int, stop: int | None, newlines_before: int, max_line_bytes: int) -> Iterator[Line]:
    """The lines that begin in [start, stop), of a file that stands one byte before ``start``, or at its beginning."""
    number, offset = newlines_before + 1, start
    if start:
        offset = _after_newline(file, start - 1)
        number += offset > start
    while stop is None or offset < stop:
        raw = file.readline(max_line_bytes + 1)
        length = len(raw)
        if length > max_line_bytes:
            length += _rest(file, raw)
        if not length:
            return
        yield Line(number, offset, raw if length <= max_line_bytes else None, raw.endswith(b"\n"))
        number, offset = number + 1, offset + length


def _after_newline(file: BinaryIO, offset: int) -> int:
    """The offset after the next newline, or of the end."""
    while raw := file.readline(_SKIP_BYTES):
        offset += len(raw)
        if raw.endswith(b"\n"):
            break
    return offset


def _rest(file: BinaryIO, raw: bytes) -> int:
    """Bytes to the end of a line of which ``raw`` is the beginning."""
    length = 0
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(_SKIP_BYTES)
        length += len(raw)
    return length
