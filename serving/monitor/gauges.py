"""A watch's own metrics in Prometheus' text form, and an endpoint that serves them."""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFIX = "slipstream_watch_"
NAMES = {
    "acceptance_length": "Acceptance length over the last day, by slice",
    "expected_acceptance_length": "Acceptance length that was expected of the same requests, by slice",
    "promised_acceptance_length": "Acceptance length that the gate measured, by slice",
    "cusum": "Evidence for a shift of acceptance, by slice and direction",
    "cusum_threshold": "The evidence at which an alarm is raised, by slice",
    "seconds_to_find": "Seconds of usual traffic until a shift of the configured size is found, by slice",
    "alarm": "1 while an alarm of this kind holds and nobody has taken it on",
    "asked_drift": "How far what is asked lies from the reference, by dimension: 1 is an alarm",
    "speedup": "Tokens a second with speculation over without, by the gate's points at the live load",
    "break_even_acceptance_length": "Acceptance length at which speculation costs what it gains at the live load",
    "replica_up": "Whether a replica answered the last look",
    "replica_acceptance_length": "Acceptance length by the replica's own counters, over the last hour",
    "records": "Records read since the watch began, by what became of them",
    "last_record_timestamp_seconds": "When the newest record that was read was served",
    "last_look_timestamp_seconds": "When the watch last looked",
    "phase": "1 for what acceptance is in: learning, watching or settling",
}
"""Every metric that a watch shows, without its prefix."""


@dataclass(frozen=True)
class Gauge:
    """One value."""

    name: str
    value: float
    labels: Mapping[str, str]


def exposition(gauges: Iterable[Gauge]) -> bytes:
    """The gauges in Prometheus' text form. Raises: KeyError for one whose name NAMES does not have."""
    from prometheus_client import generate_latest
    from prometheus_client.core import GaugeMetricFamily

    families: dict[str, GaugeMetricFamily] = {}
    for one in gauges:
        if one.name not in families:
            families[one.name] = GaugeMetricFamily(PREFIX + one.name, NAMES[one.name], labels=list(one.labels))
        families[one.name].add_metric([str(value) for value in one.labels.values()], one.value)
    return generate_latest(_Families(list(families.values())))


class _Families:
    """As much of a registry as is written out."""

    def __init__(self, families: list):
        self.families = families

    def collect(self) -> list:
        """The families."""
        return self.families


class Endpoint:
    """Serves GET /metrics for as long as the block runs; ``text`` is called for every request.

    ``listen`` is HOST:PORT, without a host this machine's own. Raises: OSError where that cannot be listened on.
    """

    def __init__(self, listen: str, text: Callable[[], bytes]):
        host, _, port = listen.rpartition(":")
        server = _IPv6 if "[" in host else ThreadingHTTPServer
        self._server = server((host.strip("[]") or "127.0.0.1", int(port)), _handler(text))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch-metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_address[1]

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _IPv6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def _handler(text: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            from prometheus_client import CONTENT_TYPE_LATEST

            known = self.path.partition("?")[0] == "/metrics"
            body = text() if known else b"only /metrics is here\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST if known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: it is asked every few seconds."""

    return Handler
