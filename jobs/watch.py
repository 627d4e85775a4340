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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.session import job_main
from jobs.watch_look import ALARMS, FOLDER, PAGE, TAKEN, Watch, read_taken
from pipeline.artifacts import write_durably
from pipeline.config import Config
from pipeline.errors import ConfigError, SlipstreamError, StageError
from pipeline.stages import exclusive
from serving.monitor.gauges import Endpoint

logger = logging.getLogger("slipstream")

STALE_S = 900.0
FIRING = 3
"""Exit status of ``--once`` while an alarm fires."""


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
            if not arguments.once:
                _go_on(config)
            body = Watch(config).look()
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


def _go_on(config: Config) -> NoReturn:
    """Look after look; a line a minute, and one for every alarm."""
    settings, said, told, text = config.watch, 0.0, set[str](), b""
    watch: Watch | None = Watch(config)
    with _endpoint(settings.listen, lambda: text):
        body = watch.look()  # what is wrong from the beginning ends it; what goes wrong later is tried again
        logger.info("watch: the page is %s", watch.folder / PAGE)
        while True:
            started = time.monotonic()
            try:
                watch = watch or Watch(config)
                body, text = watch.look(), watch.text
            except (SlipstreamError, OSError) as error:  # a full disk too
                logger.warning("watch: %s; the next look tries again", error)
                watch = None  # what it holds may be half of a look: the next one begins with what is on disk
            told &= {one["id"] for one in body["alarms"]}
            new = [one for one in body["alarms"] if one["fires"] and one["id"] not in told]
            if new or time.monotonic() - said >= 60:
                said = time.monotonic()
                logger.info("%s", line(body))
            for one in new:
                logger.warning("watch: %s: %s", one["id"], one["message"])
                told.add(one["id"])
            time.sleep(max(0.0, settings.every_s - (time.monotonic() - started)))


def _endpoint(listen: str | None, text: Callable[[], bytes]) -> AbstractContextManager:
    """Serves the metrics. Raises: ConfigError where that address cannot be had."""
    if listen is None:
        return nullcontext()
    try:
        return Endpoint(listen, text)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"watch.listen = {listen}: cannot listen there ({error}); give a free host:port")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One look, and alarms to take on."""
    parser.add_argument("--once", action="store_true", help="one look: JSON, and exit status 3 while an alarm fires")
    about = "say that these alarms (ids, or all) are being seen to: they fire no more"
    parser.add_argument("--take", action="append", default=[], metavar="ALARM", help=about)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
