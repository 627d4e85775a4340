"""Watch: live counters and the tap's records → acceptance by slice, drift in what is asked, alarms.

python jobs/watch.py --config slipstream.toml          goes on until it is stopped
python jobs/watch.py --config slipstream.toml --once   one look, for a scheduler: JSON, exit status 3 while alarms fire
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.session import job_main
from jobs.watch_gauges import gauges
from jobs.watch_promises import Promises
from jobs.watch_replicas import Replicas, read_replicas
from pipeline.artifacts import write_durably
from pipeline.config import Config
from pipeline.errors import ConfigError, Rejected, StageError
from pipeline.sources import Unreadable
from pipeline.split import load_key
from pipeline.stages import exclusive
from pipeline.watch import asked, logs, view
from pipeline.watch.hours import HOUR_S, Hour, forget_hours, read_hours, write_hour
from pipeline.watch.page import page
from pipeline.watch.reading import Reading, read_reading
from pipeline.watch.served import Reader
from pipeline.watch.state import Seen, State, fold, read_state, write_state
from serving.monitor.gauges import Endpoint, exposition
from serving.monitor.scrape import scrape_all

logger = logging.getLogger("slipstream")

FOLDER = "watch"
ALARMS, METRICS, PAGE, TAKEN = "alarms.json", "metrics.prom", "report.html", "taken.json"
STALE_S = 900.0
FIRING = 3
"""Exit status of ``--once`` while an alarm fires."""


class Watch:
    """The watch of one run root; look by look. Everything that it knows is on disk after each of them."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.time):
        self.config, self.settings, self.clock = config, config.watch, clock
        self.folder = config.root / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key, self.promises = load_key(config), Promises(config)
        self.sources = self.settings.sources or config.collect.sources
        if not self.sources and not config.serving.replicas:
            raise ConfigError(
                "there is nothing to watch: give collect.sources (the tap's records), serving.replicas (base URLs, for "
                "their counters), or both"
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
        self.replicas.look(scrape_all(self.config.serving.replicas, timeout_s=self.settings.scrape_timeout_s))
        self._read(now)
        until = int((now - 60 * self.settings.late_minutes) // HOUR_S) * HOUR_S
        self._close(until)
        seen = self._seen(until)
        state = fold(self.settings, self.state, self.hours, seen, until=until)
        taken = read_taken(self.folder)
        alarms = [replace(one, taken=one.taken or taken.get(one.id)) for one in state.alarms]
        self.state = state.with_alarms(alarms)
        body = view.as_json(self.settings, self.state, self.hours, seen, now=now)
        body |= {"replicas": self.replicas.shown(), "records": dict(self.reading.outcomes)}
        self._keep(body, seen)
        return body

    def _read(self, now: float) -> None:
        if not self.sources:
            return
        reader = Reader.of(self.config, self.key)
        self.reading.without(reader.erased)
        for new in logs.unread(self.sources, self.reading.positions):
            count = 0
            try:
                for record in logs.read(new, max_line_bytes=self.config.collect.max_line_bytes):
                    count += 1
                    try:
                        if isinstance(record, Unreadable):
                            raise Rejected(record.reason)
                        self.reading.take(reader.served(record), self.settings, self.key, now=now)
                        self.reading.outcomes["counted"] += 1
                    except Rejected as reason:
                        self.reading.outcomes[str(reason)] += 1
            except StageError as error:  # gone or shorter since it was listed: what came of it counts, the rest is lost
                logger.warning("watch: %s", error)
                self.reading.outcomes["file_gone"] += 1
            self.reading.positions[new.key] = logs.after(new, count)
        self.reading.positions = logs.kept(self.reading.positions, self.sources)

    def _close(self, until: int) -> None:
        """Keep the hours that are over: first they, then how far was read."""
        if not self.sources:
            last = self.hours[-1].start if self.hours else -1
            new = [hour for hour in self.replicas.hours_until(until) if hour.start > last]
        else:
            new = list(self.reading.close(until))
        for hour in new:
            write_hour(self.folder / "hours", hour)
        for day, sample in self.reading.days(self.settings):
            asked.write_day(self.folder / "asked", day, sample)
        self.reading.write(self.folder, self.settings)
        self.replicas.write(self.folder)
        self.hours += new
        if new:
            oldest = until - self.settings.keep_days * asked.DAY_S
            forget_hours(self.folder / "hours", before=oldest)
            self.hours = [hour for hour in self.hours if hour.start >= oldest]
            asked.forget_days(self.folder / "asked", before=oldest)

    def _seen(self, until: int) -> Seen:
        since = until - (self.settings.reference_days + 2) * asked.DAY_S
        erased = Reader.of(self.config, self.key).erased
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
        return found if not self.sources or closed is None else [hour for hour in found if hour.start <= closed]


def line(body: dict[str, Any]) -> str:
    """One look for people who watch: the whole, the slice that moved most, replicas, alarms."""
    whole = body["slices"].get("all", {})

    def figure(name: str) -> str:
        return "–" if whole.get(name) is None else f"{whole[name]:.2f}"

    moved = [(abs(one["change"]), name, one["change"]) for name, one in body["slices"].items() if one.get("change")]
    most = f", most moved {max(moved)[1]} {max(moved)[2]:+.1%}" if moved else ""
    up = sum(one["down"] is None for one in body["replicas"].values())
    pays = f", speculation {body['pays']['speedup']:.2f} x" if body["pays"] else ""
    return (
        f"watch: {body['phase']}, version {body['version'] or '–'}: acceptance length {figure('acceptance_length')} "
        f"(expected {figure('expected')}, promised {figure('promised')}){most}{pays}; {up} of {len(body['replicas'])} "
        f"replicas answer, {body['records'].get('counted', 0)} records; "
        f"{'ALARM ' + ', '.join(body['firing']) if body['firing'] else 'no alarm'}"
    )


def take(config: Config, ids: Sequence[str], *, now: float) -> list[str]:
    """Say that alarms are being seen to, by their ids or "all"; the ids of those that fired.

    They fire no more from the next look on, whoever looks. Raises: ConfigError for an id that no alarm has.
    """
    folder = config.root / FOLDER
    body = last_look(folder)
    alarms = {one["id"]: one["fires"] for one in body["alarms"]} if body else {}
    if unknown := sorted(set(ids) - {"all"} - set(alarms)):
        firing = ", ".join(sorted(one for one, fires in alarms.items() if fires))
        raise ConfigError(f"no such alarm: {', '.join(unknown)} (firing: {firing or 'none'})")
    taken = [one for one, fires in alarms.items() if fires and ("all" in ids or one in ids)]
    at = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M}"
    with exclusive(folder / TAKEN, TAKEN, wait=True):
        known = read_taken(folder)
        write_durably(folder / TAKEN, (json.dumps(dict.fromkeys(taken, at) | known, indent=1) + "\n").encode())
    return taken


def read_taken(folder: Path) -> dict[str, str]:
    """Id of an alarm → when it was taken on."""
    path = folder / TAKEN
    return json.loads(path.read_text()) if path.exists() else {}


def last_look(folder: Path) -> dict[str, Any] | None:
    """The body of alarms.json, None before the first look."""
    path = folder / ALARMS
    return json.loads(path.read_text()) if path.exists() else None


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Take alarms on, or look once, or go on looking."""
    if arguments.take:
        taken = take(config, arguments.take, now=time.time())
        print(f"taken on: {', '.join(taken) or 'nothing fired'}", file=sys.stderr)
        if not arguments.once:
            return
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(config.root / FOLDER, "watch"))
        except StageError:
            if not arguments.once:
                raise
            body = _of_another(config.root / FOLDER)
        else:
            watch = Watch(config)
            if not arguments.once:
                _go_on(watch)
            body = watch.look()
    print(json.dumps(body, indent=1))
    if body["firing"]:
        raise SystemExit(FIRING)


def _of_another(folder: Path) -> dict[str, Any]:
    """What a watch that goes on saw last. Raises: StageError where that is long ago."""
    body = last_look(folder)
    if body is None or time.time() - body["at_s"] > STALE_S:
        seen = "never" if body is None else f"at {body['at']} UTC"
        raise StageError(f"{folder}: another watch holds it, and looked last {seen}; see to that one, or end it")
    return body


def _go_on(watch: Watch) -> NoReturn:
    """Look after look; a line a minute, and one for every alarm."""
    settings, said, told = watch.settings, 0.0, set[str]()
    endpoint = Endpoint(settings.listen, lambda: watch.text) if settings.listen else nullcontext()
    with endpoint:
        logger.info("watch: the page is %s", watch.folder / PAGE)
        while True:
            started = time.monotonic()
            body = watch.look()
            new = [one for one in body["alarms"] if one["fires"] and one["id"] not in told]
            if new or time.monotonic() - said >= 60:
                said = time.monotonic()
                logger.info("%s", line(body))
            for one in new:
                logger.warning("watch: %s: %s", one["id"], one["message"])
                told.add(one["id"])
            time.sleep(max(0.0, settings.every_s - (time.monotonic() - started)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One look, and alarms to take on."""
    parser.add_argument("--once", action="store_true", help="one look: JSON, and exit status 3 while an alarm fires")
    about = "say that these alarms (ids, or all) are being seen to: they fire no more"
    parser.add_argument("--take", action="append", default=[], metavar="ALARM", help=about)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
