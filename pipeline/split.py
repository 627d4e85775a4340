"""Which rows train, which choose, which judge: a keyed hash decides, once and for good."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import write_durably
from pipeline.config import Config
from pipeline.errors import ConfigError

KEY_FILE = "split.key"
CHECK_FILE = "split.check"
_MIN_KEY_BYTES = 16


@dataclass(frozen=True)
class SplitKey:
    """The secret of a run root. Without it nobody can tell from a hash whose request a row was."""

    secret: bytes

    def __repr__(self) -> str:
        return f"SplitKey(check={self.check!r})"

    @property
    def check(self) -> str:
        """A value that tells two keys apart and gives neither away."""
        return self.hash("check", "slipstream")[:16]

    def hash(self, purpose: str, value: str) -> str:
        """32 hex digits, HMAC-SHA256; hashes made for two purposes are unrelated."""
        told = f"{purpose}\0{value}".encode(errors="surrogatepass")  # a log may name anybody anything
        return hmac.new(self.secret, told, hashlib.sha256).hexdigest()[:32]


def load_key(config: Config) -> SplitKey:
    """The split key: from the environment, else from a key file under the root, made once with mode 0600.

    Raises: ConfigError when it is too short, or is not the key that this root was begun with.
    """
    root = config.root
    root.mkdir(parents=True, exist_ok=True)
    from_environment = os.environ.get(config.split_key_env)
    if from_environment is not None and len(from_environment.encode()) < _MIN_KEY_BYTES:
        raise ConfigError(
            f"environment variable {config.split_key_env}: expected at least {_MIN_KEY_BYTES} bytes; make a key with "
            "python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    place = config.split_key_env if from_environment is not None else str(root / KEY_FILE)
    key = SplitKey(from_environment.encode() if from_environment is not None else _key_file(root))
    check_file = root / CHECK_FILE
    if not check_file.exists():
        write_durably(check_file, key.check.encode())
    if (expected := check_file.read_text()) != key.check:
        raise ConfigError(
            f"{place}: this split key has the check value {key.check}, {check_file} says {expected}: with another key "
            "rows that trained would judge. Give the key that this root was begun with, or take a new root"
        )
    return key


def split_of(key: SplitKey, subject: str, *, gate_share: float, validation_share: float) -> str:
    """train, validation or gate. Changing one held-out share never moves rows of the other held-out set.

    Raises: ConfigError when the two shares leave nothing to train on.
    """
    if gate_share + validation_share >= 1:
        raise ConfigError(
            f"collect.gate_share = {gate_share} and collect.validation_share = {validation_share} leave no training "
            "rows; their sum must be below 1"
        )
    place = int(key.hash("split", subject)[:13], 16) / 16**13
    if place < gate_share:
        return "gate"
    return "validation" if place >= 1 - validation_share else "train"


def strongest(splits: Iterable[str]) -> str:
    """The split of a prompt that subjects of several asked: what anyone judges with trains nobody's drafter."""
    return max(splits, key=("train", "validation", "gate").index)


def _key_file(root: Path) -> bytes:
    path = root / KEY_FILE
    if not path.exists():
        if (root / CHECK_FILE).exists():
            raise ConfigError(
                f"{path}: no key, though {root / CHECK_FILE} says that this root was begun with one; set the split "
                "key's environment variable, or take a new root"
            )
        temporary = root / f".{KEY_FILE}.{os.getpid()}.tmp"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_hex(32).encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # never replaces the key of a process that was first
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return path.read_bytes().strip()
