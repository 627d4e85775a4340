"""Writing and hashing in one go."""

import hashlib
import time
from pathlib import Path
from typing import Any


class HashedFile:
    """A file that is written once, front to back, and hashed on the way: no second read to know its SHA-256."""

    def __init__(self, path: Path):
        self._file = open(path, "wb")  # noqa: SIM115
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        self.hash_seconds = 0.0

    def write(self, body: Any) -> int:
        """Write anything with a buffer; its bytes."""
        size = memoryview(body).nbytes
        started = time.perf_counter()
        self._hash.update(body)
        self.hash_seconds += time.perf_counter() - started
        self._file.write(body)
        self.num_bytes += size
        return size

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of what has been written."""
        return self._hash.hexdigest()

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
