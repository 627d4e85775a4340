"""States files on object storage: moved there once they are committed.

Storage is anything that pyarrow opens by URI: ``s3://bucket/prefix`` (endpoint and keys from the usual AWS variables of
the environment), ``gs://``, ``file:///folder``. Nothing is believed: an upload is read back before the local copy goes.
"""

import hashlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pyarrow import fs

from pipeline.artifacts import Shard
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.shards import Part, is_states, part_path, read_part, record

logger = logging.getLogger("slipstream")

CHUNK_BYTES = 8 << 20
TRIES, RETRY_WAIT_S = 4, 0.2

T = TypeVar("T")


def filesystem(uri: str, *, setting: str) -> tuple[fs.FileSystem, str]:
    """The file system that a URI names, and the path in it. Raises: ConfigError, by the setting's name."""
    try:
        return fs.FileSystem.from_uri(uri)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{setting} = {uri!r}: cannot be opened ({error}); expected s3://bucket/prefix")


class Storage:
    """A folder of an object storage. Raises: ConfigError on a URI that cannot be opened."""

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/")
        self._files, self._folder = filesystem(self.uri, setting="capture.storage")

    def sha256(self, shard: Shard) -> str | None:
        """Hex SHA-256 of the stored object, read back whole; None where there is none of this size."""
        info = self._files.get_file_info(self._key(shard))
        if info.type != fs.FileType.File or info.size != shard.bytes:
            return None
        return self.download(shard, lambda chunk: None)

    def upload(self, path: Path, shard: Shard) -> None:
        """Copy a local file there, over whatever is there."""
        key = self._key(shard)
        if self._files.type_name == "local":  # object storage has no folders
            self._files.create_dir(os.path.dirname(key))
        with open(path, "rb") as source, self._files.open_output_stream(key, buffer_size=0) as sink:
            while chunk := source.read(CHUNK_BYTES):
                sink.write(chunk)

    def download(self, shard: Shard, take: Callable[[bytes], object]) -> str:
        """Hand a stored object's bytes to ``take``, piece by piece; their hex SHA-256."""
        digest = hashlib.sha256()
        with self._files.open_input_stream(self._key(shard)) as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                take(chunk)
        return digest.hexdigest()

    def remove(self, shard: Shard) -> None:
        """Remove a stored object, if it is there."""
        if self._files.get_file_info(self._key(shard)).type == fs.FileType.File:
            self._files.delete_file(self._key(shard))

    def _key(self, shard: Shard) -> str:
        return f"{self._folder}/{shard.path}"


def require_writable(uri: str) -> None:
    """Write, read back and remove a small object: before an engine starts, not after its first part.

    Raises: ConfigError, StageError with what the storage says.
    """
    body = b"slipstream"
    name = f"probe-{secrets.token_hex(4)}"
    shard = Shard(path=name, rows=0, bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
    storage = Storage(uri)
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / name).write_bytes(body)
        tried(f"{storage.uri}/{name}: upload", lambda: _store(storage, path.parent, shard))
    storage.remove(shard)


def storage_of(uri: str, derivation: str) -> str:
    """Where one cache's states files are, under ``capture.storage``."""
    return f"{uri.rstrip('/')}/states/{derivation}"


def move_part(folder: Path, index: int, uri: str) -> Part:
    """Move a committed part's states files to storage, from where readers stage them; the part's new record.

    The local files go once every one of them has been read back from there with its own hash, and the record says so.
    What an interrupted try has stored already is found by its hash; a part that was moved already is left as it is.

    Raises: StageError when storage fails, again and again; the part then stays whole beside its record.
    """
    part = read_part(part_path(folder, index))
    if part.storage is None:
        storage = Storage(uri)
        for shard in filter(is_states, part.shards):
            tried(f"{storage.uri}/{shard.path}: upload", lambda shard=shard: _store(storage, folder, shard))
        part = part.model_copy(update={"storage": storage.uri})
        record(folder, index, part)
    for shard in filter(is_states, part.shards):
        (folder / shard.path).unlink(missing_ok=True)
    return part


def remove_stored(folder: Path) -> set[str]:
    """Remove from storage what the parts that are recorded in a folder have there; where that was."""
    places = set()
    for path in folder.glob("part-*.json"):
        part = Part.model_validate_json(path.read_text())
        if part.storage is not None:
            places.add(part.storage)
            storage = Storage(part.storage)
            for shard in filter(is_states, part.shards):
                storage.remove(shard)
    return places


def _store(storage: Storage, folder: Path, shard: Shard) -> None:
    if storage.sha256(shard) == shard.sha256:
        return
    storage.upload(folder / shard.path, shard)
    if (found := storage.sha256(shard)) != shard.sha256:
        raise OSError(f"read back with sha256 {found}, expected {shard.sha256}")


def tried(what: str, call: Callable[[], T]) -> T:
    """What the call returns, tried again where storage fails or hands over other bytes.

    Raises: StageError, or the call's own SchemaError, when the last try fails too.
    """
    for number in range(1, TRIES):
        try:
            return call()
        except (OSError, SchemaError) as error:
            logger.warning("%s failed (%s); trying again", what, error)
            time.sleep(RETRY_WAIT_S * 4 ** (number - 1))
    try:
        return call()
    except OSError as error:
        raise StageError(f"{what} failed {TRIES} times, at last with: {error}")
