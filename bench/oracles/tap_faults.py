"""What clients notice, and what is left on disk, when something behind the tap goes wrong on a real server.

Streams of fixed greedy prompts go on while a fault comes and goes. A reply counts as changed when its tokens are not
those that the same prompt got untapped, before. Faults are real: a folder on a file system that is full, a writer that
is stopped again and again (what a disk that stalls does to it), one that is killed, bodies that are no JSON, clients
that hang up, and at last the whole server killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, at_least, at_most, unknown
from bench.oracles.faults_behind_tap import CONSENT, FAULTS, Sitting, api_server, outcomes, writer
from serving.launch import VllmServer
from serving.load import Driver, drive_sync

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, PROMPTS = 4, 8


def tap_faults(workdir: Path, *, target: Path | None = None, seconds: float = 6.0) -> dict[str, Figure]:
    """Failed requests, changed answers, requests without an outcome and torn records, fault by fault; all have to be 0.

    Without a target, a toy one is made (tests/tiny.py).
    """
    target = target or _toy(workdir)
    figures: dict[str, Figure] = {}
    with _small_file_system(workdir / "traffic") as on_tmpfs:
        server = VllmServer(
            model=target,
            drafter=None,
            log=workdir / "server.log",
            dtype="float32",
            max_model_len=512,
            max_num_seqs=CLIENTS,
            tap_dir=workdir / "traffic",
            tap_consent="header:X-Consent=training",
            env={"SLIPSTREAM_TAP_MEMORY_MIB": "1", "SLIPSTREAM_TAP_FILE_MIB": "0.25", "OMP_NUM_THREADS": "1"},
        )
        with server:
            sitting = Sitting(server, workdir / "traffic", prompts(server.served_name), on_tmpfs=on_tmpfs)
            replies = drive_sync(server.base_url, sitting.requests, concurrency=CLIENTS)
            sitting.expected = [reply.token_ids for reply in replies]
            for name, fault in FAULTS.items():
                figures |= _under(sitting, name, fault, seconds)
            figures |= _killed_server(sitting, seconds)
    return figures


def prompts(model: str, *, max_tokens: int = 40) -> list[dict[str, Any]]:
    """Streamed greedy chats of a fixed length, whose exact tokens come back."""
    fixed = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return [
        {**fixed, "return_token_ids": True, "messages": [{"role": "user", "content": f"Order {i * 37}: where is it?"}]}
        for i in range(PROMPTS)
    ]


def _under(sitting: Sitting, name: str, fault: Callable[..., Any], seconds: float) -> dict[str, Figure]:
    """The figures of one fault, which lasts for so long amid steady load."""
    before = _settled(sitting)
    with Driver(sitting.server.base_url, sitting.requests, concurrency=CLIENTS, headers=CONSENT) as driver:
        driver.wait_for(CLIENTS)
        extra = fault(sitting, seconds)
        if extra is None:
            driver.stop()
            return {f"tap_faults.{name}": unknown("needs the right to mount a file system")}
        driver.wait_for(len(driver.replies) + CLIENTS)
        replies = driver.stop()
    after = _settled(sitting, at_least=sum(before.values()) + len(replies) + extra)
    ended = {outcome: after[outcome] - before.get(outcome, 0) for outcome in after}
    note = {"n": len(replies), "outcomes": {outcome: int(count) for outcome, count in ended.items() if count}}
    dropped = sum(count for outcome, count in ended.items() if outcome.startswith("dropped_"))
    changed = sitting.differing + sum(
        reply.ok and reply.token_ids != sitting.expected[reply.index] for reply in replies
    )
    figures = {
        "failed_requests": at_most(sum(not reply.ok for reply in replies), 0, **note),
        "changed_answers": at_most(changed, 0, n=len(replies)),
        "uncounted": at_most(abs(sum(ended.values()) - len(replies) - extra), 0, n=len(replies) + extra),
        "torn_records": at_most(_torn(sitting.folder), 0),
    }
    if name in ("full_disk", "slow_disk", "killed_writer"):
        figures["drops_counted"] = at_least(dropped, 1)
    return {f"tap_faults.{name}.{figure}": value for figure, value in figures.items()}


def _killed_server(sitting: Sitting, seconds: float) -> dict[str, Figure]:
    """Server and writer killed at once amid load: what lies in the folder afterwards."""
    with Driver(sitting.server.base_url, sitting.requests, concurrency=CLIENTS, headers=CONSENT) as driver:
        driver.wait_for(2 * PROMPTS)
        for pid in (writer(sitting.server), api_server(sitting.server)):
            os.kill(pid, signal.SIGKILL)
        threading.Event().wait(min(1.0, seconds))
        driver.stop()
    return {"tap_faults.killed_server.torn_records": at_most(_torn(sitting.folder), 0)}


def _torn(folder: Path) -> int:
    """Lines that end as lines do and are no record, and ends of committed files that are no line."""
    torn, ids = 0, []
    for path in folder.glob("traffic-*.jsonl"):
        *lines, rest = path.read_bytes().split(b"\n")
        torn += bool(rest) and ".open." not in path.name
        for line in lines:
            try:
                record = json.loads(line)
                ids.append(record["id"])
                torn += record["response"]["choices"][0]["finish_reason"] is None
            except (ValueError, KeyError, TypeError):
                torn += 1
    return torn + len(ids) - len(set(ids))


def _settled(sitting: Sitting, *, at_least: float = 0.0, timeout_s: float = 90.0) -> dict[str, float]:
    """Outcome → count, once there are so many and no more come."""
    deadline, last = time.monotonic() + timeout_s, {}
    while True:
        found = outcomes(sitting)
        if (found == last and sum(found.values()) >= at_least) or time.monotonic() > deadline:
            return found
        last = found
        time.sleep(0.5)


@contextlib.contextmanager
def _small_file_system(folder: Path) -> Iterator[bool]:
    """The folder, on a file system of its own of 8 MiB where that may be mounted; whether it was."""
    folder.mkdir(parents=True)
    mounted = _runs(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(folder)])
    try:
        yield mounted
    finally:
        if mounted:
            _runs(["umount", "-l", str(folder)])


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _toy(workdir: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny

    return tiny.tiny_target(workdir / "target")
