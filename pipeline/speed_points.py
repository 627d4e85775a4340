"""The visits of a speed measurement → its points, and what follows from them: plain arithmetic on counts and times."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.acceptance import acceptance_length

Visits = Sequence[Mapping[str, Any]]
"""In the order they were made, each with num_speculative_tokens, points and, in first visits, replies."""


def points_of(visits: Visits) -> list[dict[str, Any]]:
    """One point a number of speculated tokens and concurrency, all its repeats together; times in seconds."""
    runs: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for visit in visits:
        for run in visit["points"]:
            runs.setdefault((visit["num_speculative_tokens"], run["concurrency"]), []).append(run)
    return [_point(number, concurrency, runs[number, concurrency]) for number, concurrency in sorted(runs)]


def _point(number: int, concurrency: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def add(name: str) -> Any:
        return sum(run[name] for run in runs)

    point = {
        "num_speculative_tokens": number,
        "concurrency": concurrency,
        "num_requests": add("num_requests"),
        "tokens_per_s": add("num_tokens") / add("wall_s"),
        "tokens_per_s_by_repeat": [run["num_tokens"] / run["wall_s"] for run in runs],
    }
    for name in ("ttft", "itl"):
        times = [one for run in runs for one in run[f"{name}_s"]]
        for percent in (50, 99):
            point[f"{name}_p{percent}_s"] = float(np.percentile(times, percent)) if times else None
    if number and add("num_drafts"):
        point["acceptance_length"] = acceptance_length(add("num_drafts"), add("num_accepted_tokens"))
    return point


def recommend(points: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Concurrency → the number of speculated tokens with the most tokens/s there; of equals, the smallest."""
    best: dict[int, Mapping[str, Any]] = {}
    for point in sorted(points, key=lambda p: (p["concurrency"], p["num_speculative_tokens"])):
        if point["concurrency"] not in best or point["tokens_per_s"] > best[point["concurrency"]]["tokens_per_s"]:
            best[point["concurrency"]] = point
    return {str(concurrency): point["num_speculative_tokens"] for concurrency, point in best.items()}


def pays_up_to(recommended: Mapping[str, int]) -> int | None:
    """The highest measured concurrency up to which speculation is faster throughout: 0 nowhere, None everywhere."""
    up_to = 0
    for concurrency, number in sorted((int(c), k) for c, k in recommended.items()):
        if number == 0:
            return up_to
        up_to = concurrency
    return None


def batch_size_schedule(recommended: Mapping[str, int]) -> list[list[int]]:
    """Inclusive ranges of the running batch and the number recommended there: [first, last, speculated tokens].

    Between two measured concurrencies the nearer one counts, by ratio; vLLM carries the last range on. It is the value
    of ``num_speculative_tokens_per_batch_size`` in vLLM's speculative config, which DFlash obeys on the V1 runner.
    Where it says 0 the drafter still runs, to keep its cache: somewhat slower than a server without one.

    Source: vllm/v1/spec_decode/dynamic/utils.py and DFlash's propose, vLLM 0.32.
    """
    known = sorted((int(c), k) for c, k in recommended.items())
    ranges: list[list[int]] = []
    for i, (concurrency, number) in enumerate(known):
        first = ranges[-1][1] + 1 if ranges else 1
        last = math.isqrt(concurrency * known[i + 1][0]) if i + 1 < len(known) else concurrency
        if ranges and ranges[-1][2] == number:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, number])
    return ranges


def lossless(visits: Visits, *, dtype: str) -> dict[str, Any]:
    """How many greedy replies at one request speculation changed, the most of any number; empty if none was compared.

    In half precision also how many the target alone changed when the same prompts ran a few at a time.
    """
    replies: dict[int, Mapping[str, list[str]]] = {}
    for visit in visits:
        if visit["replies"]:
            replies.setdefault(visit["num_speculative_tokens"], visit["replies"])
    if len(replies) < 2:
        return {}
    plain = replies[0]["alone"]
    by_number = {str(n): _different(plain, one["alone"]) for n, one in sorted(replies.items()) if n}
    found = {
        "num_prompts": len(plain),
        "num_different": max(by_number.values()),
        "num_different_by_speculated": by_number,
        "dtype": dtype,
    }
    if dtype != "float32":
        found["num_different_plain"] = _different(plain, replies[0]["together"])
    return found


def _different(some: Sequence[str], others: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))
