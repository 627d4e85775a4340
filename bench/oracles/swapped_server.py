"""A real float32 server with toy drafters to swap, or with those that a caller brings; and what its memory holds."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.oracles.swap_under_load import TOY_FAVOURITE, prompts
from serving.deploy import swap_replica
from serving.launch import VllmServer
from serving.load import drive_sync
from serving.preflight import sha256_file

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "the token of the bench"
# 128 blocks: vLLM takes the one that was free longest, so in a larger cache memory grows with every request until each
# block has been written once, and that is no leak of a swap's.
# One arena, for the same reason: a thread's own first fills up.
TOY_SETTINGS = {
    "env": {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    "extra_args": ("--kv-cache-memory-bytes", str(64 << 20)),
}


@dataclass(frozen=True)
class Swapped:
    """The running server, and the folders of its versions "1", which serves first, and "2"."""

    server: VllmServer
    target: Path
    folders: dict[str, Path]
    roots: Path

    def swap(self, old: str, new: str, **settings: Any) -> Any:
        """The outcome of a verified swap."""
        folder = self.folders[new]
        return swap_replica(
            self.server.base_url,
            TOKEN,
            folder=folder,
            version=new,
            sha256=sha256_file(folder / "model.safetensors"),
            expected_version=old,
            **{"probe": prompts(self.server.served_name, count=2, max_tokens=8), **settings},
        )

    def memory(self) -> int:
        """Bytes resident in the server's processes."""
        total = 0
        for process in psutil.Process(self.server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


@contextlib.contextmanager
def swapped_server(
    workdir: Path, *, clients: int = 8, target: Path | None = None, drafters: Sequence[Path] = (), **settings: Any
) -> Iterator[Swapped]:
    """A server that drafts, and that any drafter under ``workdir``/versions may be swapped into."""
    roots = workdir / "versions"
    toy = target is None
    if toy:
        sys.path.insert(0, str(ROOT / "tests"))
        import tiny

        target = tiny.tiny_target(workdir / "target", favourite=TOY_FAVOURITE)
        drafters = [
            tiny.tiny_drafter(roots / "1", target, seed=1),
            tiny.tiny_drafter(roots / "2", target, seed=2, proposes=TOY_FAVOURITE),
        ]
    roots.mkdir(parents=True, exist_ok=True)
    server = VllmServer(
        model=target,
        drafter=Path(drafters[0]),
        version="1",
        log=workdir / "server.log",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=2 * clients,
        token=TOKEN,
        drafter_roots=sorted({roots, *(Path(drafter).parent for drafter in drafters)}),
        **(TOY_SETTINGS if toy else {}) | settings,
    )
    with server:
        yield Swapped(server, target, {"1": Path(drafters[0]), "2": Path(drafters[1])}, roots)


@dataclass
class Pulse:
    """Short requests one after the other, and when each was answered: where there are none, there is no service."""

    url: str
    model: str
    answered: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join(90.0)  # its one request has 60 s

    def longest_gap_s(self, since: float) -> float:
        """The longest time between two answers, the last one before ``since`` (time.monotonic()) included."""
        at = [moment for moment in self.answered if moment >= since]
        earlier = [moment for moment in self.answered if moment < since][-1:]
        return max(later - sooner for sooner, later in zip([*earlier, *at], at, strict=False))

    def wait_for(self, count: int, since: float, timeout_s: float = 300.0) -> None:
        """Return once there were so many answers since then. Raises: TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while sum(moment >= since for moment in self.answered[-10 * count :]) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"fewer than {count} answers in {timeout_s} s")
            time.sleep(0.02)

    def _run(self) -> None:
        (request,) = prompts(self.model, count=1, max_tokens=2)
        while not self._stop.is_set():
            (reply,) = drive_sync(self.url, [request], concurrency=1, timeout_s=60.0)
            if reply.ok:
                self.answered.append(time.monotonic())
            else:
                time.sleep(0.05)
