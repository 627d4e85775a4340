"""A look at several replicas at once."""

import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

from serving.answers import read_bounded
from serving.monitor.counters import Counters, read_counters

MAX_BYTES = 16 << 20
_THREADS = 32


def fetch(url: str, *, timeout_s: float) -> str:
    """The exposition of the replica at a base URL. Raises: OSError for whatever keeps it from being read."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=timeout_s) as answer:
            body = read_bounded(answer, max_bytes=MAX_BYTES, deadline=time.monotonic() + timeout_s)
    except (HTTPException, OSError, ValueError) as error:  # also a URL that is none, and an answer that is no HTTP
        raise OSError(f"{type(error).__name__}: {getattr(error, 'reason', error)}")
    if len(body) > MAX_BYTES:
        raise OSError(f"its /metrics has more than {MAX_BYTES >> 20} MiB")
    return body.decode(errors="replace")


def scrape(url: str, *, timeout_s: float) -> Counters | str:
    """The counters of the replica at a base URL, or in words why there are none."""
    try:
        return read_counters(fetch(url, timeout_s=timeout_s), at=time.time())
    except OSError as error:
        return str(error)
    except (ValueError, KeyError) as error:
        return f"its /metrics cannot be read ({type(error).__name__}: {error})"


def scrape_all(urls: Sequence[str], *, timeout_s: float) -> dict[str, Counters | str]:
    """Replica → its counters or why there are none; a slow one holds up no other."""
    if not urls:
        return {}
    with ThreadPoolExecutor(min(_THREADS, len(urls))) as threads:
        return dict(zip(urls, threads.map(lambda url: scrape(url, timeout_s=timeout_s), urls), strict=True))
