"""Calls to a real server's control endpoint that must not get in, and clients that go away at a bad moment."""

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.figures import Figure, at_least, at_most
from bench.oracles.swap_under_load import prompts
from bench.oracles.swapped_server import TOKEN, Swapped, swapped_server
from serving.deploy import status
from serving.load import drive_sync
from serving.preflight import sha256_file

SWAP = "/slipstream/swap"


class Attacker:
    """Raw calls, with whatever headers and bodies."""

    def __init__(self, swapped: Swapped):
        self.swapped = swapped
        self.host, self.port = swapped.server.host, swapped.server.port

    def order(self, old: str = "1", new: str = "2", **changes: Any) -> dict[str, Any]:
        """A whole order."""
        folder = self.swapped.folders[new]
        sha256 = sha256_file(folder / "model.safetensors")
        return {"folder": str(folder), "version": new, "sha256": sha256, "expected_version": old} | changes

    def call(self, body: Any, *, token: str | None = TOKEN, path: str = SWAP, method: str = "POST") -> int:
        """The HTTP status."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, headers)
            return connection.getresponse().status
        except (BrokenPipeError, ConnectionResetError):  # answered and closed before the body was read
            return 413
        finally:
            connection.close()

    def hang_up(self, body: bytes, *, length: int | None = None, after_s: float = 0.0) -> None:
        """Send it, wait, and go away without reading."""
        head = f"POST {SWAP} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
        with socket.create_connection((self.host, self.port), timeout=60.0) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(after_s)


def endpoint_attacks(workdir: Path) -> dict[str, Figure]:
    """Attempts that got in, moments when no token was generated, winners of twenty swaps at once."""
    with swapped_server(workdir, clients=4) as swapped:
        attacker = Attacker(swapped)
        got_in, tried, frozen = [], 0, []
        for name, attempt in _attempts(attacker, workdir):
            code = attempt()
            tried += 1
            if not 400 <= code < 500 or status(swapped.server.base_url, TOKEN)["version"] != "1":
                got_in.append(f"{name}: {code}")
            frozen += [] if _generates(swapped) else [name]
        frozen += _hang_ups(attacker)
        replayed = _replayed(attacker)
        winners, answers = _twenty_at_once(attacker)
        frozen += [] if _generates(swapped) else ["twenty at once"]
    return {
        "endpoint.got_in": at_most(len(got_in), 0, n=tried, which=got_in),
        "endpoint.replays_taken": at_most(replayed, 0, n=1),
        "endpoint.frozen": at_most(len(frozen), 0, n=tried + 4, which=frozen),
        "endpoint.winners_of_20": at_most(winners, 1, answers=answers),
        "endpoint.winners_of_20_at_least": at_least(winners, 1, answers=answers),
    }


def _attempts(attacker: Attacker, workdir: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    order = attacker.order()
    for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1], "Ünicode".encode().decode("latin-1")):
        yield f"token {token!r}", lambda token=token: attacker.call(order, token=token)
    roots = attacker.swapped.roots
    os.symlink(workdir, roots / "out")
    shape = attacker.swapped.folders["2"]
    for folder in (
        f"{roots}/../target",
        f"{roots}/out/target",
        "/etc",
        "/proc/self/cwd",
        f"{roots}/2/../../target",
        "versions/2",
        f"{shape}\x00",
        f"{roots}",
        "/" + "a/" * 4000,
        f"{roots}/none",
    ):
        yield f"folder {folder[:40]!r}", lambda folder=folder: attacker.call(order | {"folder": folder})
    for path in ("/slipstream/../slipstream/swap", "//slipstream/swap", "/slipstream/swap/", "/%73lipstream/swap"):
        yield f"path {path}", lambda path=path: attacker.call(order, token="wrong", path=path)
    yield "stale version", lambda: attacker.call(order | {"expected_version": "7"})
    yield "oversized body", lambda: attacker.call(b"x" * 20_000_000)
    yield "deep body", lambda: attacker.call(b"[" * 60_000)
    yield "no JSON", lambda: attacker.call(b"\xff\xfe")
    yield "another method", lambda: attacker.call(b"", method="PUT")
    for _ in range(30):
        attacker.call(order, token="guess")
    yield "the thirty-first guess", lambda: attacker.call(order, token="guess")


def _hang_ups(attacker: Attacker) -> list[str]:
    """The moments after which the engine generated nothing, or a whole order was not carried out."""
    frozen, url = [], attacker.swapped.server.base_url
    body = json.dumps(attacker.order()).encode()
    for name, sent in (("in the body", body[:40]), ("before the body", b"")):
        attacker.hang_up(sent, length=len(body))
        frozen += [] if _generates(attacker.swapped) else [f"hang up {name}"]
    for after_s in (0.0, 0.15):
        old = status(url, TOKEN)["version"]
        new = {"1": "2", "2": "1"}[old]
        attacker.hang_up(json.dumps(attacker.order(old, new)).encode(), after_s=after_s)
        took = _until(lambda new=new: status(url, TOKEN)["version"] == new)
        frozen += [] if took and _generates(attacker.swapped) else [f"hang up {after_s} s into the swap"]
    return frozen


def _replayed(attacker: Attacker) -> int:
    """Orders that were carried out a second time, once the old version was back."""
    epoch = status(attacker.swapped.server.base_url, TOKEN)["epoch"]
    order = attacker.order(expected_epoch=epoch)
    assert attacker.call(order) == 200
    assert attacker.call(attacker.order("2", "1")) == 200
    return int(attacker.call(order) == 200)


def _twenty_at_once(attacker: Attacker) -> tuple[int, dict[int, int]]:
    order = attacker.order()
    with ThreadPoolExecutor(20) as pool:
        codes = list(pool.map(attacker.call, [order] * 20))
    return codes.count(200), {code: codes.count(code) for code in sorted(set(codes))}


def _generates(swapped: Swapped) -> bool:
    requests = prompts(swapped.server.served_name, count=1, max_tokens=2)
    (reply,) = drive_sync(swapped.server.base_url, requests, concurrency=1, timeout_s=60.0)
    return reply.ok and not status(swapped.server.base_url, TOKEN)["paused"]


def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)  # the endpoint takes ten calls a second
    return False
