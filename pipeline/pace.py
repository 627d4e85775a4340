"""Is it faster for clients at production's concurrency, in tokens/s and at the tail, and does speculation pay at all?

What repeats here is a sitting: within one, requests share the engine and slow each other. So the rule is a t
interval on the log ratios of paired sittings, not the bootstrap over conversations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.artifacts import SpeedReport
from pipeline.bootstrap import Interval
from pipeline.config import GateConfig
from pipeline.criteria import Reason
from pipeline.speed_points import pays_up_to

_MAX_SITTINGS = 1000
# What speed measures otherwise by choice: its own load, no prefix cache, greedy, a sweep of speculated tokens, and
# servers of this machine, which may name the model otherwise.
_SPEEDS_OWN = ("prefix_caching", "load_generator", "max_num_seqs", "speculation", "sampling", "model", "adapters")


def tokens_per_s(measured: Mapping[str, Any], *, level: float) -> Interval:
    """Output tokens/s, challenger over champion, from paired sittings; without two of them, the ratio alone."""
    logs = _paired_logs(measured, lambda s: s["num_tokens"] / s["wall_s"] if s["wall_s"] else None)
    if len(logs):
        return _interval(logs, level)
    return _alone(measured["challenger"]["tokens_per_s"], measured["champion"]["tokens_per_s"])


def between_tokens(measured: Mapping[str, Any], *, level: float) -> Interval | None:
    """99th percentile of the time between a client's tokens, challenger over champion; None where not measured.

    A client that is held up reads several arrivals at once, and a sitting where it always did measured nothing.
    """
    logs = _paired_logs(measured, lambda s: s.get("itl_p99_s") or None)
    if len(logs):
        return _interval(logs, level)
    after, before = ((measured[r].get("latency") or {}).get("itl_p99_s") or None for r in ("challenger", "champion"))
    return None if after is None or before is None else _alone(after, before)


def speed(policy: GateConfig, measured: Mapping[str, Any], speed: Interval, *, level: float) -> Reason:
    """Promotion needs tokens/s shown to be at least min_speed_ratio; shown slower is a rejection."""
    limit, n = policy.min_speed_ratio, speed.num_clusters
    before, after = measured["champion"]["tokens_per_s"], measured["challenger"]["tokens_per_s"]
    if not (math.isfinite(speed.ratio) and speed.ratio > 0):
        message = f"tokens/s cannot be compared: {after} against {before}; measure again"
        return Reason("speed", message, speed.ratio, limit, False, "cannot_say", n=n)
    concurrency = measured["champion"].get("settings", {}).get("concurrency", "the evaluated")
    message = f"{after:.1f} tokens/s against {before:.1f} at concurrency {concurrency}: {speed.ratio:.3f} ×"
    if not speed.is_known:
        message += f" from {n or 'one'} sitting, so how sure that is cannot be told; set evaluate.blocks to 6 or more"
        return Reason("speed", message, speed.ratio, limit, False, "hold", n=n)
    message += f" ({speed.low:.3f} to {speed.high:.3f} from {n} sittings), at least {limit:g} × asked for"
    passed, verdict = speed.low >= limit, "hold"
    if not passed and speed.high < max(1.0, limit):
        verdict = "reject"
        message += ": shown slower, whatever its acceptance"
    elif not passed:
        message += f"; {_more(speed, limit, level)}"
    return Reason("speed", message, speed.ratio, limit, passed, verdict, speed.low, speed.high, n)


def tail(policy: GateConfig, tail: Interval | None, *, level: float) -> Reason:
    """The slowest hundredth of the gaps between tokens may not grow beyond max_tail_ratio."""
    limit = policy.max_tail_ratio
    if tail is None:
        return Reason("tail", "time between tokens: not measured, replies came whole", None, limit, None)
    n = tail.num_clusters
    if not (math.isfinite(tail.ratio) and tail.ratio > 0):
        message = f"time between tokens: the ratio of the 99th percentiles is {tail.ratio}; measure again"
        return Reason("tail", message, tail.ratio, limit, False, "cannot_say", n=n)
    message = f"99th percentile of the time between a client's tokens: {tail.ratio:.3f} × the champion's"
    if tail.is_known:
        message += f" ({tail.low:.3f} to {tail.high:.3f} from {n} sittings)"
    message += f", at most {limit:g} × allowed"
    passed, verdict = tail.ratio <= limit, "hold"
    if not passed and tail.low > limit:
        verdict = "reject"
        message += ": shown above"
    elif not passed:
        message += f": above, but not shown; {_more(tail, limit, level)}"
    return Reason("tail", message, tail.ratio, limit, passed, verdict, tail.low, tail.high, n)


def speculation(measured: Mapping[str, Any], speed: SpeedReport | None) -> list[Reason]:
    """Whether speculating as many tokens as are served pays at production's concurrency; [] without a SpeedReport."""
    if speed is None:
        return []
    settings = measured["champion"].get("settings", {})
    concurrency = settings.get("concurrency")
    rates = _rates(speed).get(concurrency, {})
    best = max((k for k in rates if k), key=lambda k: rates[k], default=0)
    number = _num_served(settings, speed) or max(rates, default=0)
    alone, drafting = rates.get(0), rates.get(number) if number else None
    if not (alone and drafting):
        message = (
            f"speculation on and off was not measured at concurrency {concurrency}, where the fleet serves; "
            "add it to speed.concurrencies"
        )
        if alone and best:
            message = (
                f"{number} speculated tokens, as many as are served, were not measured at concurrency {concurrency}; "
                "add them to speed.num_speculative_tokens"
            )
        return [Reason("speculation", message, None, 1.0, False, "hold")]
    ratio = drafting / alone
    message = f"at concurrency {concurrency} the drafter gives {ratio:.2f} × the target alone ({drafting:.1f} tokens/s)"
    if ratio <= 1 and rates[best] <= alone:
        up_to = speculate_up_to(speed)
        message += f": don't speculate above concurrency {up_to}" if up_to else ": don't speculate at any measured one"
    elif rates[best] > drafting:
        message += f" with {number} speculated tokens, as served; {best} give {rates[best] / alone:.2f} ×"
    return [Reason("speculation", message, ratio, 1.0, ratio > 1, "dont_speculate")]


def _num_served(settings: Mapping[str, Any], speed: SpeedReport) -> int:
    """Tokens that are speculated where acceptance was measured; 0 where nothing says."""
    served = (settings.get("speculation") or {}).get("num_speculative_tokens")
    sizes = [one for one in (settings.get("block_size"), speed.settings.get("block_size")) if isinstance(one, int)]
    return served or (sizes[0] - 1 if sizes else 0)


def differences(evaluated: Mapping[str, Any], timed: Mapping[str, Any]) -> list[str]:
    """Settings in which a measurement of speed is not that of acceptance, with both values."""
    found = []
    for name in sorted(evaluated.keys() & timed.keys() - set(_SPEEDS_OWN)):
        ours, theirs = evaluated[name], timed[name]
        # Drafters of several shapes are evaluated side by side; speed is one's.
        if ours != theirs and not (name == "block_size" and isinstance(ours, list) and theirs in ours):
            found.append(f"{name}: {theirs!r}, evaluated with {ours!r}")
    return found


def unlike(differences: Sequence[str]) -> list[Reason]:
    """Why a measurement of speed is not used; [] where it is."""
    if not differences:
        return []
    message = (
        f"speed was measured with other settings ({'; '.join(differences)}) and is not used; "
        "run `slipstream speed` again"
    )
    return [Reason("speed_report", message, len(differences), 0, None)]


def drift(policy: GateConfig, again: Mapping[str, float] | None) -> list[Reason]:
    """The champion's second visit against its first, where the drafters did not take turns: has the machine changed?"""
    if again is None:
        return []
    limit = policy.max_drift
    if not again:
        message = "the champion's second visit cannot be compared with its first; measure again"
        return [Reason("drift", message, None, limit, False, "hold")]
    moved = {name: abs(ratio - 1) if math.isfinite(ratio) else math.inf for name, ratio in again.items()}
    most = max(moved, key=lambda name: moved[name])
    figures = ", ".join(f"{ratio:.3f} × in {name}" for name, ratio in again.items())
    message = f"the champion's second visit gave {figures} of its first; at most {limit:.0%} apart is allowed"
    passed = moved[most] <= limit
    if not passed:
        message += ": the machine changed while the drafters were measured; measure again where nothing else runs"
    return [Reason("drift", message, again[most], limit, passed, "hold")]


def speculate_up_to(speed: SpeedReport) -> int:
    """The highest measured concurrency up to which speculation is faster than the target alone; 0: nowhere."""
    up_to = pays_up_to(speed.recommended)
    return max(_rates(speed), default=0) if up_to is None else up_to


def _rates(speed: SpeedReport) -> dict[int, dict[int, float]]:
    """Concurrency → speculated tokens → tokens/s."""
    rates: dict[int, dict[int, float]] = {}
    for point in speed.points:
        rates.setdefault(point["concurrency"], {})[point["num_speculative_tokens"]] = point["tokens_per_s"]
    return rates


def _paired_logs(measured: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float | None]) -> np.ndarray:
    """Log of challenger over champion for every block that both sat in and were measured in."""
    sides = [
        {one["block"]: value(one) for one in measured[role].get("sittings") or ()}
        for role in ("challenger", "champion")
    ]
    pairs = [(sides[0][block], sides[1][block]) for block in sides[0] if block in sides[1]]
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log([a for a, _ in pairs]) - np.log([b for _, b in pairs])


def _interval(logs: Sequence[float], level: float) -> Interval:
    from scipy import stats

    n, centre = len(logs), float(np.mean(logs))
    if n < 2 or not math.isfinite(centre):
        return Interval(math.exp(centre) if math.isfinite(centre) else math.nan, math.nan, math.nan, n)
    half = float(stats.t.isf(level, n - 1) * np.std(logs, ddof=1) / math.sqrt(n))
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(min(centre + half, 50)), n)


def _alone(after: float | None, before: float | None) -> Interval:
    return Interval(after / before if before and after is not None else math.nan, math.nan, math.nan, 0)


def _more(one: Interval, limit: float, level: float) -> str:
    """How many more sittings would tell, if ratio and spread stay what they are."""
    from scipy import stats

    if not one.is_known:
        return "one sitting cannot tell; set evaluate.blocks to 6 or more"
    n = one.num_clusters
    deviation = math.log(one.high / one.ratio) * math.sqrt(n) / float(stats.t.isf(level, n - 1))
    distance = abs(math.log(one.ratio / limit))
    for more in range(1, _MAX_SITTINGS):
        if stats.t.isf(level, n + more - 1) * deviation / math.sqrt(n + more) <= distance:
            return f"about {more} more sittings would tell (evaluate.blocks = {n + more})"
    return "too near to the limit for any number of sittings to tell"
