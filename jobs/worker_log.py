"""What the workers of a local Ray say about their progress, on this terminal, and nothing else of theirs.

Ray can forward everything that its processes print: on one machine that is pages of vLLM's and Ray's own
notices between the lines that matter. Workers append to a file that is named in the environment instead, and
the process that started the Ray prints what is added to it. Ray's own logs keep the rest.
"""

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORKER_LOG = "SLIPSTREAM_WORKER_LOG"
_POLL_S = 0.2


class ProgressHandler(logging.StreamHandler):
    """Writes to the file that the environment names, else to standard error."""

    def __init__(self) -> None:
        path = os.environ.get(WORKER_LOG)
        super().__init__(open(path, "a") if path else sys.stderr)  # noqa: SIM115 - open for as long as the process
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))


@contextmanager
def relayed() -> Iterator[None]:
    """Print what workers started inside the block log, as they log it."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder) / "workers.log"
        path.touch()
        os.environ[WORKER_LOG] = str(path)
        over = threading.Event()
        thread = threading.Thread(target=_print_from, args=(path, over), name="slipstream-worker-log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            del os.environ[WORKER_LOG]
            over.set()
            thread.join()


def _print_from(path: Path, over: threading.Event) -> None:
    with open(path, errors="replace") as file:
        while True:
            last_look = over.is_set()
            sys.stderr.write(file.read())
            sys.stderr.flush()
            if last_look:
                return
            over.wait(_POLL_S)
