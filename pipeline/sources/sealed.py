"""The lines of a sealed traffic log; serving/tap/sealing.py says what its bytes are, and writes them.

Keys come from the environment alone, by the tap's own variables: SLIPSTREAM_TAP_KEY, "ID:BASE64 of 32 bytes", or
SLIPSTREAM_TAP_KEY_FILE, a file of such keys. Old ones stay in that file for as long as files that they sealed live.
"""

import base64
import binascii
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import ConfigError, SchemaError

_MAGIC, _VERSION = b"SLIPTAP", 1
_INFO = b"slipstream tap 1"
_SALT_BYTES, _KEY_BYTES, _TAG_BYTES = 16, 32, 16
_MAX_CHUNK_BYTES = 1 << 30


def keys_of_environment(environment: Mapping[str, str] = os.environ) -> dict[str, bytes]:
    """Key id → key, of SLIPSTREAM_TAP_KEY and SLIPSTREAM_TAP_KEY_FILE; empty where neither is set.

    Raises: ConfigError for a file that cannot be read or an entry that is no key; it quotes none.
    """
    texts = {"SLIPSTREAM_TAP_KEY": environment.get("SLIPSTREAM_TAP_KEY", "")}
    if path := environment.get("SLIPSTREAM_TAP_KEY_FILE", ""):
        try:
            texts[f"SLIPSTREAM_TAP_KEY_FILE {path}"] = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"SLIPSTREAM_TAP_KEY_FILE {path}: {type(error).__name__}; expected a readable file")
    keys: dict[str, bytes] = {}
    for where, text in texts.items():
        for number, entry in enumerate(text.split(), start=1):
            key_id, _, encoded = entry.partition(":")
            try:
                key = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                key = b""
            if not key_id or len(key) != _KEY_BYTES:
                raise ConfigError(f"{where}: entry {number} is no key; expected ID:BASE64 of {_KEY_BYTES} bytes")
            keys[key_id] = key
    return keys


class Unsealed(io.RawIOBase):
    """The lines of a sealed log as a plain file. What is no longer as it was sealed is an OSError where it begins.

    Raises: as ``unsealed``, but OSError in place of SchemaError.
    """

    def __init__(self, file: BinaryIO, name: str, *, is_open: bool):
        self._chunks, self._left = unsealed(file, name, keys_of_environment(), is_open=is_open), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            try:
                self._left = next(self._chunks, b"")
            except SchemaError as error:
                raise OSError(str(error))
        found, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)


def unsealed(file: BinaryIO, name: str, keys: Mapping[str, bytes], *, is_open: bool) -> Iterator[bytes]:
    """Every whole chunk of lines of a sealed log, in order. ``keys`` maps a key's id to its 32 bytes.

    A file that is still open, or was left by a writer that died, simply ends where it was torn.

    Raises: ConfigError without the file's key; SchemaError when this is no sealed log, or one of another version, or a
    chunk is not what was sealed there; EOFError, as gzip does, after the last whole chunk of a committed file that was
    cut.
    """
    head, key_id, salt = _head(file, name)
    if head is None:
        if is_open:
            return
        raise EOFError(f"{name} ends before its first record")
    cipher = _cipher(name, keys, key_id, salt)
    number = 0
    while (sealed := _chunk(file)) is not None:
        lines = _opened(cipher, sealed, head, number=number, name=name)
        if not lines:
            if file.read(1):
                raise SchemaError(f"{name}: bytes after its end mark; expected none")
            return
        yield lines
        number += 1
    if not is_open:
        raise EOFError(f"{name} was cut after {number} records")


def _head(file: BinaryIO, name: str) -> tuple[bytes | None, str, bytes]:
    """The bytes before the first chunk, the key's id and the salt; None for a head that is not all there."""
    start = file.read(len(_MAGIC) + 2)
    if not (_MAGIC + bytes([_VERSION])).startswith(start[:8]):
        raise SchemaError(f"{name}: begins with {start[:8]!r}; expected a sealed traffic log of version {_VERSION}")
    rest = file.read(start[8] + _SALT_BYTES) if len(start) == 9 else b""
    if len(start) < 9 or len(rest) < start[8] + _SALT_BYTES:
        return None, "", b""
    return start + rest, rest[: start[8]].decode("ascii", errors="replace"), rest[start[8] :]


def _cipher(name: str, keys: Mapping[str, bytes], key_id: str, salt: bytes):
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise ConfigError(f"{name} is sealed; reading it needs the cryptography package: pip install cryptography")
    if key_id not in keys:
        raise ConfigError(
            f"{name} was sealed with key {key_id!r}; known are {', '.join(sorted(keys)) or 'none'}. Set "
            "SLIPSTREAM_TAP_KEY, or add the key to the file that SLIPSTREAM_TAP_KEY_FILE names"
        )
    derived = HKDF(hashes.SHA256(), length=_KEY_BYTES, salt=salt, info=_INFO).derive(keys[key_id])
    return AESGCM(derived)


def _chunk(file: BinaryIO) -> bytes | None:
    """The next chunk; None where the file ends, in it or before it."""
    length = int.from_bytes(prefix, "big") if len(prefix := file.read(4)) == 4 else 0
    if not _TAG_BYTES <= length <= _MAX_CHUNK_BYTES:  # zeros, where a machine lost power
        return None
    sealed = file.read(length)
    return sealed if len(sealed) == length else None


def _opened(cipher, sealed: bytes, head: bytes, *, number: int, name: str) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(number.to_bytes(12, "big"), sealed, head)
    except InvalidTag:
        raise SchemaError(f"{name}: record {number + 1} is not what was sealed there; expected it as written")
