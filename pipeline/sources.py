"""Reading served requests from JSON lines: every line becomes a record or a reject, whatever its neighbours hold."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """One file of records, as far as it reached when it was found: a log may grow while it is read."""

    path: Path
    name: str
    """Relative to the folder that it was found in, so that a move of that folder changes nothing."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """One JSON object of a file; ``offset`` counts bytes before its line (decompressed ones in a .gz)."""

    file: str
    line: int
    offset: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A line that holds no JSON object, or the place where a file breaks off. ``error`` quotes no text."""

    file: str
    line: int
    offset: int
    reason: str
    error: str


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """The .jsonl and .jsonl.gz files under these folders and files, each once, in the order of their names.

    Empty files are left out: a server that has just started is no new traffic.

    Raises: ConfigError when nothing is given, a path is missing or nothing is found.
    """
    if not paths:
        raise ConfigError("collect.sources is empty; give folders or files, e.g. --set 'collect.sources=[\"traffic\"]'")
    found: dict[Path, str] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"collect.sources: {path} does not exist; expected a folder or a .jsonl(.gz) file")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.name.endswith((".jsonl", ".jsonl.gz")):
                name = f"{path.name}/{file.relative_to(path)}" if path.is_dir() else file.name
                found.setdefault(file.resolve(), name)
    if not found:
        raise ConfigError(f"collect.sources: no .jsonl or .jsonl.gz file in {', '.join(map(str, paths))}")
    sources = [source for path, name in found.items() if (source := _source(path, name)).size_bytes]
    if not sources:
        raise ConfigError(
            f"collect.sources: only empty files in {', '.join(map(str, paths))}; no traffic was tapped yet"
        )
    return sorted(sources, key=lambda source: (source.name, source.sha256))


def read_records(source: Source) -> Iterator[Record | Unreadable]:
    """Every line of a file but blank ones, in order. A cut .gz yields what came before the cut, then a reject."""
    line, offset = 0, 0
    zipped = source.path.suffix == ".gz"
    with gzip.open(source.path, "rb") if zipped else open(source.path, "rb") as file:
        while True:
            try:
                raw = file.readline()
            except (EOFError, OSError, zlib.error) as error:
                yield Unreadable(source.name, line + 1, offset, "file_cut", f"{type(error).__name__}: {error}")
                return
            if not raw or (not zipped and offset >= source.size_bytes):
                return
            line += 1
            if raw.strip():
                yield _parse(raw, source.name, line, offset)
            offset += len(raw)


def _source(path: Path, name: str) -> Source:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return Source(path, name, file.tell(), digest.hexdigest())


def _parse(raw: bytes, file: str, line: int, offset: int) -> Record | Unreadable:
    try:
        body = json.loads(raw.removeprefix(_BOM).decode())
    except UnicodeDecodeError as error:
        return Unreadable(file, line, offset, "not_utf8", f"{error.reason} at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Unreadable(file, line, offset, "not_json", f"{error.msg} at character {error.pos} of the line")
    except (ValueError, RecursionError) as error:
        return Unreadable(file, line, offset, "not_json", type(error).__name__)
    if not isinstance(body, dict):
        return Unreadable(file, line, offset, "not_an_object", f"found {type(body).__name__}, expected an object")
    return Record(file, line, offset, body)
