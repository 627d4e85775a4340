"""What became of every request, as Prometheus counters that all API server processes share."""

import os
import threading
from collections import Counter
from functools import cache
from typing import Any

PATH = "/slipstream/tap/metrics"
PREFIX = "slipstream_tap"
# Every request to a tapped route ends as exactly one of these.
OUTCOMES = {
    "written": "on record",
    "denied_opt_out": "an opt-out header is there",
    "denied_zero_retention": "the tenant is never written",
    "denied_ambiguous": "a trusted header came twice with different values",
    "denied_no_consent": "no rule allows it",
    "denied_without_tenant": "the tenant header is missing",
    "denied_without_subject": "the subject header is missing",
    "not_sampled": "the rate left it out",
    "not_sampled_accepted": "the bias to low acceptance left it out",
    "not_2xx": "no success",
    "hung_up": "the client left before the answer's end",
    "cut_short": "the answer ended early",
    "too_large": "over 8 MiB",
    "encoded": "the answer is compressed",
    "malformed_request": "the request's body cannot be read",
    "malformed_reply": "the answer's body cannot be read",
    "dropped_queue_full": "too many wait for the writer",
    "dropped_memory": "too many bytes wait for the writer",
    "dropped_writer_died": "it was with a writer that died",
    "dropped_disk_full": "the disk is full",
    "dropped_write_error": "another error while writing",
    "dropped_stopped": "the tap pauses after such an error",
    "dropped_at_shutdown": "the server ended before the writer had it",
    "failed": "an error of the tap's own; the log names it",
}
EVENTS = {
    "exact_ids": "records with the engine's own ids",
    "ids_from_client": "records with ids that the client asked for",
    "no_ids": "records without ids",
    "unsupported": "records of a request that has no chat form: marked, without content",
    "file_opened": "log files begun",
    "file_committed": "log files closed under their final names",
    "file_recovered": "log files that a dead writer left open, closed",
    "file_expired": "log files deleted at the end of their time to live",
    "sweep_failed": "sweeps of the folder that ended in an error",
    "stopped": "pauses after an error while writing",
    "writer_started": "writer processes started",
}


class Metrics:
    """Counts of one tap; safe from any thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._requests, self._events = _counters()

    def outcome(self, name: str, count: int = 1) -> None:
        """So many requests ended like this."""
        self._add(self._requests, name if name in OUTCOMES else "failed", count)

    def event(self, name: str, count: int = 1) -> None:
        """This happened so many times."""
        self._add(self._events, name, count)

    def _add(self, counter: Any, name: str, count: int) -> None:
        if not count:
            return
        with self._lock:
            self.counts[name] += count
        counter.labels(name).inc(count)


def exposition() -> tuple[bytes, str]:
    """The counters of all API server processes in Prometheus' text form, and its content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, multiprocess

    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):  # vLLM sets it where it starts several of them
        everything = multiprocess.MultiProcessCollector(CollectorRegistry()).collect()
        families = [family for family in everything if family.name.startswith(PREFIX)]
    else:
        families = [family for counter in _counters() for family in counter.collect()]
    return generate_latest(_Families(families)), CONTENT_TYPE_LATEST


class _Families:
    """As much of a registry as is written out."""

    def __init__(self, families: list[Any]):
        self.families = families

    def collect(self) -> list[Any]:
        """The families."""
        return self.families


@cache
def _counters() -> tuple[Any, Any]:
    """One pair a process, in the default registry too, so that vLLM's own /metrics shows them."""
    from prometheus_client import Counter as PrometheusCounter

    requests = PrometheusCounter(f"{PREFIX}_requests", "Requests to tapped routes by what became of them", ["outcome"])
    events = PrometheusCounter(f"{PREFIX}_events", "Events of the traffic tap", ["event"])
    for name in OUTCOMES:
        requests.labels(name)
    for name in EVENTS:
        events.labels(name)
    return requests, events
