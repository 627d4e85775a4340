"""Speculation must not change answers: provable in float32, one request at a time; else no more often than chance.

In half precision, near-ties already move with the batch's shape, so two plain runs differ as well: what counts is
whether speculation adds to that.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.artifacts import SpeedReport
from pipeline.config import GateConfig
from pipeline.criteria import Reason, is_greedy


def replies(measured: Mapping[str, Any]) -> Reason:
    """Replies with one drafter against replies with another, on the gate's own prompts."""
    different, exact = _num_different(measured), _is_exact(measured)
    message = f"{different} replies differ from the champion's"
    message += "; in float32 at one request none may" if exact else " (near-ties move with batch shapes: a sign only)"
    n = sum(one["num_requests"] for role, one in measured.items() if role != "champion")
    return Reason("replies", message, different, 0, different == 0 if exact else None, "reject", n=n)


def speculation(policy: GateConfig, measured: Mapping[str, Any], speed: SpeedReport | None) -> Reason:
    """Greedy replies one at a time, speculation on against off; where it is asked for, they must have been compared.

    Replies that don't depend on the drafter, where they can be exact, say the same.
    """
    found = speed.lossless if speed else {}
    if not found.get("num_prompts"):
        message = "replies with speculation on and off: not compared"
        if not policy.require_losslessness or (_is_exact(measured) and not _num_different(measured)):
            return Reason("lossless", message, None, 0, None)
        message += ", and the policy asks for it; run `slipstream speed` with speed.lossless_prompts above 0"
        return Reason("lossless", message, None, 0, False, "hold")
    n, different = found["num_prompts"], found["num_different"]
    dtype = found.get("dtype") or speed.settings.get("dtype")
    message = f"{different} of {n} replies differ between speculation on and off"
    if dtype == "float32":
        message += ", in float32 at one request none may"
        if different:
            message += ": the engine's verification changes answers, nothing of this can serve"
        return Reason("lossless", message, different, 0, different == 0, "reject", n=n)
    if (plain := found.get("num_different_plain")) is None:
        message += f" in {dtype}; two plain runs were not compared, so it is a sign only"
        return Reason("lossless", message, different, None, None, n=n)
    tries = max(1, len(found.get("num_different_by_speculated", {})))
    return _no_more_than_plain(policy, message, (different, plain, n), tries)


def _no_more_than_plain(policy: GateConfig, message: str, counts: tuple[int, int, int], tries: int) -> Reason:
    """Fisher's exact test, one-sided: more differences than between two plain runs.

    ``different`` is the most of several numbers of speculated tokens: the p-value is Bonferroni's over them.
    """
    from scipy import stats

    different, plain, n = counts
    odds = stats.fisher_exact([[different, n - different], [plain, n - plain]], alternative="greater")
    p = min(1.0, tries * float(odds.pvalue))
    passed = p > policy.error_rate
    message += f", {plain} between two plain runs (p = {p:.2g}): {'no more' if passed else 'more'} than chance explains"
    return Reason("lossless", message, different, plain, passed, "reject", n=n)


def _is_exact(measured: Mapping[str, Any]) -> bool:
    """Whether equal requests have equal replies: float32, one at a time, greedy."""
    settings = measured["champion"].get("settings", {})
    return settings.get("dtype") == "float32" and settings.get("concurrency") == 1 and is_greedy(settings)


def _num_different(measured: Mapping[str, Any]) -> int:
    return sum(one.get("num_replies_different", 0) for one in measured.values())
