"""Which records a run of collect takes: an interval of time, and how far each source had come when it was opened.

A window is written down before anything is read (``windows/`` under the root), so that the same run again, or the
rest of a run that was killed, reads the same bytes of the same files, however much the logs have grown since. What
came too late for one window belongs to the next.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts import Frozen, write_durably
from pipeline.collect_config import WindowConfig
from pipeline.errors import ConfigError, SchemaError
from pipeline.stages import exclusive

FOLDER = "windows"
_ALL = 2**62  # bytes


class Pinned(Frozen):
    """A source as far as it reached when the window was opened."""

    name: str
    size_bytes: int
    sha256: str
    """Of those bytes."""
    is_packed: bool = False
    """Compressed or sealed: once it is committed, whoever has seen it has seen all of it."""
    is_open: bool = False
    """Not committed by its writer yet."""
    how: dict[str, Any] = {}
    """What its configuration says of it (its format, consent, tenant), where that decides the rows."""

    @property
    def meaning(self) -> list[Any]:
        """What of it decides which rows come of it."""
        return [self.name, self.sha256, self.how] if self.how else [self.name, self.sha256]


class Window(Frozen):
    """A run's interval, in seconds since 1970: ``start`` ≤ ts < ``end``. None leaves a side open."""

    start: float | None
    end: float | None
    previous_end: float | None = None
    """Where the last completed window ended: what lies before ``start`` and was not there then is late."""
    sources: tuple[Pinned, ...] = ()
    seen: dict[str, int] = {}
    """Source → bytes that earlier windows have read of it."""
    completed: str | None = None
    """Derivation id of the prompts that were made of it."""

    @property
    def is_open_ended(self) -> bool:
        """Whether it takes every record, whatever its time."""
        return self.start is None and self.end is None

    def place(self, ts: float | None, *, source: str, offset: int) -> Literal["in", "earlier", "later", "no_time"]:
        """Where a record belongs: here (late ones too), before this window, to a later one, or nobody can tell.

        ``offset``: bytes of ``source`` before the record.
        """
        if self.is_open_ended:
            return "in"
        if ts is None:
            return "no_time"
        if self.end is not None and ts >= self.end:
            return "later"
        is_new = offset >= self.seen.get(source, 0)
        if self.start is None or ts >= self.start or (is_new and self.previous_end is not None):
            return "in"
        return "earlier"

    def __str__(self) -> str:
        ends = [None if t is None else datetime.fromtimestamp(t, UTC).isoformat("T", "minutes")
                for t in (self.start, self.end)]  # fmt: skip
        return f"{ends[0] or 'the beginning'} to {ends[1] or 'the end'}"


def interval(settings: WindowConfig, *, now: datetime, previous_end: float | None) -> tuple[float | None, float | None]:
    """Start and end of the window that a run takes now.

    The end is ``until``, else the last multiple of ``every_hours`` since midnight UTC. A sliding window reaches back
    ``days``, and farther where runs were missed, so that no record falls between two windows.

    Raises: ConfigError for an end that has not come yet.
    """
    if settings.kind == "all":
        return None, None
    if settings.until is not None and settings.until > now:
        raise ConfigError(
            f"collect.window.until = {settings.until.isoformat()} has not come yet (it is {now.isoformat()}): records "
            "before it would still arrive. Leave it out to take all whole days"
        )
    end = (settings.until or _floor(now, settings.every_hours)).timestamp()
    if settings.kind == "cumulative":
        return (None if settings.since is None else settings.since.timestamp()), end
    start = end - timedelta(days=settings.days).total_seconds()
    return (start if previous_end is None else min(start, previous_end)), end


def open_window(root: Path, settings: WindowConfig, sources: Sequence[Pinned], *, now: datetime, of: str) -> Window:
    """The window of a run now, written down: the one that is on record for this end, else a new one.

    ``of`` tells apart what windows are of (the configured sources): each has a row of windows of its own.

    Raises: ConfigError for an end that has not come yet, or that lies before the last completed window's.
    """
    earlier = [window for window in _on_record(root, of) if window.completed is not None]
    last = max(earlier, key=lambda window: window.end or 0.0, default=None)
    if settings.kind == "all":
        return Window(start=None, end=None, sources=tuple(sources))
    start, end = interval(settings, now=now, previous_end=None if last is None else last.end)

    path = _path(root, of, settings, end)
    with exclusive(path, "windows", wait=True):  # of two runs that begin together the first one opens it
        return _read(path) if path.exists() else _opened(path, start, end, last, sources)


def _opened(path: Path, start: float | None, end: float, last: Window | None, sources: Sequence[Pinned]) -> Window:
    """A new window, written down. Raises: ConfigError for an end before the last completed window's."""
    if last is not None and last.end is not None and end < last.end:
        raise ConfigError(
            f"collect.window.until = {datetime.fromtimestamp(end, UTC).isoformat()} lies before the end of the last "
            f"completed window ({datetime.fromtimestamp(last.end, UTC).isoformat()}), and was never opened; take a "
            "later end, or another root"
        )
    seen = {}
    if last is not None:
        # Offsets in a packed file are those of what it unpacks to. Of an open one nobody knows how far it was read:
        # what is late in it counts as new, and a few records of its first minutes with it, rather than none.
        told = (one for one in last.sources if not (one.is_packed and one.is_open))
        seen = {**last.seen, **{one.name: _ALL if one.is_packed else one.size_bytes for one in told}}
    window = Window(
        start=start, end=end, previous_end=None if last is None else last.end, sources=tuple(sources), seen=seen
    )
    write_durably(path, window.model_dump_json(indent=1).encode())
    return window


def close_window(root: Path, settings: WindowConfig, window: Window, *, of: str, prompts: str) -> None:
    """Write down what was made of a window: the next one begins where it ended."""
    if window.end is not None and window.completed != prompts:
        done = window.model_copy(update={"completed": prompts})
        write_durably(_path(root, of, settings, window.end), done.model_dump_json(indent=1).encode())


def forget_open(root: Path, source: str) -> None:
    """Windows that were opened on this source and never finished are opened anew: its bytes are about to change."""
    for path in sorted((Path(root) / FOLDER).glob("*/*.json")):
        window = _read(path)
        named = (pin.name for pin in window.sources)
        if window.completed is None and any(name == source or name.startswith(f"{source}#") for name in named):
            path.unlink()


def watermarks(latest: Mapping[str, float | None]) -> dict[str, str]:
    """Source → the time of its newest record, as people read it."""
    return {
        name: "unknown" if ts is None else datetime.fromtimestamp(ts, UTC).isoformat("T", "seconds")
        for name, ts in sorted(latest.items())
    }


def _floor(now: datetime, hours: float) -> datetime:
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight + timedelta(hours=hours) * ((now - midnight) // timedelta(hours=hours))


def _path(root: Path, of: str, settings: WindowConfig, end: float) -> Path:
    """A window's record. Its name holds what makes it another one: its kind and length as well as its end."""
    kind = [settings.kind, settings.days if settings.kind == "sliding" else None,
            None if settings.since is None else settings.since.isoformat()]  # fmt: skip
    digest = hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:8]
    return Path(root) / FOLDER / of / f"{datetime.fromtimestamp(end, UTC):%Y%m%dT%H%M%SZ}-{digest}.json"


def _on_record(root: Path, of: str) -> list[Window]:
    return [_read(path) for path in sorted((Path(root) / FOLDER / of).glob("*.json"))]


def _read(path: Path) -> Window:
    try:
        return Window.model_validate_json(path.read_text())
    except ValueError as error:
        raise SchemaError(f"{path}: not a readable window ({type(error).__name__}); remove it, and run collect again")
