"""What one task reads: about so many bytes of the sources. Pieces are small, and can be sent anywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.collect_config import SourceConfig
from pipeline.sources.found import Source

PIECE_BYTES = 64 << 20
_PACKED = 6  # bytes of a log in one byte of it that is compressed, about: what a task has to do, not what it fetches


@dataclass(frozen=True)
class Range:
    """The lines of one file that begin at or after ``start`` and before ``stop``, in bytes."""

    location: str
    name: str
    settings: SourceConfig
    size_bytes: int
    """Of the whole file when it was found: what was written after that is another run's."""
    start: int
    stop: int
    newlines_before: int
    """Newlines before ``start``: the number of the first line follows from it."""


@dataclass(frozen=True)
class Piece:
    """A range of a large file, or several small files one after the other."""

    ranges: tuple[Range, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it reads, compressed ones where a file is compressed."""
        return sum(one.stop - one.start for one in self.ranges)


def pieces(sources: Sequence[Source], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The sources cut into pieces of about so many bytes, in their order; every line is in exactly one.

    Plain files are cut at multiples of their blocks, so a piece is never smaller than a block where a file goes on.
    """
    found: list[Piece] = []
    ranges: list[Range] = []
    left = piece_bytes
    for source in sources:
        for one in ranges_of(source, piece_bytes):
            work = (one.stop - one.start) * (_PACKED if source.is_compressed else 1)
            if ranges and work > left:
                found.append(Piece(tuple(ranges)))
                ranges, left = [], piece_bytes
            ranges.append(one)
            left -= work
    return [*found, Piece(tuple(ranges))] if ranges else found


def ranges_of(source: Source, piece_bytes: int) -> Iterator[Range]:
    """A file's ranges of about so many bytes; a compressed file is one."""
    blocks = max(piece_bytes // source.block_bytes, 1)
    step = source.size_bytes if source.is_compressed else blocks * source.block_bytes
    newlines_before = 0
    for number, start in enumerate(range(0, source.size_bytes, max(step, 1))):
        stop = min(start + step, source.size_bytes)
        yield Range(source.location, source.name, source.settings, source.size_bytes, start, stop, newlines_before)
        newlines_before += sum(source.newlines[number * blocks : (number + 1) * blocks])
