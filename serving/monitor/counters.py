"""One replica's counters, and what was counted between two looks at it."""

import math
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any

# Names as vLLM 0.32 has them (vllm/v1/spec_decode/metrics.py, vllm/v1/metrics/loggers.py); a counter's sample has
# _total behind it. Every API server process and every data-parallel engine has samples of its own: they are added.
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:generation_tokens": "num_tokens",
    "vllm:request_success": "num_requests",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_STEP_TIME = "vllm:inter_token_latency_seconds"  # of every request and step: the time since its last tokens
_ITERATION = "vllm:iteration_tokens_total"  # of every step of the engine, for all requests that are in it
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Counters:
    """What a replica has counted since it started, and how busy it is now."""

    at: float
    """Seconds since 1970."""
    started: float | None
    """When its oldest process started, where it says so."""
    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    num_tokens: float = 0.0
    num_requests: float = 0.0
    step_s: float = 0.0
    """Sum over requests of the time between their tokens, and"""
    num_steps: float = 0.0
    """how many times that was: a step of one request each."""
    num_iterations: float = 0.0
    """Steps of the engine, each for all requests that were running then, or for prefills."""
    accepted_per_pos: tuple[float, ...] = ()
    running: float = 0.0
    waiting: float = 0.0
    speculates: bool = False
    """Whether it has counters of speculation at all."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Counters":
        """The inverse of as_dict."""
        return cls(**{**body, "accepted_per_pos": tuple(body["accepted_per_pos"])})


@dataclass(frozen=True)
class Counted:
    """What a replica did between two looks."""

    seconds: float
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    num_tokens: float
    num_requests: float
    step_s: float
    num_steps: float
    num_iterations: float
    accepted_per_pos: tuple[float, ...]
    restarted: bool
    """It had begun to count anew: what it did between the first look and its end is lost."""


_STEPS = ("step_s", "num_steps", "num_iterations")
_SUMS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_tokens", "num_requests", *_STEPS)


def read_counters(text: str, *, at: float) -> Counters:
    """The counters in an exposition. Raises: ValueError for a text that is none."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    started: list[float] = []
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        names.add(family.name)
        for sample in family.samples:
            value = sample.value if math.isfinite(sample.value) else 0.0
            if family.name in _COUNTERS and sample.name == f"{family.name}_total":
                found[_COUNTERS[family.name]] += value
            elif family.name == _PER_POSITION and sample.name.endswith("_total"):
                positions[int(sample.labels["position"])] += value
            elif family.name == _STEP_TIME and sample.name.endswith(("_sum", "_count")):
                found["step_s" if sample.name.endswith("_sum") else "num_steps"] += value
            elif sample.name == f"{_ITERATION}_count":
                found["num_iterations"] += value
            elif sample.name in (_RUNNING, _WAITING):
                found["running" if sample.name == _RUNNING else "waiting"] += value
            elif sample.name == _STARTED:
                started.append(value)
    if not names & {*_COUNTERS, _RUNNING}:
        raise ValueError("no counter of vLLM in it")
    width = max(positions, default=-1) + 1
    return Counters(
        at=at,
        started=min(started) if started else None,
        accepted_per_pos=tuple(positions[k] for k in range(width)),
        speculates="vllm:spec_decode_num_drafts" in names,
        **found,
    )


def between(before: Counters | None, after: Counters) -> Counted | None:
    """What was counted between two looks; None for the first look, and for one that is not later.

    A counter that fell was begun anew, and so were all of that replica: all of what it has counted since then counts.
    """
    if before is None or after.at <= before.at:
        return None
    fell = any(getattr(after, name) < getattr(before, name) for name in _SUMS)
    later = None not in (before.started, after.started) and after.started > before.started + 1
    restarted = fell or later
    base = Counters(at=before.at, started=None) if restarted else before
    old = base.accepted_per_pos + (0.0,) * (len(after.accepted_per_pos) - len(base.accepted_per_pos))
    return Counted(
        seconds=after.at - before.at,
        accepted_per_pos=tuple(b - a for a, b in zip(old, after.accepted_per_pos, strict=False)),
        restarted=restarted,
        **{name: getattr(after, name) - getattr(base, name) for name in _SUMS},
    )
