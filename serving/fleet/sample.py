"""One interval of a soak: what the canary replica and the others have counted since the last look at their counters;
and what the soak so far says, where a verdict is due.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from serving.errors import DeployError
from serving.fleet.counters import NoCountersError, counters_of, scrape, since
from serving.fleet.replicas import Seen
from serving.fleet.rollout import Policy, Record, Rollout, Soak
from serving.fleet.soak import Interval, Verdict, is_due, judge
from serving.monitor.counters import Counters

logger = logging.getLogger("slipstream")

_AT_ONCE = 32
_MAX_GAP = 5
"""Ticks between two samples; what is longer was no looking."""


def look_at_soak(
    rollout: Rollout, seen: Mapping[str, Seen], *, policy: Policy, now: float
) -> tuple[Soak, Verdict | None]:
    """The soak after one more sample, and the verdict where one was due."""
    soak, how = rollout.soak, policy.soak
    assert soak is not None and how is not None
    gap_s = max(0.0, now - (soak.began_at if soak.last_at is None else soak.last_at))
    observed_s = soak.observed_s + min(gap_s, _MAX_GAP * policy.soak_tick_s)
    soak = replace(soak, observed_s=observed_s, last_at=now)
    try:
        soak = sampled(soak, rollout, seen)
    except NoCountersError as error:
        verdict = Verdict("pass" if how.undecided == "go_on" else "fail", f"the soak cannot be judged: {error}")
        return replace(soak, verdict=verdict.why), verdict
    if not is_due(soak.looks, observed_s, how):
        return soak, None
    verdict = judge(soak.intervals, how, looks=soak.looks, elapsed_s=observed_s, promise=rollout.promise)
    return replace(soak, looks=soak.looks + 1, verdict=verdict.why), verdict


def sampled(soak: Soak, rollout: Rollout, seen: Mapping[str, Seen]) -> Soak:
    """The soak with one more interval. A replica that started anew in it, or could not be read, is left out of it.

    Raises: NoCountersError for the canary replica.
    """
    now: dict[str, Counters] = {}
    grown: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    compared = [record for record in rollout.replicas if _is_compared(record, rollout, seen)]
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(compared)))) as pool:
        found = list(pool.map(lambda record: _scraped(record.url), compared))
    for record, counters in zip(compared, found, strict=True):
        is_canary = record.name == rollout.canary
        if isinstance(counters, NoCountersError) and is_canary:
            raise counters
        if isinstance(counters, DeployError):
            logger.log(logging.WARNING if is_canary else logging.DEBUG, "deploy: %s", counters)
            continue
        now[record.name] = counters
        if (counted := since(counters_of(soak.last.get(record.name)), counters)) is not None:
            grown[is_canary].update(drafts=int(counted.num_drafts), accepted=int(counted.num_accepted_tokens))
    own, others = grown[True], grown[False]
    interval = Interval(own["drafts"], own["accepted"], others["drafts"], others["accepted"])
    intervals = (*soak.intervals, interval) if soak.last else soak.intervals
    return replace(soak, last={name: counters.as_dict() for name, counters in now.items()}, intervals=intervals)


def counters_or_none(url: str) -> Counters | None:
    """A replica's counters now; None where they can't be read."""
    found = _scraped(url)
    return None if isinstance(found, DeployError) else found


def _is_compared(record: Record, rollout: Rollout, seen: Mapping[str, Seen]) -> bool:
    """Whether it is up, and the canary replica or one that is still on another drafter."""
    return seen[record.name].is_up and (record.name == rollout.canary or record.state != "serving")


def _scraped(url: str) -> Counters | DeployError:
    try:
        return scrape(url)
    except DeployError as error:
        return error
