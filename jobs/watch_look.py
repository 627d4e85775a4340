"""One look of the watch: what came since the last one is read, counted, judged, and kept for people and for tools."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.ledger import releases
from jobs.replicas import are_named, listed
from jobs.watch_gauges import gauges
from jobs.watch_promises import Promises
from jobs.watch_replicas import Replicas, read_replicas
from pipeline.artifacts import write_durably
from pipeline.config import Config
from pipeline.errors import ConfigError, Rejected, StageError, SwapError
from pipeline.sources import Record, Unreadable
from pipeline.split import load_key
from pipeline.watch import asked, logs, view
from pipeline.watch.hours import HOUR_S, Hour, forget_hour, read_hours, write_hour
from pipeline.watch.page import page
from pipeline.watch.reading import Reading, read_reading
from pipeline.watch.served import UNKNOWN_VERSION, Reader, Served
from pipeline.watch.state import Seen, State, back_to, fold, read_state, write_state
from serving.monitor.counters import Counters
from serving.monitor.gauges import exposition
from serving.monitor.scrape import scrape_all

logger = logging.getLogger("slipstream")

FOLDER = "watch"
ALARMS, METRICS, PAGE, TAKEN = "alarms.json", "metrics.prom", "report.html", "taken.json"
_WAIT_S = asked.DAY_S  # an hour waits no longer for a log that cannot be read, and
_BELIEVED_S = asked.DAY_S  # no hour is over by the clock alone that begins so long after the newest record


class Watch:
    """The watch of one run root; look by look. Everything that it knows is on disk after each of them."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.time):
        self.config, self.settings, self.clock = config, config.watch, clock
        self.folder = config.root / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key, self.promises = load_key(config), Promises(config)
        self.sources = self.settings.sources or config.collect.sources
        if not self.sources and not are_named(config):
            raise ConfigError(
                "there is nothing to watch: give collect.sources (the tap's records), serving.replicas (base URLs, for "
                "their counters) or deploy.kubernetes_service, or both"
            )
        self.dimensions = self.settings.dimensions if self.sources else ("replica",)
        self.reading: Reading = read_reading(self.folder, self.dimensions)
        self.replicas: Replicas = read_replicas(self.folder)
        self.state: State = read_state(self.folder)
        self.hours: list[Hour] = self._kept_hours()
        self.text = b""
        """The metrics of the last look."""

    def look(self) -> dict[str, Any]:
        """One look at everything: what came since the last one is counted, judged and kept; the body of alarms.json."""
        now = self.clock()
        self._go_back(now)
        self.replicas.look(self._scraped())
        is_whole = self._read(now)
        until = int((now - 60 * self.settings.late_minutes) // HOUR_S) * HOUR_S
        self._close(self._over(until, is_whole=is_whole))
        self._expire(now)
        seen = self._seen(until, now)
        state = fold(self.settings, self.state, self.hours, seen, until=until)
        taken = read_taken(self.folder)
        alarms = [replace(one, taken=one.taken or taken.get(one.id)) for one in state.alarms]
        self.state = state.with_alarms(alarms)
        body = view.as_json(self.settings, self.state, self.hours, seen, now=now)
        body |= {"replicas": self.replicas.shown(), "records": dict(self.reading.outcomes)}
        self._keep(body, seen)
        return body

    def _go_back(self, now: float) -> None:
        """Forget hours that have not come: a clock was ahead, and would have the watch wait for years."""
        is_ahead = bool(self.hours) and self.hours[-1].start > now
        if not self.reading.back_to(now) and not is_ahead:
            return
        last = int(now // HOUR_S) * HOUR_S - HOUR_S
        logger.warning("watch: the clock was ahead and is back; what it made up is forgotten")
        for hour in [hour for hour in self.hours if hour.start > last]:
            forget_hour(self.folder / "hours", hour)
        self.hours = [hour for hour in self.hours if hour.start <= last]
        asked.forget_days(self.folder / "asked", after=now)
        self.state = back_to(self.state, last)

    def _scraped(self) -> dict[str, Counters | str]:
        """Replica, by its name → its counters, or why there are none."""
        if not are_named(self.config):
            return {}
        try:
            addresses = listed(self.config)
        except SwapError as error:  # Kubernetes does not say: those of the last look may be there
            return dict.fromkeys(self.replicas.last, str(error))
        urls = [one.url for one in addresses if one.ready]
        found = scrape_all(urls, timeout_s=self.settings.scrape_timeout_s)
        return {one.name: found.get(one.url, "is starting") for one in addresses}

    def _over(self, until: int, *, is_whole: bool) -> int:
        """The end of the last hour that is over: what has not come by now is late."""
        closed = self.reading.closed
        if not is_whole:
            until = max(until - _WAIT_S, 0 if closed is None else closed + HOUR_S)
        if self.sources and self.reading.newest is not None:  # else a clock that is ahead makes every record late
            until = min(until, int((self.reading.newest + _BELIEVED_S) // HOUR_S) * HOUR_S)
        return until

    def _expire(self, now: float) -> None:
        """Forget single conversations, by their time to live too."""
        days, ttl_days = self.settings.keep_days, self.config.retention.ttl_days
        before = now - asked.DAY_S * (days if ttl_days is None else min(days, ttl_days))
        self.reading.expire(before)
        asked.forget_days(self.folder / "asked", before=before)

    def _read(self, now: float) -> bool:
        """Count what is new; whether all of it could be read."""
        if not self.sources:
            return True
        reader = Reader.of(self.config, self.key, now=now)
        self.reading.without(reader.erased)
        failed: set[str] = set()
        while parts := [one for one in logs.unread(self.sources, self.reading.positions) if one.key not in failed]:
            for new in parts:
                if not self._read_part(new, reader, now):
                    failed.add(new.key)
        self.reading.positions = logs.kept(self.reading.positions, self.sources)
        return not failed

    def _read_part(self, new: logs.Unread, reader: Reader, now: float) -> bool:
        """Count a part of a file; whether it could be read. One that could not is tried again with the next look."""
        found: list[Served | str] = []
        num_read = 0
        try:
            for record in logs.read(new, max_line_bytes=self.config.collect.max_line_bytes):
                found.append(_served(record, reader))
                num_read += not logs.is_cut(record)
        except StageError as error:
            logger.warning("watch: %s; the next look tries again", error)
            if not new.is_packed:
                return False
            self.reading.positions[new.key] = logs.broken_off(new, num_read)
            is_whole = False
        else:
            is_whole = True
            self.reading.positions[new.key] = logs.after(new, num_read)
        for one in found:
            self.reading.outcomes[self._counted(one, now)] += 1
        return is_whole

    def _counted(self, one: Served | str, now: float) -> str:
        """What became of a record."""
        try:
            if isinstance(one, Served):
                self.reading.take(one, self.settings, self.key, now=now)
                return "counted"
            return one
        except Rejected as reason:
            return str(reason)

    def _close(self, until: int) -> None:
        """Keep the hours that are over: first they, then how far was read."""
        if not self.sources:
            last = self.hours[-1].start if self.hours else -1
            found = self.replicas.hours_until(until, self._version(), apart=bool(self.config.serving.replicas))
            new = [hour for hour in found if hour.start > last]
        else:
            new = list(self.reading.close(until))
        for hour in new:
            write_hour(self.folder / "hours", hour)
        for day, sample in self.reading.days(self.settings):
            asked.write_day(self.folder / "asked", day, sample)
        self.reading.write(self.folder, self.settings)
        self.replicas.write(self.folder)
        self.hours += new
        # By their number and not by the clock, which may be wrong: they hold nobody's conversation.
        for hour in self.hours[: -24 * self.settings.keep_days]:
            forget_hour(self.folder / "hours", hour)
        self.hours = self.hours[-24 * self.settings.keep_days :]

    def _version(self) -> str:
        """What serves by the ledger of releases, where no record says it."""
        made = [one.version for one in releases(self.config.root) if one.phase == "converged"]
        return made[-1] if made else UNKNOWN_VERSION

    def _seen(self, until: int, now: float) -> Seen:
        since = until - (self.settings.reference_days + 2) * asked.DAY_S
        erased = Reader.of(self.config, self.key, now=now).erased
        days = asked.read_days(self.folder / "asked", since=since, erased=erased)
        versions = {hour.version for hour in self.hours[-48:]}
        version = self.hours[-1].version if self.hours else None
        return Seen(days, self.replicas.loads(), self.promises.points(version), self.promises.of(versions))

    def _keep(self, body: dict[str, Any], seen: Seen) -> None:
        write_state(self.folder, self.state)
        text = json.dumps(body, indent=1, allow_nan=False) + "\n"
        write_durably(self.folder / ALARMS, text.encode())
        self.text = exposition(gauges(body, newest=self.reading.newest))
        write_durably(self.folder / METRICS, self.text)
        shown = page(body, self.state, self.hours, seen, title=self.config.model_name)
        write_durably(self.folder / PAGE, shown.encode())

    def _kept_hours(self) -> list[Hour]:
        """The hours on disk; one that was closed by a look which was killed is closed again by the next."""
        found = read_hours(self.folder / "hours")
        closed = self.reading.closed
        return [hour for hour in found if closed is not None and hour.start <= closed] if self.sources else found


def _served(record: Record | Unreadable, reader: Reader) -> Served | str:
    """A record as it counts, or why it does not."""
    try:
        return record.reason if isinstance(record, Unreadable) else reader.served(record)
    except Rejected as reason:
        return str(reason)


def read_taken(folder: Path) -> dict[str, str]:
    """Id of an alarm → when it was taken on."""
    path = folder / TAKEN
    return json.loads(path.read_text()) if path.exists() else {}
