"""One interval of a soak: what the canary replica and the others have counted since the last look at their counters."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from serving.errors import DeployError
from serving.fleet.counters import Counts, NoCountersError, counts_of, scrape
from serving.fleet.replicas import Seen
from serving.fleet.rollout import Rollout, Soak
from serving.fleet.soak import Interval

logger = logging.getLogger("slipstream")


def sampled(soak: Soak, rollout: Rollout, seen: Mapping[str, Seen]) -> Soak:
    """The soak with one more interval. A replica that started anew in it, or could not be read, is left out of it.

    Raises: NoCountersError for the canary replica.
    """
    now: dict[str, Counts] = {}
    grown: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for record in rollout.replicas:
        is_canary = record.name == rollout.canary
        if not seen[record.name].is_up or (record.state == "serving" and not is_canary):
            continue  # down, or on the new drafter too
        try:
            counts = now[record.name] = scrape(record.url)
        except NoCountersError:
            if is_canary:
                raise
            continue
        except DeployError as error:
            logger.warning("deploy: %s", error)
            continue
        if (since := counts.since(counts_of(soak.last.get(record.name)))) is not None:
            grown[is_canary].update(drafts=since.num_drafts, accepted=since.num_accepted_tokens)
    own, others = grown[True], grown[False]
    interval = Interval(own["drafts"], own["accepted"], others["drafts"], others["accepted"])
    intervals = (*soak.intervals, interval) if soak.last else soak.intervals
    return replace(soak, last={name: counts.as_dict() for name, counts in now.items()}, intervals=intervals)


def counts_or_none(url: str) -> Counts | None:
    """A replica's counts now; None where they can't be read."""
    try:
        return scrape(url)
    except DeployError:
        return None
