"""A replica's own counters of speculative decoding, from its Prometheus metrics.

Source: the names in vLLM's v1/spec_decode/metrics.py.
"""

import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any, Self

from serving.errors import DeployError

_NAMES = {
    "vllm:spec_decode_num_drafts_total": "num_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
    "process_start_time_seconds": "started_s",
}


class NoCountersError(DeployError):
    """A replica answers, and counts no drafts."""


@dataclass(frozen=True)
class Counts:
    """What a replica has counted since its process started, all of its engines together."""

    num_drafts: int = 0
    """Verification steps."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    started_s: float | None = None
    """When the process started (epoch seconds), where it tells."""

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None without a draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def since(self, earlier: Self | None) -> Self | None:
        """What was counted after ``earlier``; None where the replica started anew in between."""
        if earlier is None or (self.started_s or 0) != (earlier.started_s or 0):
            return None
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return None if min(grown.values()) < 0 else type(self)(**grown, started_s=self.started_s)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def counts_of(plain: Mapping[str, Any] | None) -> Counts | None:
    """What ``as_dict`` gave."""
    return Counts(**plain) if plain else None


def scrape(url: str, *, timeout_s: float = 10.0) -> Counts:
    """A replica's counts now.

    Raises: DeployError when it does not answer; NoCountersError when its answer has no counters of drafts.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as answer:
            text = answer.read().decode()
    except (HTTPException, OSError, ValueError) as error:
        raise DeployError(f"{url}/metrics: could not be read ({error})")
    return parse(text, where=f"{url}/metrics")


def parse(text: str, *, where: str) -> Counts:
    """The counts in a Prometheus exposition, summed over engines. Raises: NoCountersError."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (name := _NAMES.get(sample.name)) is not None:
                    sums[name] = sums.get(name, 0.0) + sample.value
    except ValueError as error:
        raise NoCountersError(f"{where}: not a Prometheus exposition ({error})")
    started_s = sums.pop("started_s", None)
    if missing := [name for name, key in _NAMES.items() if key != "started_s" and key not in sums]:
        raise NoCountersError(
            f"{where}: no {missing[0]}; the server must speculate and run without --disable-log-stats"
        )
    return Counts(**{name: int(value) for name, value in sums.items()}, started_s=started_s)
