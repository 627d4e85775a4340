"""What the tap costs: time between tokens on a real server, and CPU a chunk.

One server, the tap switched from block to block by the header that its consent rule asks for. Two servers would differ
in more than the tap (where their memory and threads fell, which of them idles beside the other), and on a few cores
those differences are larger than what is measured. What the switch leaves on is the middleware's look at the headers,
once a request and never a chunk, and an idle writer process. Blocks alternate A B B A, so that drift falls on both
sides alike; intervals are bootstrapped over pairs of neighbouring blocks, within which gaps are not independent. The
medians are compared pair by pair, so that a machine that slows down between pairs is no difference; the 99th
percentiles over all gaps of a side, since a block alone has too few.
"""

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.figures import Figure, at_most, shown
from pipeline.workloads import support_mails
from serving.launch import VllmServer
from serving.load import drive_sync

CONSENT = {"X-Consent": "training"}
RESAMPLES = 2000


@dataclass
class Gaps:
    """Seconds between the arrivals of a stream's tokens, block by block; block i of either side is of one pair."""

    off: list[list[float]] = field(default_factory=list)
    on: list[list[float]] = field(default_factory=list)
    failed: int = 0


def tap_cost(
    workdir: Path,
    *,
    target: Path,
    drafter: Path | None = None,
    pairs: int = 20,
    streams: int = 8,
    max_tokens: int = 64,
    dtype: str = "bfloat16",
) -> dict[str, Figure]:
    """Ratio of the median and of the 99th percentile of inter-token latency, tapped by untapped, at so many streams.

    Each is judged by the upper end of its 95% interval.
    """
    server = VllmServer(
        model=target,
        drafter=drafter,
        log=workdir / "server.log",
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=streams,
        prefix_caching=False,
        tap_dir=workdir / "traffic",
        tap_consent="header:X-Consent=training",
    )
    with server:
        gaps = measured(server, pairs=pairs, streams=streams, max_tokens=max_tokens)
    written = sum(path.read_bytes().count(b"\n") for path in (workdir / "traffic").glob("*.jsonl"))
    note = {
        "on": f"{target.name}, {streams} streams, {os.cpu_count()} cores",
        "n": sum(map(len, gaps.on)),
        "pairs": pairs,
    }
    median, p99 = ratio_of_medians(gaps), ratio_of(gaps, 99)
    off = [gap for block in gaps.off for gap in block]
    return {
        "tap_cost.itl_median_ratio": at_most(median[2], 1.02, ratio=median[1], interval=[median[0], median[2]], **note),
        "tap_cost.itl_p99_ratio": at_most(p99[2], 1.10, ratio=p99[1], interval=[p99[0], p99[2]], **note),
        "tap_cost.itl_median_ms": shown(1e3 * statistics.median(off), p99_ms=1e3 * float(np.percentile(off, 99))),
        "tap_cost.failed_requests": at_most(gaps.failed, 0, n=2 * pairs * streams),
        "tap_cost.unwritten_records": at_most(pairs * streams - written, 0, n=pairs * streams),
    }


def measured(server: VllmServer, *, pairs: int, streams: int, max_tokens: int) -> Gaps:
    """The gaps of so many pairs of blocks; a first pair warms up and is left out."""
    mails = islice(support_mails.prompts(streams, seed=5), streams)
    requests = [
        {
            "model": server.served_name,
            "messages": mail["messages"],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        for mail in mails
    ]
    gaps = Gaps()
    drive_sync(server.base_url, requests * 2, concurrency=streams)
    for pair in range(pairs):
        for on in (False, True) if pair % 2 == 0 else (True, False):
            replies = drive_sync(server.base_url, requests, concurrency=streams, headers=CONSENT if on else {})
            gaps.failed += sum(not reply.ok for reply in replies)
            (gaps.on if on else gaps.off).append([gap for reply in replies for gap in reply.itl_s])
    return gaps


def ratio_of(gaps: Gaps, percentile: float) -> tuple[float, float, float]:
    """Lower end, value and upper end of the ratio on / off of a percentile over all gaps of a side."""
    on, off = ([np.asarray(block) for block in blocks] for blocks in (gaps.on, gaps.off))

    def ratio(chosen: Sequence[int]) -> float:
        first, second = (np.percentile(np.concatenate([side[i] for i in chosen]), percentile) for side in (on, off))
        return float(first / second)

    return _with_interval(ratio, len(on))


def ratio_of_medians(gaps: Gaps) -> tuple[float, float, float]:
    """Lower end, value and upper end of the geometric mean over pairs of the ratio on / off of their medians."""
    logs = np.log([np.median(on) / np.median(off) for on, off in zip(gaps.on, gaps.off, strict=True)])
    return _with_interval(lambda chosen: float(np.exp(logs[list(chosen)].mean())), len(logs))


def _with_interval(statistic: Callable[[Sequence[int]], float], num_pairs: int) -> tuple[float, float, float]:
    """A statistic of pairs between the ends of its 95% interval, bootstrapped over them."""
    draw = np.random.default_rng(0)
    drawn = [statistic(draw.integers(num_pairs, size=num_pairs)) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), statistic(range(num_pairs)), float(high)


def chunk_cost(workdir: Path, *, chunks: int = 400, exchanges: int = 25, rounds: int = 7) -> dict[str, Figure]:
    """CPU microseconds that a streamed chunk costs: on the event loop, in the tap's thread, and in its process."""
    loop_s, thread_s = [], []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with _tap(workdir) as tap:
        for _ in range(rounds + 1):  # the first warms up
            untapped, _ = _streamed(tap, chunks=chunks, exchanges=exchanges, headers=[])
            tapped, others = _streamed(tap, chunks=chunks, exchanges=exchanges, headers=[(b"x-consent", b"training")])
            loop_s.append(tapped - untapped)
            thread_s.append(others)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    with _tap(workdir):
        pass
    idle = resource.getrusage(resource.RUSAGE_CHILDREN)

    def spent(one: Any, other: Any) -> float:
        return other.ru_utime + other.ru_stime - one.ru_utime - one.ru_stime

    num_chunks = chunks * exchanges
    own = spent(before, after) - spent(after, idle)
    note = {"n": num_chunks * rounds}
    return {
        "tap_cost.loop_us_per_chunk": shown(1e6 * statistics.median(loop_s[1:]) / num_chunks, **note),
        "tap_cost.thread_us_per_chunk": shown(1e6 * statistics.median(thread_s[1:]) / num_chunks, **note),
        "tap_cost.process_us_per_chunk": shown(1e6 * own / (num_chunks * (rounds + 1)), **note),
    }


class _tap:
    """A tap before an application that streams what an engine's client yields. ``with _tap(folder) as tap:``"""

    def __init__(self, folder: Path):
        from serving.engine.exact_replies import watch
        from serving.tap import TrafficTap

        given = {"DIR": str(folder / "chunks"), "CONSENT": "header:x-consent=training"}
        os.environ.update({f"SLIPSTREAM_TAP_{name}": value for name, value in given.items()})
        try:
            self.tap = TrafficTap(_application)
        finally:
            for name in given:
                del os.environ[f"SLIPSTREAM_TAP_{name}"]
        self.tap.client = _Client()
        watch(self.tap.client)

    def __enter__(self) -> Any:
        return self.tap

    def __exit__(self, *_: Any) -> None:
        self.tap.feeder.close(60)


class _Client:
    """Yields outputs of one token, as an engine's client does."""

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        """``prompt`` outputs."""
        for i in range(prompt):
            choice = SimpleNamespace(
                index=0, token_ids=[i], finish_reason="length" if i == prompt - 1 else None, spec_decode_metrics=None
            )
            yield SimpleNamespace(prompt_token_ids=[0, 1, 2], outputs=[choice])


_PARAMS = SimpleNamespace(output_kind=SimpleNamespace(name="DELTA"))
_EVENT = (
    b'data: {"id":"chatcmpl-x","object":"chat.completion.chunk","created":1796000000,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)


async def _application(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for _ in scope["client"].generate(scope["chunks"], _PARAMS, "chatcmpl-x"):
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _streamed(tap: Any, *, chunks: int, exchanges: int, headers: list[tuple[bytes, bytes]]) -> tuple[float, float]:
    """CPU seconds of so many exchanges: of this thread, and of this process's other threads until all is passed on."""
    body = {"type": "http.request", "body": b'{"messages": [{"role": "user", "content": "hello"}]}'}
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"client": tap.client, "chunks": chunks}

    async def receive() -> Any:
        return body

    async def send(message: Any) -> None:
        pass

    async def scenario() -> tuple[float, float]:
        started, process = time.thread_time(), time.process_time()
        for _ in range(exchanges):
            await tap(scope, receive, send)
        own = time.thread_time() - started
        while not tap.feeder.queue.empty():
            await asyncio.sleep(0.01)
        return own, time.process_time() - process - (time.thread_time() - started)

    return asyncio.run(scenario())
