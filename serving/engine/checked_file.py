"""A drafter's files are checked in a thread while the engine goes on, so that a swap pauses it for the loading alone.

What was found holds for the files as they were when the check began: by their stamp, which a swap compares again.
"""

import os
import threading
from pathlib import Path
from typing import Any

from serving.errors import ServingError
from serving.preflight import WEIGHTS, check_drafter

_CHECK = "_slipstream_check"


class FileCheck:
    """One check of a folder against a hash, a target and the configuration that serves."""

    def __init__(self, worker: Any, folder: Path, sha256: str, serving_config: dict[str, Any]):
        config = worker.vllm_config
        self.of = (str(folder), sha256, stamp(folder))
        self.problem: str | None = None
        self._settings = {
            "target_config": config.model_config.hf_config.to_dict(),
            "num_speculative_tokens": config.speculative_config.num_speculative_tokens,
            "serving_config": serving_config,
        }
        self.has_begun = self.has_ended = False

    def begin(self) -> None:
        """Read in a thread, once."""
        if not self.has_begun:
            self.has_begun = True
            threading.Thread(target=self.run, daemon=True, name="slipstream-check").start()

    def run(self) -> None:
        """Read now; ``problem`` says what is wrong."""
        folder, sha256, _ = self.of
        problem = None
        try:
            info = check_drafter(Path(folder), **self._settings)
        except ServingError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if info.sha256 != sha256:
                found = f"sha256 {info.sha256}, the caller says {sha256}"
                problem = f"{Path(folder) / WEIGHTS}: {found}; not the version meant"
        self.problem, self.has_ended = problem, True


def check_of(worker: Any, folder: Path, sha256: str, serving_config: dict[str, Any]) -> FileCheck:
    """The check of these files that runs or has ended; a new one, not begun, where these files have none."""
    last = getattr(worker, _CHECK, None)
    if last is None or last.of != (str(folder), sha256, stamp(folder)):
        last = FileCheck(worker, folder, sha256, serving_config)
        setattr(worker, _CHECK, last)
    return last


def forget_check(worker: Any) -> None:
    """The next one reads again: what was found is good for one swap."""
    setattr(worker, _CHECK, None)


def stamp(folder: Path) -> tuple[tuple[int, ...], ...] | None:
    """What changes when a drafter's files do; None where they cannot be looked at."""
    try:
        looks = [os.stat(folder / name) for name in ("config.json", WEIGHTS)]
    except (OSError, ValueError):
        return None  # the check says what is missing
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in looks)
