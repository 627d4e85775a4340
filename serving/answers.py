"""Reading an answer of a server that may be anything: bounded in bytes and in time."""

import time
from http.client import HTTPResponse


def read_bounded(answer: HTTPResponse, *, max_bytes: int, deadline: float) -> bytes:
    """The body, as far as one part beyond ``max_bytes``; ``deadline`` is of time.monotonic().

    A timeout holds for one read: who sends a byte now and then must not hold its caller for good. Raises: TimeoutError.
    """
    found = bytearray()
    while len(found) <= max_bytes and (part := answer.read1(1 << 16)):
        found += part
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return bytes(found)
