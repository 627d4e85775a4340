"""Where the bytes of logs lie: files of this machine, or objects of anything that pyarrow opens by URI (s3://, gs://).

Network errors are tried again where they happen, so that a file that breaks off is never confused with a network that
did.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyarrow import fs

from pipeline.errors import ConfigError, StageError
from pipeline.storage import filesystem, tried

_OPEN = ".open."  # in the name of a file that its writer has not committed yet; committing it leaves a dot
_LOCAL_BUFFER, _REMOTE_BUFFER = 1 << 18, 8 << 20


@dataclass(frozen=True)
class Stored:
    """One file, as far as it reached when it was listed."""

    location: str
    """An absolute path, or a URI."""
    relative: str
    """Below the folder that was asked for; "" where the file itself was."""
    size_bytes: int


def is_remote(location: str) -> bool:
    """Whether a location is a URI."""
    return "://" in location


def listed(place: Path | str) -> list[Stored]:
    """The files under a folder, or the one file, in the order of their names; what begins with a dot is left out.

    Raises: ConfigError when there is none such, or the URI cannot be opened.
    """
    if isinstance(place, str) and place.startswith("file://"):
        place = Path(filesystem(place, setting="collect.sources")[1])
    if isinstance(place, str) and is_remote(place):
        return _objects(place)
    path = Path(place)
    if not path.exists():
        raise ConfigError(f"collect.sources: {path} does not exist; expected a folder or a .jsonl(.gz, .zst) file")
    if path.is_file():
        return [Stored(str(path.resolve()), "", path.stat().st_size)]
    files = ((str(file.relative_to(path)), file) for file in path.rglob("*") if file.is_file())
    found = (_stored(relative, file) for relative, file in sorted(files) if not _hidden(relative))
    return [stored for stored in found if stored is not None]


def _stored(relative: str, file: Path) -> Stored | None:
    """A file that was just found; None for one that went, since logs are committed and deleted while others look."""
    try:
        return Stored(str(file.resolve()), relative, file.stat().st_size)
    except FileNotFoundError:
        if not is_open(relative):
            return None
        return _stored(committed_name(relative), Path(committed_name(str(file))))


def opened(location: str, *, start: int = 0, stop: int) -> io.BufferedReader:
    """The bytes of a file from ``start`` to ``stop``.

    Raises: StageError, here or where they are read, when the file is gone, cannot be read or has become shorter.
    """
    if is_remote(location):
        return io.BufferedReader(_Part(location, _Object(location, start), stop - start), buffer_size=_REMOTE_BUFFER)
    try:
        file = io.FileIO(location)
    except FileNotFoundError:
        return opened(_committed(location), start=start, stop=stop)
    except OSError as error:
        raise StageError(f"{location}: cannot be opened ({error})")
    file.seek(start)
    return io.BufferedReader(_Part(location, file, stop - start), buffer_size=_LOCAL_BUFFER)


def _hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _objects(uri: str) -> list[Stored]:
    files, place = filesystem(uri, setting="collect.sources")
    scheme = uri.partition("://")[0]
    query = f"?{uri.partition('?')[2]}" if "?" in uri else ""
    info = tried(f"{uri}: look", lambda: files.get_file_info(place))
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"collect.sources: {uri} does not exist; expected a folder or a .jsonl(.gz, .zst) file")
    if info.type == fs.FileType.File:
        return [Stored(uri, "", info.size)]
    selector = fs.FileSelector(place, recursive=True)
    found = [info for info in tried(f"{uri}: list", lambda: files.get_file_info(selector)) if info.is_file]
    stored = [
        Stored(f"{scheme}://{quote(info.path)}{query}", info.path.removeprefix(place).lstrip("/"), info.size)
        for info in found
    ]
    return sorted((one for one in stored if not _hidden(one.relative)), key=lambda one: one.relative)


class _Part(io.RawIOBase):
    """So many bytes of a file. What is wrong with the disk or the file is told apart from what the bytes say."""

    def __init__(self, location: str, file: io.RawIOBase, num_bytes: int):
        self._location, self._file, self._left = location, file, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            return 0
        try:
            num_bytes = self._file.readinto(memoryview(buffer)[: self._left])
        except OSError as error:
            raise StageError(f"{self._location}: cannot be read ({error})")
        if not num_bytes:
            raise StageError(f"{self._location}: is {self._left} bytes shorter than it was; run the stage again")
        self._left -= num_bytes
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()


class _Object(io.RawIOBase):
    """An object's bytes in order, opened again where a read fails."""

    def __init__(self, location: str, start: int):
        self._location, self._position, self._file = location, start, None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = tried(f"{self._location}: read", lambda: self._read(buffer))
        self._position += num_bytes
        return num_bytes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def _read(self, buffer: Any) -> int:
        try:
            if self._file is None:
                files, place = filesystem(self._location, setting="collect.sources")
                self._file = files.open_input_file(place)
                self._file.seek(self._position)
            return self._file.readinto(buffer)
        except FileNotFoundError:
            self._location, self._file = _committed(self._location), None
            return self._read(buffer)
        except OSError:
            self._file = None
            raise


def is_open(location: str) -> bool:
    """Whether a file's writer has not committed it yet."""
    return _OPEN in file_name(location)


def file_name(location: str) -> str:
    """The last part of a location."""
    return os.path.basename(location.partition("?")[0].rstrip("/"))


def _committed(location: str) -> str:
    """Where an open file is once it is committed. Raises: StageError for one that was not open: it is gone."""
    if not is_open(location):
        raise StageError(f"{location}: was there when the sources were listed, and is gone; run the stage again")
    return committed_name(location)


def committed_name(name: str) -> str:
    """The name, or location, of a file once it is committed; that of a committed one as it is."""
    path, mark, query = name.partition("?")
    folder, slash, last = path.rpartition("/")
    return f"{folder}{slash}{last.replace(_OPEN, '.', 1)}{mark}{query}"
