"""Served requests, wherever and however they were logged: files found, cut into pieces, read as the tap's records.

found.py    files of folders and object storage, each with the hash of its bytes
stores.py   where bytes lie: this machine or object storage
pieces.py   what one task reads: a range of a large file, or several small files
streams.py  compressed and sealed files as plain ones, up to where they were cut
sealed.py   the tap's encrypted files
lines.py    lines of a range, each with its number and offset, in bounded memory
reading.py  lines as records, or as what they cannot be read for
formats/    one file a log format
times.py    the times that logs write, in seconds
"""

from pipeline.sources.found import Source, find_sources
from pipeline.sources.pieces import PIECE_BYTES, Piece, pieces
from pipeline.sources.reading import BY_POLICY, Record, Unreadable, read_piece, read_records, watermarks

__all__ = [
    "BY_POLICY",
    "PIECE_BYTES",
    "Piece",
    "Record",
    "Source",
    "Unreadable",
    "find_sources",
    "pieces",
    "read_piece",
    "read_records",
    "watermarks",
]
