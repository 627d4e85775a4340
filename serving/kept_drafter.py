"""Which drafter a replica comes up with again: one small file beside a supervised server.

The control endpoint writes it when a swap has proved itself, or to ask for a restart with another drafter; the
supervisor reads it before each start. So a replica that crashes comes back with what it served, not with what its
command line once said. Standard library only: the supervisor runs without any package.
"""

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

KEEP_ENV = "SLIPSTREAM_KEEP"
SUPERVISOR_ENV = "SLIPSTREAM_SUPERVISOR"
VERSION_ENV = "SLIPSTREAM_DRAFTER_VERSION"
PROVE_ENV = "SLIPSTREAM_PROVE"
"""Set by the supervisor: the drafter of this start is new, and there is one to go back to."""
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class KeptDrafter:
    """An immutable folder, its version and the SHA-256 of its weights."""

    folder: str
    version: str
    sha256: str

    def is_whole(self) -> bool:
        """Whether the folder still holds the weights that the hash names."""
        try:
            with open(Path(self.folder) / WEIGHTS, "rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False
        return same and (Path(self.folder) / "config.json").is_file()


@dataclass(frozen=True)
class Kept:
    """What to serve, and what to go back to while that has not been up yet."""

    serve: KeptDrafter
    previous: KeptDrafter | None = None


def read_kept(path: Path) -> Kept | None:
    """What is kept there; None without a readable file: then the command line decides."""
    try:
        data = json.loads(Path(path).read_text())
        previous = data["previous"]
        return Kept(KeptDrafter(**data["serve"]), KeptDrafter(**previous) if previous else None)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_kept(path: Path, kept: Kept) -> None:
    """Replace the file; whoever reads it sees the old one or the new one, also after a crash. Raises: OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w") as file:
            json.dump(asdict(kept), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must outlive a power cut
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Supervised:
    """The way from a server to the supervisor that started it."""

    path: Path
    pid: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Supervised | None":
        """None where no supervisor that keeps a drafter started this process."""
        path, pid = environment.get(KEEP_ENV, ""), environment.get(SUPERVISOR_ENV, "")
        # It leads this process's group: an id out of an environment that outlived it is nobody to signal.
        if not path or pid != str(os.getpgrp()):
            return None
        return cls(Path(path), int(pid))

    def came_up(self) -> None:
        """Tell it that this server serves what it was started with."""
        os.kill(self.pid, signal.SIGUSR2)

    def restart(self) -> None:
        """Have it end this server, engine and all, and start it with the drafter that is kept."""
        os.kill(self.pid, signal.SIGUSR1)
