"""The sealed form of a log file: every record encrypted by itself, so that a torn end loses only itself.

    bytes        what
    8            "SLIPTAP" and the version, 0x01
    1            n, length of the key's id
    n            the key's id, ASCII
    16           salt, random for each file
    then, for i = 0, 1, 2, ...:
    4            length of what follows, big-endian
    length       chunk i: whole lines, sealed, 16 bytes longer than they are

    file key     HKDF-SHA256 of the key, 32 bytes, with that salt and the info "slipstream tap 1"
    chunk        AES-256-GCM under the file key; nonce: i in 12 bytes, big-endian; associated data: all before chunk 0

A file that was committed ends with a chunk of no bytes. Chunks cannot be left out, doubled or moved unseen, within a
file or across files. The reader is pipeline/sources/sealed.py.
"""

import base64
import binascii
import os
import re
from dataclasses import dataclass, field

from serving.errors import TapError

MAGIC = b"SLIPTAP\x01"
INFO = b"slipstream tap 1"
SALT_BYTES = 16
KEY_BYTES = 32


@dataclass(frozen=True)
class Key:
    """A key and the id by which files name it."""

    id: str
    secret: bytes = field(repr=False)


def parse_keys(text: str, *, where: str) -> list[Key]:
    """The keys of a text, "ID:BASE64 of 32 bytes" each, separated by white space. Raises: TapError, quoting none."""
    keys = []
    for entry in text.split():
        key_id, colon, encoded = entry.partition(":")
        try:
            secret = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            secret = b""
        if not colon or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key_id) or len(secret) != KEY_BYTES:
            raise TapError(
                f"{where}: entry {len(keys) + 1} is no key; expected ID:BASE64 of {KEY_BYTES} bytes, as from "
                'echo "2024-06:$(openssl rand -base64 32)"'
            )
        keys.append(Key(key_id, secret))
    return keys


class Seal:
    """Seals one file: its head first, then chunk after chunk."""

    def __init__(self, key: Key, salt: bytes | None = None):
        """Raises: TapError where the cryptography package is not installed."""
        try:
            from cryptography.hazmat.primitives import hashes
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise TapError(
                "a key for the traffic log is set, and the cryptography package is not installed; expected it beside "
                "vLLM (its mcp package brings it): pip install cryptography, or unset the key"
            )
        salt = os.urandom(SALT_BYTES) if salt is None else salt
        self.head = MAGIC + bytes([len(key.id)]) + key.id.encode() + salt
        derived = HKDF(hashes.SHA256(), length=KEY_BYTES, salt=salt, info=INFO).derive(key.secret)
        self._cipher, self._num_chunks = AESGCM(derived), 0

    def chunk(self, lines: bytes) -> bytes:
        """The next chunk, with its length before it. The nonce is used up, whether or not the chunk gets written."""
        sealed = self._cipher.encrypt(self._num_chunks.to_bytes(12, "big"), lines, self.head)
        self._num_chunks += 1
        return len(sealed).to_bytes(4, "big") + sealed
