"""The body of alarms.json as the watch's own metrics."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.watch.alarms import ACCEPTED, ASKED, PAYS, PROMISE
from serving.monitor.gauges import Gauge

_PHASES = ("learning", "watching", "settling")
_OF_SLICE = {
    "acceptance_length": "acceptance_length",
    "expected": "expected_acceptance_length",
    "promised": "promised_acceptance_length",
    "threshold": "cusum_threshold",
}


def gauges(body: Mapping[str, Any], *, newest: float | None) -> Iterator[Gauge]:
    """Every metric of serving.monitor.gauges.NAMES that there is a value for; ``newest``: time of the newest record."""
    for name, one in body["slices"].items():
        for key, gauge in _OF_SLICE.items():
            if one.get(key) is not None:
                yield Gauge(gauge, one[key], {"slice": name})
        if "days_to_find" in one:
            yield Gauge("seconds_to_find", 86400 * one["days_to_find"], {"slice": name})
        for direction in ("falls", "rises"):
            if direction in one:
                yield Gauge("cusum", one[direction], {"slice": name, "direction": direction})
    for kind in (ACCEPTED, ASKED, PROMISE, PAYS):
        own = [one for one in body["alarms"] if one["kind"] == kind and one["fires"]]
        yield Gauge("alarm", float(any(one["falls"] for one in own)), {"kind": kind})
    for one in body["asked"]:
        if one["limit"]:
            yield Gauge("asked_drift", one["statistic"] / one["limit"], {"dimension": one["dimension"]})
    if body["pays"]:
        yield Gauge("speedup", body["pays"]["speedup"], {})
        yield Gauge("break_even_acceptance_length", body["pays"]["break_even"], {})
    for url, one in body["replicas"].items():
        yield Gauge("replica_up", float(one["down"] is None), {"replica": url})
        if one["acceptance_length"] is not None:
            yield Gauge("replica_acceptance_length", one["acceptance_length"], {"replica": url})
    for outcome, count in sorted(body["records"].items()):
        yield Gauge("records", float(count), {"outcome": outcome})
    for phase in _PHASES:
        yield Gauge("phase", float(body["phase"] == phase), {"phase": phase})
    yield Gauge("last_look_timestamp_seconds", body["at_s"], {})
    if newest is not None:
        yield Gauge("last_record_timestamp_seconds", newest, {})
