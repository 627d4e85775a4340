"""Things that go wrong behind the tap of a real server, as bench/oracles/tap_faults.py brings them about.

Each lasts for about so many seconds, and returns how many requests it sent itself, None where it cannot be had here.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.launch import VllmServer

CONSENT = {"X-Consent": "training"}
RESUMES_S, STALL_S = 90.0, 60.0


@dataclass
class Sitting:
    """One server, its log's folder, and what its prompts are answered with."""

    server: VllmServer
    folder: Path
    requests: list[dict[str, Any]]
    expected: list[list[int]] = field(default_factory=list)
    on_tmpfs: bool = False
    differing: int = 0
    """Refusals that were not the same tapped and untapped."""


def _full_disk(sitting: Sitting, seconds: float) -> int | None:
    if not sitting.on_tmpfs:
        return None
    filler = sitting.folder / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    time.sleep(seconds)
    filler.unlink()
    written, deadline = outcomes(sitting).get("written", 0), time.monotonic() + RESUMES_S
    while outcomes(sitting).get("written", 0) == written:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing was written for {RESUMES_S} s after there was room again")
        time.sleep(0.5)
    return 0


def _slow_disk(sitting: Sitting, seconds: float) -> int:
    """Stalls, each until something had to be dropped."""
    for _ in range(2):
        pid, dropped = writer(sitting.server), _dropped(sitting)
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + STALL_S
        while _dropped(sitting) == dropped and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(pid, signal.SIGCONT)
        time.sleep(seconds / 2)
    return 0


def _dropped(sitting: Sitting) -> float:
    return sum(count for outcome, count in outcomes(sitting).items() if outcome.startswith("dropped_"))


def _killed_writer(sitting: Sitting, seconds: float) -> int:
    for _ in range(3):
        pid = writer(sitting.server)
        os.kill(pid, signal.SIGSTOP)  # so that something is with it when it dies
        time.sleep(seconds / 3)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    return 0


def _malformed_bodies(sitting: Sitting, seconds: float) -> int:
    sent = 0
    deadline = time.monotonic() + seconds / 2
    for route in ("chat/completions", "completions", "responses"):
        for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"messages": 7}', b"[" * 5000, b'{"model": "' + b"x" * 100_000):
            answers = []
            for headers in ({}, CONSENT):
                request = urllib.request.Request(
                    f"{sitting.server.base_url}/v1/{route}", body, {"content-type": "application/json", **headers}
                )
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        answers.append((answer.status, answer.read()))
                except urllib.error.HTTPError as error:
                    answers.append((error.code, error.read()))
            sitting.differing += answers[0] != answers[1]
            sent += 2  # the untapped one is counted as denied
    time.sleep(max(0.0, deadline - time.monotonic()))
    return sent


def _hanging_up(sitting: Sitting, seconds: float) -> int:
    body = json.dumps({**sitting.requests[0], "max_tokens": 400}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Consent: training\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    sent, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.create_connection((sitting.server.host, sitting.server.port)) as client:
            client.sendall(head + body)
            client.recv(300)
        sent += 1
        time.sleep(0.1)
    return sent


def outcomes(sitting: Sitting) -> dict[str, float]:
    """Outcome → count of the tap so far."""
    with urllib.request.urlopen(f"{sitting.server.base_url}/slipstream/tap/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {name: float(count) for name, count in re.findall(r'requests_total{outcome="(\w+)"} (\S+)', text)}


def api_server(server: VllmServer) -> int:
    """The process that serves HTTP: the supervisor's child."""
    (pid,) = _children(server.pid, b"api_server")
    return pid


def writer(server: VllmServer, timeout_s: float = 90.0) -> int:
    """The tap's writer, once there is one."""
    deadline = time.monotonic() + timeout_s
    while not (found := list(_children(api_server(server), b"serving.tap.writer"))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no writer after {timeout_s} s")
        time.sleep(0.05)
    return found[0]


def _children(parent: int, word: bytes) -> Iterator[int]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if status[0] != "Z" and int(status[1]) == parent and word in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


FAULTS: dict[str, Callable[[Sitting, float], int | None]] = {
    "slow_disk": _slow_disk,
    "killed_writer": _killed_writer,
    "malformed_bodies": _malformed_bodies,
    "hanging_up": _hanging_up,
    "full_disk": _full_disk,
}
