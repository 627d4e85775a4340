"""Compressed and encrypted files as plain ones: every byte before the place where they were cut, then an error.

A further compression is a function here that opens a file, and its suffix.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline.sources.sealed import Unsealed

CUT = (EOFError, OSError, zlib.error)
"""What a compressed file raises that breaks off or holds something else."""

_STEP = 1 << 16


def _gunzipped(open_file: Callable[[], BinaryIO]) -> BinaryIO:
    return gzip.GzipFile(fileobj=open_file(), mode="rb")


def _unpacked(open_file: Callable[[], BinaryIO]) -> BinaryIO:
    return io.BufferedReader(_Zstd(open_file), buffer_size=_STEP)


class _Zstd(io.RawIOBase):
    """What pyarrow's zstd gives of one frame or several. Its read loses what it got before an error: that is got
    again, byte by byte."""

    def __init__(self, open_file: Callable[[], BinaryIO]):
        self._open_file, self._position, self._error = open_file, 0, None
        self._stream = self._opened()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._error is not None:
            raise self._error
        try:
            found = self._stream.read(len(buffer))
        except OSError as error:
            found, self._error = self._before_error(), error
            if not found:
                raise
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _opened(self) -> pa.CompressedInputStream:
        return pa.CompressedInputStream(pa.PythonFile(self._open_file(), mode="r"), "zstd")

    def _before_error(self) -> bytes:
        stream, left = self._opened(), self._position
        while left:
            left -= len(stream.read(min(left, _STEP)))
        found = bytearray()
        try:
            while byte := stream.read(1):
                found += byte
        except OSError:
            pass
        return bytes(found)


Opener = Callable[[Callable[[], BinaryIO]], BinaryIO]
"""Makes a plain stream of a function that opens the file."""

OPENERS: Mapping[str, Opener] = {".gz": _gunzipped, ".zst": _unpacked}
"""Suffix of compressed files → opener."""
SEALED = ".sealed"
"""Suffix of the tap's encrypted files."""


def opener_of(name: str, *, is_open: bool = False) -> Opener | None:
    """How a file of this name is unpacked; None for a plain one. ``is_open``: its writer may not have ended it."""
    if name.endswith(SEALED):
        return lambda open_file: io.BufferedReader(Unsealed(open_file(), name, is_open=is_open))
    return next((opener for suffix, opener in OPENERS.items() if name.endswith(suffix)), None)
