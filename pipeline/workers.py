"""Who does the parts of a stage that needs no engine: this process, or tasks on a cluster (jobs/tasks.py)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Workers(Protocol):
    """Does parts of work, in any order, each exactly once as far as anyone can see: a part is committed by whoever
    does it, and doing a committed one again changes nothing."""

    def run(self, do: Callable[[int], Any], parts: Sequence[int]) -> Iterator[Any]:
        """What ``do`` returned for each part, as they are done. ``do`` and what it returns can be pickled.

        Raises: the SlipstreamError that ``do`` raised.
        """
        ...


class Alone:
    """One part after the other, here."""

    def run(self, do: Callable[[int], Any], parts: Sequence[int]) -> Iterator[Any]:
        """What ``do`` returned for each part, in order."""
        yield from map(do, parts)
