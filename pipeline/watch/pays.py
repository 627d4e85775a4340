"""Whether speculation pays at the load that a replica has, by the gate's own speed points.

At so many requests at a time the gate measured tokens/s with speculation, at some acceptance length, and without. A
step takes what it takes, whatever is accepted, so tokens/s with speculation go with the acceptance length; where they
fall to those without lies the break-even length. Between two loads both are interpolated, by ratio; beyond the last
one that was measured, the last one counts, and the watch says so.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.watch.alarms import PAYS, Alarm
from pipeline.watch_config import WatchConfig

_MIN_DRAFTS = 2000  # of all the hours together: fewer say little about acceptance
_AGAIN = 1.02  # the gain from which it pays again: what wavers around nothing raises one alarm
_SLOW = 1.5  # steps that take so many times what the gate measured deserve a word


@dataclass(frozen=True)
class Point:
    """One load as the gate measured it."""

    concurrency: float
    break_even: float
    """Acceptance length at which speculation neither gains nor costs."""
    step_s: float
    """Seconds a step with speculation took."""


@dataclass(frozen=True)
class Load:
    """What a replica did in one hour."""

    url: str
    start: int
    running: float
    """Requests at a time, over the time in which there were any."""
    num_drafts: float
    num_accepted_tokens: float
    num_tokens: float
    step_s: float | None = None
    """Mean time of a step."""


@dataclass(frozen=True)
class Paid:
    """Hours of a load together."""

    speedup: float
    """Tokens a second with speculation over without."""
    running: float
    acceptance_length: float
    break_even: float
    num_drafts: float
    slow: float | None
    """Time of a step over what the gate measured at that load."""
    beyond: bool
    """More requests at a time than the gate measured."""


def points_of(points: Sequence[Mapping[str, Any]], num_speculative_tokens: int) -> list[Point]:
    """The loads of a SpeedReport at which both the target alone and this number of speculated tokens were measured."""
    plain = {p["concurrency"]: p["tokens_per_s"] for p in points if p["num_speculative_tokens"] == 0}
    found = []
    for one in sorted(points, key=lambda p: p["concurrency"]):
        load, length = one["concurrency"], one.get("acceptance_length")
        if one["num_speculative_tokens"] != num_speculative_tokens or load not in plain or not length:
            continue
        speed = one["tokens_per_s"]
        found.append(Point(load, length * plain[load] / speed, load * length / speed))
    return found


def at(points: Sequence[Point], running: float) -> Point:
    """The point of a load, between its neighbours by ratio, at the ends the end."""
    running = max(running, 1e-9)
    if running <= points[0].concurrency or len(points) == 1:
        return points[0]
    if running >= points[-1].concurrency:
        return points[-1]
    above = next(i for i, one in enumerate(points) if one.concurrency > running)
    a, b = points[above - 1], points[above]
    share = math.log(running / a.concurrency) / math.log(b.concurrency / a.concurrency)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** share

    return Point(running, between(a.break_even, b.break_even), between(a.step_s, b.step_s))


def paid(points: Sequence[Point], loads: Iterable[Load]) -> Paid | None:
    """What speculation gained over these hours and replicas together; None where nothing was drafted.

    Times add up: the time of all tokens without speculation over the time with it.
    """
    drafts = accepted = tokens = time = steps = expected_steps = weighted = even = 0.0
    beyond = False
    for one in loads:
        if not one.num_drafts or not one.num_tokens:
            continue
        point = at(points, one.running)
        length = 1 + one.num_accepted_tokens / one.num_drafts
        drafts, accepted, tokens = drafts + one.num_drafts, accepted + one.num_accepted_tokens, tokens + one.num_tokens
        time += one.num_tokens * point.break_even / length
        weighted += one.running * one.num_tokens
        even += point.break_even * one.num_tokens
        beyond = beyond or one.running > points[-1].concurrency
        if one.step_s:
            steps, expected_steps = steps + one.step_s * one.num_tokens, expected_steps + point.step_s * one.num_tokens
    if not drafts or not time:
        return None
    slow = steps / expected_steps if expected_steps else None
    return Paid(tokens / time, weighted / tokens, 1 + accepted / drafts, even / tokens, drafts, slow, beyond)


def judged(config: WatchConfig, found: Paid | None, *, firing: bool, at: int) -> Alarm | bool:
    """An alarm to raise, or whether the one that fires goes on."""
    if found is None or found.num_drafts < _MIN_DRAFTS:
        return firing
    if firing:
        return found.speedup < _AGAIN
    if found.speedup >= 1:
        return False
    slow = f"; steps take {found.slow:.1f} times what the gate measured" if (found.slow or 0) > _SLOW else ""
    far = "; the gate measured no load as high (`slipstream speed`)" if found.beyond else ""
    message = (
        f"speculation no longer pays at this load: {found.running:.0f} requests at a time for {config.pays_hours} h, "
        f"acceptance length {found.acceptance_length:.2f}, {found.break_even:.2f} would break even; "
        f"{found.speedup:.2f} times the tokens/s of the target alone{slow}{far}"
    )
    return Alarm(PAYS, at, at - config.pays_hours * 3600, message, True, (), {"speedup": found.speedup - 1})
