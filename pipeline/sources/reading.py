"""Lines as records, whatever their neighbours hold: each becomes one, several, or what it cannot be read for."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pipeline.collect_config import SourceConfig
from pipeline.errors import Rejected
from pipeline.sources import times
from pipeline.sources.formats import records_of
from pipeline.sources.found import Source
from pipeline.sources.lines import MAX_LINE_BYTES, Line, lines
from pipeline.sources.pieces import Piece, Range, ranges_of
from pipeline.sources.stores import is_open, opened
from pipeline.sources.streams import CUT, opener_of

_BOM = b"\xef\xbb\xbf"
_MAX_DEPTH = 256  # how deep Python itself reads depends on who calls it

BY_POLICY = ("failed_request", "cache_hit", "other_call_type", "reply_alone", "prompt_not_recorded")
"""Reasons that say what a line is about, and not that it is damaged."""


@dataclass(frozen=True)
class Record:
    """One served request in the shape of the tap's records (formats/), and where it was read."""

    file: str
    line: int
    offset: int
    """Bytes before its line: decompressed ones in a compressed file."""
    body: dict[str, Any]
    part: int = 0
    """Which one of its line's records it is."""
    ts: float | None = None
    """When it was served, in seconds since 1970; None where its log does not say, or says nothing readable."""

    @property
    def place(self) -> str:
        """Where it was read, in words."""
        return place(self.file, self.line, self.part)

    def time(self) -> float:
        """When it was served. Raises: Rejected where that is not known."""
        if self.ts is None:
            raise Rejected("no_time" if self.body.get("ts") in (None, "") else "malformed_time")
        return self.ts


@dataclass(frozen=True)
class Unreadable:
    """What cannot be read as a record, or the place where a file breaks off. ``error`` quotes no text."""

    file: str
    line: int
    offset: int
    reason: str
    error: str
    part: int = 0

    @property
    def place(self) -> str:
        """Where it was read, in words."""
        return place(self.file, self.line, self.part)


def place(file: str, line: int, part: int) -> str:
    """A record's place: the file and its line, and which record of the line where it is not the first."""
    return f"{file}:{line}#{part}" if part else f"{file}:{line}"


def read_piece(piece: Piece, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Record | Unreadable]:
    """Everything that a piece holds, in order, but blank lines.

    A cut compressed file yields what came before the cut, then ``file_cut``. A line of more than ``max_line_bytes`` is
    ``too_long``, and is not held in memory.

    Raises: StageError when a file is gone or has become shorter, or storage fails.
    """
    for one in piece.ranges:
        yield from _read(one, max_line_bytes)


def read_records(source: Source, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Record | Unreadable]:
    """Everything that a file holds; see read_piece."""
    for one in ranges_of(source, max(source.size_bytes, 1)):
        yield from _read(one, max_line_bytes)


def watermarks(records: Iterable[Record | Unreadable]) -> dict[str, float]:
    """The latest time that was seen in each file: what came until then is in it, but for what is late."""
    latest: dict[str, float] = {}
    for record in records:
        if isinstance(record, Record) and record.ts is not None:
            latest[record.file] = max(record.ts, latest.get(record.file, record.ts))
    return latest


def _read(one: Range, max_line_bytes: int) -> Iterator[Record | Unreadable]:
    unpacked = opener_of(one.name, is_open=is_open(one.location))
    line = Line(0, 0, b"", True)
    with ExitStack() as stack:
        if unpacked is None:
            begin, stop = max(one.start - 1, 0), one.stop
            file = stack.enter_context(opened(one.location, start=begin, stop=one.size_bytes))
        else:
            stop = None
            open_file = lambda: stack.enter_context(opened(one.location, stop=one.size_bytes))  # noqa: E731
            file = stack.enter_context(unpacked(open_file))
        found = lines(
            file,
            start=one.start,
            stop=stop,
            newlines_before=one.newlines_before,
            max_line_bytes=max_line_bytes,
        )
        try:
            for line in found:
                yield from _records(line, one)
        except CUT as error:
            offset = line.offset + len(line.raw or b"")
            yield Unreadable(one.name, line.number + 1, offset, "file_cut", f"{type(error).__name__}: {error}")


def _records(line: Line, one: Range) -> Iterator[Record | Unreadable]:
    where = (one.name, line.number, line.offset)
    if line.raw is None:
        yield Unreadable(*where, "too_long", "longer than the limit")
        return
    raw = line.raw.removeprefix(_BOM).strip(b" \t\r\n")
    if not raw:
        return
    if not (raw := raw.strip(b"\0")):  # a hole that a crash left; a whole line after it counts
        yield Unreadable(*where, "nul_bytes", "nothing but NUL bytes")
        return
    try:
        body = {"prompt": raw.decode()} if _is_text(one) else _object(raw)
    except UnicodeDecodeError as error:
        yield Unreadable(*where, "not_utf8", f"{error.reason} at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        end = "" if line.is_whole else "; the file ends inside the line"
        yield Unreadable(*where, "not_json", f"{error.msg} at character {error.pos} of the line{end}")
    except TypeError as error:
        yield Unreadable(*where, "not_an_object", str(error))
    except RecursionError:
        yield Unreadable(*where, "nested_too_deeply", f"more than {_MAX_DEPTH} levels")
    except ValueError:
        yield Unreadable(*where, "not_json", "a number of thousands of digits")
    else:
        yield from _parts(body, one.settings, where)


def _is_text(one: Range) -> bool:
    return one.settings.format == "text" or (one.settings.format == "auto" and one.name.endswith(".txt"))


def _object(raw: bytes) -> dict[str, Any]:
    body = json.loads(raw.decode())
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH and _is_deeper(body, _MAX_DEPTH):
        raise RecursionError
    if not isinstance(body, dict):
        raise TypeError(f"found {type(body).__name__}, expected an object")
    return body


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        found = [one for one in layer if isinstance(one, dict | list)]
        layer = [inner for one in found for inner in (one.values() if isinstance(one, dict) else one)]
    return any(isinstance(one, dict | list) for one in layer)


def _parts(body: dict[str, Any], settings: SourceConfig, where: tuple[str, int, int]) -> Iterator[Record | Unreadable]:
    """The records of a line's object, with what the source's settings say of all of them."""
    part = 0
    try:
        for found in records_of(body, settings.format):
            if isinstance(found, Rejected):
                yield Unreadable(*where, str(found), "", part)
            else:
                yield Record(*where, _of_source(found, settings), part, _ts(found, settings))
            part += 1
    except Rejected as reason:
        yield Unreadable(*where, str(reason), "", part)


def _of_source(body: dict[str, Any], settings: SourceConfig) -> dict[str, Any]:
    """What the record itself says wins: consent that was refused stays refused."""
    if settings.consent == "all_users_agreed" and body.get("consent") is None:
        body |= {"consent": "recorded", "consent_source": "collect.sources"}
    if settings.tenant is not None and body.get("tenant") in (None, ""):
        body["tenant"] = settings.tenant
    return body


def _ts(body: dict[str, Any], settings: SourceConfig) -> float | None:
    try:
        ts = times.seconds(body.get("ts"), timezone=settings.timezone)
    except ValueError:
        return None
    if ts is not None:
        body["ts"] = ts
    return ts
