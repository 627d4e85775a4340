"""Progress of long work, for the people who wait: rows done, speed, and an estimate from this run alone."""

import logging
import time

logger = logging.getLogger("slipstream")


class Progress:
    """Logs a line whenever a part is done. Parts of an earlier run count as done, but not as speed."""

    def __init__(self, stage: str, *, total_rows: int, rows_before: int = 0):
        self._stage, self.total_rows = stage, total_rows
        self._before, self._rows, self._tokens = rows_before, 0, 0
        self._created, self._began = time.monotonic(), None
        if rows_before:
            logger.info("%s: %d of %d rows were there already", stage, rows_before, total_rows)

    def add(self, *, rows: int, tokens: int, seconds: float = 0.0) -> None:
        """Count rows and tokens that have just been committed, and were worked on for so long.

        Speed counts from when the first of them were begun: loading engines is no part of it.
        """
        now = time.monotonic()
        if seconds:
            self._began = min(self._began or now, now - seconds)
        self._rows += rows
        self._tokens += tokens
        elapsed = max(1e-9, now - (self._began or self._created))
        left = self.total_rows - self._before - self._rows
        logger.info(
            "%s: %d of %d rows, %.0f tokens/s, about %.0f s left",
            self._stage,
            self._before + self._rows,
            self.total_rows,
            self._tokens / elapsed,
            elapsed / max(1, self._rows) * left,
        )
