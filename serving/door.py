"""What new requests pass before they reach the engine: open, closed for as long as a drafter proves itself, or shut."""

import asyncio
import time


class Door:
    """Held requests go on when it opens; none fails unless it is shut. One event loop's."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._closed_at = 0.0
        self.shut: str | None = None
        """Why this replica takes no requests until it is started again."""
        self.inside = 0
        """Requests on their way through the engine."""

    @property
    def state(self) -> str:
        """open, closed or shut."""
        return "shut" if self.shut else "open" if self._open.is_set() else "closed"

    async def pass_through(self) -> None:
        """Return once the door is open, or shut: see ``shut``."""
        while not self._open.is_set():
            await self._open.wait()

    def close(self) -> None:
        """Hold what comes from now on."""
        self._open.clear()
        self._closed_at = time.perf_counter()

    def open(self) -> float:
        """Let go what was held; seconds since it was closed."""
        self._open.set()
        return time.perf_counter() - self._closed_at

    def shut_down(self, reason: str) -> None:
        """Refuse what is held and what comes: the engine cannot answer it."""
        self.shut = reason
        self._open.set()

    async def drained(self, timeout_s: float) -> bool:
        """Whether everything inside has ended in time."""
        deadline = time.monotonic() + timeout_s
        while self.inside and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self.inside
