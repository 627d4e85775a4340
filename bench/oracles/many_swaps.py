"""Many swaps back and forth under steady load, and one swap against one restart."""

import math
import statistics
import time
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.figures import Figure, at_most, shown
from bench.oracles.swap_under_load import changed_replies, prompts
from bench.oracles.swapped_server import Pulse, Swapped, swapped_server
from serving.load import Driver

SETTLED_AFTER = 10
"""Swaps, after which memory must no longer grow: allocators and caches have found their size."""
WARM_REQUESTS, WARM_ROUNDS, WARM_BYTES = 400, 8, 2000
"""A server that has just started grows with its first requests, whatever it serves: so many at a time, until one adds
no more than this to its memory."""
JUDGED_FROM = 60
"""Swaps, below which the steps in which an allocator grows hide what one swap adds."""


def many_swaps(workdir: Path, *, swaps: int, clients: int = 8, **server: Any) -> dict[str, Figure]:
    """Failed requests, changed tokens, pause and memory; every other request is streamed."""
    judged = swaps >= JUDGED_FROM
    with swapped_server(workdir, clients=clients, **server) as swapped:
        asked = [
            one | ({"stream": True, "stream_options": {"include_usage": True}} if i % 2 else {})
            for i, one in enumerate(prompts(swapped.server.served_name, count=16, max_tokens=32))
        ]
        outcomes, memory = [], []
        with Driver(swapped.server.base_url, asked, concurrency=clients) as driver:
            driver.wait_for(2 * len(asked))  # an answer to every prompt
            before = _warmed(swapped, driver) if judged else 0.0
            for i in range(swaps):
                outcomes.append(swapped.swap(*(("1", "2") if i % 2 == 0 else ("2", "1"))))
                driver.wait_for(len(driver.replies) + clients)
                memory.append((len(driver.replies), swapped.memory()))
            after = _growth_alone(swapped, driver, requests=WARM_REQUESTS) if judged else 0.0
            replies = driver.stop()
        drafter = sum(file.stat().st_size for file in swapped.folders["1"].glob("*.safetensors"))
    pauses = sorted(outcome.pause_s for outcome in outcomes)
    closed = sorted(outcome.closed_s for outcome in outcomes)
    changed = changed_replies(replies) + sum(outcome.changed_outputs for outcome in outcomes)
    errors = sorted({str(reply.error)[:120] for reply in replies if not reply.ok})[:3]
    note = {"n": len(replies), "on": f"{swaps} swaps, {clients} clients"}
    figures = {
        "swaps.failed_requests": at_most(sum(not reply.ok for reply in replies), 0, **note, errors=errors),
        "swaps.changed_tokens": at_most(changed, 0, **note),
        "swaps.pause_p99_s": at_most(percentile(pauses, 0.99), 1.5, n=swaps, median=statistics.median(pauses)),
        "swaps.door_closed_p99_s": shown(percentile(closed, 0.99), n=swaps, median=statistics.median(closed)),
        "swaps.longest_request_s": shown(max(reply.latency_s for reply in replies), n=len(replies)),
    }
    return figures | _memory(memory, (before, after), drafter_bytes=drafter)


def _warmed(swapped: Swapped, driver: Driver) -> float:
    """Bytes that a request adds once the first ones have done so, or after WARM_ROUNDS."""
    for _ in range(WARM_ROUNDS):
        if (growing := _growth_alone(swapped, driver, requests=WARM_REQUESTS)) <= WARM_BYTES:
            break
    return growing


def _growth_alone(swapped: Swapped, driver: Driver, *, requests: int) -> float:
    """Bytes that a request adds to the server without any swap."""
    seen = []
    for _ in range(40):
        driver.wait_for(len(driver.replies) + requests // 40)
        seen.append((len(driver.replies), swapped.memory()))
    return growth(seen)


def _memory(memory: list[tuple[int, int]], alone: tuple[float, float], *, drafter_bytes: int) -> dict[str, Figure]:
    """What a swap adds beyond the requests around it, in drafters: one that is never freed would be 1.

    A request adds less the more there were, so what it adds by itself is the mean of before and after the swaps.
    """
    if len(memory) < SETTLED_AFTER + 5:
        return {}
    settled = memory[SETTLED_AFTER:]
    swaps = len(settled) - 1
    requests = (settled[-1][0] - settled[0][0]) / swaps
    added = (growth(settled) - sum(alone) / 2) * requests / drafter_bytes
    mib = {"memory_mib": [round(held / 2**20, 1) for _, held in memory]}
    note = {"n": swaps, "bytes_a_request_alone": [round(one) for one in alone], "drafter_bytes": drafter_bytes, **mib}
    if len(memory) < JUDGED_FROM:
        return {"swaps.memory_drafters_a_swap": shown(added, **note)}
    return {"swaps.memory_drafters_a_swap": at_most(added, 0.1, **note)}


def swap_against_restart(workdir: Path, *, swaps: int, restarts: int, **server: Any) -> dict[str, Figure]:
    """Time without an answer: around a swap, and around a stop and a start with the same flags."""
    with swapped_server(workdir, clients=2, **server) as swapped:
        swap_s, restart_s = [], []
        with Pulse(swapped.server.base_url, swapped.server.served_name) as pulse:
            pulse.wait_for(10, time.monotonic())
            for i in range(swaps):
                swap_s.append(_gap(pulse, lambda i=i: swapped.swap(*(("1", "2") if i % 2 == 0 else ("2", "1")))))
            for _ in range(restarts):
                restart_s.append(_gap(pulse, lambda: _restart(swapped)))
    ratio = statistics.median(swap_s) / statistics.median(restart_s)
    each = {"swap_s": [round(s, 3) for s in swap_s], "restart_s": [round(s, 2) for s in restart_s]}
    return {"swap_vs_restart.without_service": at_most(ratio, 0.1, n=swaps + restarts, **each)}


def _gap(pulse: Pulse, act: Any) -> float:
    since = time.monotonic()
    act()
    pulse.wait_for(5, time.monotonic())
    return pulse.longest_gap_s(since)


def _restart(swapped: Swapped) -> None:
    swapped.server.stop()
    swapped.server.start()


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def growth(points: list[tuple[int, int]]) -> float:
    """Theil and Sen's slope, the median of all pairs': one jump is no growth."""
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in combinations(points, 2) if j != i)
