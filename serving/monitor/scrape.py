"""A look at several replicas at once."""

import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

from serving.monitor.counters import Counters, read_counters

MAX_BYTES = 16 << 20
_THREADS = 32


def scrape(url: str, *, timeout_s: float) -> Counters | str:
    """The counters of the replica at a base URL, or in words why there are none."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=timeout_s) as answer:
            body = _body(answer, until=time.monotonic() + timeout_s)
    except (OSError, ValueError) as error:  # also a URL that is none, and an answer that is no HTTP
        return f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    except Exception as error:  # http.client's own errors have no root of their own but Exception
        return f"{type(error).__name__}: {error}"
    if len(body) > MAX_BYTES:
        return f"its /metrics has more than {MAX_BYTES >> 20} MiB"
    try:
        return read_counters(body.decode(), at=time.time())
    except (ValueError, KeyError) as error:
        return f"its /metrics cannot be read ({type(error).__name__}: {error})"


def _body(answer: HTTPResponse, *, until: float) -> bytes:
    """The body, as far as MAX_BYTES and one. Raises: TimeoutError for one that drips: a read alone may take as long."""
    found = bytearray()
    while len(found) <= MAX_BYTES and (part := answer.read1(1 << 16)):
        found += part
        if time.monotonic() > until:
            raise TimeoutError("timed out")
    return bytes(found)


def scrape_all(urls: Sequence[str], *, timeout_s: float) -> dict[str, Counters | str]:
    """Replica → its counters or why there are none; a slow one holds up no other."""
    if not urls:
        return {}
    with ThreadPoolExecutor(min(_THREADS, len(urls))) as threads:
        return dict(zip(urls, threads.map(lambda url: scrape(url, timeout_s=timeout_s), urls), strict=True))
