"""A replica's own counters of speculative decoding, as a rollout needs them; read by serving/monitor."""

import time
from collections.abc import Mapping
from typing import Any

from serving.errors import DeployError
from serving.monitor.counters import Counted, Counters, between, read_counters
from serving.monitor.scrape import fetch


class NoCountersError(DeployError):
    """A replica answers, and counts no drafts."""


def scrape(url: str, *, timeout_s: float = 10.0) -> Counters:
    """A replica's counters now.

    Raises: DeployError when it does not answer; NoCountersError when its answer has no counters of drafts.
    """
    where = f"{url}/metrics"
    try:
        text = fetch(url, timeout_s=timeout_s)
    except OSError as error:
        raise DeployError(f"{where}: could not be read ({error})")
    return parse(text, where=where)


def parse(text: str, *, where: str) -> Counters:
    """The counters in a Prometheus exposition. Raises: NoCountersError."""
    try:
        found = read_counters(text, at=time.time())
    except (ValueError, KeyError) as error:
        raise NoCountersError(f"{where}: {error}; the server must run without --disable-log-stats")
    if not found.speculates:
        raise NoCountersError(f"{where}: no counter of drafts; the server must speculate")
    return found


def since(earlier: Counters | None, now: Counters) -> Counted | None:
    """What was counted between two looks; None for the first, and where the replica started anew in between."""
    counted = between(earlier, now)
    return None if counted is None or counted.restarted else counted


def acceptance_length(counted: Counted | Counters) -> float | None:
    """1 + accepted / drafts; None without a draft."""
    return 1 + counted.num_accepted_tokens / counted.num_drafts if counted.num_drafts else None


def counters_of(plain: Mapping[str, Any] | None) -> Counters | None:
    """What ``as_dict`` gave."""
    return Counters.from_dict(dict(plain)) if plain else None
