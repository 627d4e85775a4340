"""The files of the configured sources, as far as they reach now, each with the hash of its bytes.

The hash is read, not taken from object storage: an etag says how an object was uploaded, a time when, and both change
when the same log is copied elsewhere. One pass gives it and the newlines of each block, from which every piece of the
file knows its first line's number.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.collect_config import SourceConfig
from pipeline.errors import ConfigError
from pipeline.sources.stores import Stored, committed_name, file_name, is_open, listed, opened
from pipeline.sources.streams import OPENERS, SEALED, opener_of

BLOCK_BYTES = 8 << 20
_THREADS = 8  # hashing and reading leave Python's lock
_TAIL_BYTES = 1 << 16
_LINES = (".jsonl", ".ndjson")
_ONE_OBJECT = ".json"  # how LiteLLM and OpenTelemetry name theirs; in a folder only where the format is typed out
_TEXT = ".txt"


@dataclass(frozen=True)
class Source:
    """One file of records, as far as it reached when it was found: a log may grow while it is read."""

    location: str
    """An absolute path, or a URI."""
    name: str
    """Relative to the folder that it was found in, so that a move of that folder changes nothing."""
    size_bytes: int
    sha256: str
    settings: SourceConfig
    block_bytes: int
    newlines: tuple[int, ...] = ()
    """Of each block of ``block_bytes``; none for a compressed file."""

    @property
    def is_compressed(self) -> bool:
        """Whether it can only be read from its beginning."""
        return opener_of(self.name) is not None

    def cut(self, size_bytes: int) -> "Source":
        """The same file as it was when it had so many bytes. A compressed or sealed one can only be whole."""
        digest = hashlib.sha256()
        for block in _blocks(self.location, size_bytes, self.block_bytes):
            digest.update(block)
        return replace(self, size_bytes=size_bytes, sha256=digest.hexdigest())

    @property
    def meaning(self) -> list[Any]:
        """What of it decides which rows come of it, as JSON: not where it lies."""
        how = self.settings.model_dump(mode="json", exclude={"path", "name"}, exclude_defaults=True)
        return [self.name, self.sha256, how] if how else [self.name, self.sha256]


def find_sources(
    entries: Sequence[Path | str | SourceConfig], *, block_bytes: int = BLOCK_BYTES, setting: str = "collect.sources"
) -> list[Source]:
    """The logs under these folders and files, each once, in the order of their names.

    In folders, .jsonl and .ndjson files count, plain, .gz or .zst, and the tap's sealed ones; .json ones where the
    source's format is typed out, .txt ones where it is "text". A file that is named itself counts whatever it is
    called. Empty files are left out: a server that has just started is no new traffic. A file that its writer has not
    committed yet (.open.) reaches to its last whole line.

    Raises: ConfigError when nothing is given, a path is missing or nothing is found; StageError when storage fails.
    """
    if not entries:
        raise ConfigError(f"{setting} is empty; give folders or files, e.g. --set '{setting}=[\"traffic\"]'")
    found = list_sources(entries)
    places = ", ".join(str(entry.path if isinstance(entry, SourceConfig) else entry) for entry in entries)
    if not found:
        raise ConfigError(f"{setting}: no .jsonl, .jsonl.gz or .jsonl.zst file in {places}")
    with ThreadPoolExecutor(_THREADS) as threads:
        read = threads.map(lambda one: _source(*one, block_bytes=block_bytes), found)
        sources = [source for source in read if source.size_bytes]
    if not sources:
        raise ConfigError(f"{setting}: only empty files in {places}; no traffic was tapped yet")
    return _told_apart(sorted(sources, key=lambda source: (source.name, source.sha256)))


def list_sources(entries: Sequence[Path | str | SourceConfig]) -> list[tuple[Stored, SourceConfig, str]]:
    """The files of find_sources, empty ones too, each with its settings and its name; nothing of them is read.

    Raises: ConfigError when a path is missing.
    """
    found: dict[str, tuple[Stored, SourceConfig, str]] = {}
    for entry in entries:
        settings = entry if isinstance(entry, SourceConfig) else SourceConfig(path=entry)
        for stored in listed(settings.path):
            if not stored.relative or _counts(stored.relative, settings.format):
                found.setdefault(stored.location, (stored, settings, _name(stored, settings)))
    return list(found.values())


def _counts(relative: str, log_format: str) -> bool:
    name = committed_name(relative)
    if name.endswith(SEALED):
        return True
    for suffix in OPENERS:
        name = name.removesuffix(suffix)
    suffixes = {"auto": _LINES, "text": (*_LINES, _TEXT)}.get(log_format, (*_LINES, _ONE_OBJECT))
    return name.endswith(suffixes)


def _name(stored: Stored, settings: SourceConfig) -> str:
    own = settings.name or file_name(str(settings.path))
    name = f"{own}/{stored.relative}" if stored.relative else own
    return committed_name(name)  # committing a file changes no name


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Files of one name carry the beginning of their hash, so that a reject's place is one file's."""
    shared = {name for name, count in Counter(source.name for source in sources).items() if count > 1}
    seen: Counter[str] = Counter()
    named = []
    for source in sources:
        name = source.name
        if name in shared:
            name = f"{name}#{source.sha256[:8]}"
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}.{seen[name]}"
        named.append(replace(source, name=name))
    return named


def _source(stored: Stored, settings: SourceConfig, name: str, *, block_bytes: int) -> Source:
    plain = opener_of(name) is None
    size = whole_lines(stored) if plain and is_open(stored.location) else stored.size_bytes
    digest, newlines = hashlib.sha256(), []
    for block in _blocks(stored.location, size, block_bytes):
        digest.update(block)
        if plain:
            newlines.append(block.count(b"\n"))
    return Source(stored.location, name, size, digest.hexdigest(), settings, block_bytes, tuple(newlines))


def _blocks(location: str, size_bytes: int, block_bytes: int) -> Iterator[bytes]:
    with opened(location, stop=size_bytes) as file:
        while block := file.read(block_bytes):
            yield block


def whole_lines(stored: Stored) -> int:
    """Bytes up to the end of the last whole line."""
    end = stored.size_bytes
    while end:
        start = max(end - _TAIL_BYTES, 0)
        with opened(stored.location, start=start, stop=end) as file:
            if (at := file.read().rfind(b"\n")) >= 0:
                return start + at + 1
        end = start
    return 0
