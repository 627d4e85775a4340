"""Is a retraining due, and why: the time since the last one, the traffic since, an alarm.

A listing of the logs tells; of one of them the first MiB is read.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from pipeline import lease
from pipeline.artifacts import DrafterCheckpoint, Frozen
from pipeline.config import Config
from pipeline.errors import FingerprintError, SchemaError
from pipeline.fingerprint import require_present_target
from pipeline.retrain_config import RetrainConfig
from pipeline.retrainings import Retraining, on_record
from pipeline.sources.found import stored_logs
from pipeline.sources.stores import Stored, is_remote, opened
from pipeline.sources.streams import opener_of
from pipeline.stages import current, current_names

ALARMS = Path("watch") / "alarms.json"
"""Under the root, written by `slipstream watch`: alarms of {id, kind, at, ...}, as a list or under "alarms"."""
_HEAD_BYTES = 1 << 20


class Alarm(Frozen):
    """An alarm of the monitor. It may say more than is needed here."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    kind: str
    at: str | float
    """When it was raised: a time as people read it, or seconds since 1970."""
    retrains: bool = True
    """Whether it holds, and a retraining is the answer."""


class _Look(Frozen):
    """What the monitor writes around them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    alarms: list[Alarm]


_ALARMS = TypeAdapter(list[Alarm] | _Look)


class Due(Frozen):
    """The answer."""

    due: bool
    reasons: tuple[str, ...] = ()
    """Why, each beginning with its kind: first, time, volume or alarm."""
    waits: str | None = None
    """What stands against it, although there are reasons; or why there can be none."""
    new_bytes: int = 0
    """Of logs that the last retraining has not seen."""
    new_requests: int | None = None
    """About so many; None where nothing tells."""
    alarms: tuple[str, ...] = ()
    """Ids of those that no retraining has answered."""
    last: str | None = None
    """When the last retraining that came to a verdict began."""


def run(config: Config, *, now: datetime | None = None, asked_by: str | None = None) -> Due:
    """Whether a retraining is due under this root. Nothing is written. ``asked_by``: a run that has the lease already.

    Raises: ConfigError for sources that are not there; SchemaError for alarms or records that cannot be read.
    """
    now, settings = now or datetime.now(UTC), config.retrain
    records = on_record(config.root)
    answered = next((one for one in reversed(records) if one.is_answered), None)
    logs = stored_logs(config.collect.sources)
    new_bytes = _new_bytes(logs, {} if answered is None else answered.sources)
    requests = _requests(new_bytes, answered, logs)
    alarms = _unanswered(read_alarms(config.root), records, settings) if settings.on_alarm else []
    reasons = _reasons(settings, answered, requests, alarms, now)
    waits = _waits(config, records, new_bytes, now, asked_by)
    return Due(
        due=bool(reasons) and waits is None,
        reasons=tuple(reasons),
        waits=waits,
        new_bytes=new_bytes,
        new_requests=requests,
        alarms=tuple(alarm.id for alarm in alarms),
        last=None if answered is None else _told(answered.began),
    )


def read_alarms(root: Path) -> list[Alarm]:
    """The alarms on record; none where nothing watches. Raises: SchemaError for a file of another shape."""
    path = Path(root) / ALARMS
    try:
        found = _ALARMS.validate_json(path.read_text())
        return found.alarms if isinstance(found, _Look) else found
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise SchemaError(
            f"{path}: expected alarms of {{id, kind, at}} ({type(error).__name__}); `slipstream watch` writes it anew"
        )


def _of_another_target(config: Config) -> bool:
    """Whether the current champion was made for another target than the configured one is now."""
    champion = current(config.root, "champion", DrafterCheckpoint).manifest.fingerprint
    try:
        require_present_target(champion, config.target.model, dtype=config.target.dtype, where="champion")
    except FingerprintError:
        return True
    return False


def _reasons(
    settings: RetrainConfig,
    answered: Retraining | None,
    requests: int | None,
    alarms: Sequence[Alarm],
    now: datetime,
) -> list[str]:
    enough = settings.min_new_requests
    reasons = [f"alarm: {alarm.kind} at {_when(alarm.at)} ({alarm.id})" for alarm in alarms]
    if answered is None:
        if enough is None or requests is None or requests >= enough:
            reasons.append("first: no retraining came to a verdict yet")
        return reasons
    age = now - datetime.fromtimestamp(answered.began, UTC)
    if settings.every_days is not None and age >= _period(settings.every_days):
        reasons.append(f"time: {age / timedelta(days=1):.1f} days since the last (retrain.every_days)")
    if enough is not None and requests is not None and requests >= enough:
        reasons.append(f"volume: about {requests} new requests (retrain.min_new_requests = {enough})")
    return reasons


def _period(days: float) -> timedelta:
    """Less a little: a nightly scheduler asks at the same time, and the run of the night before began after that."""
    period = timedelta(days=days)
    return period - min(timedelta(hours=1), 0.05 * period)


def _waits(
    config: Config, records: Sequence[Retraining], new_bytes: int, now: datetime, asked_by: str | None
) -> str | None:
    """What stands against a run now, whatever speaks for it."""
    if "champion" not in current_names(config.root):
        return "there is no champion to train from: slipstream init-drafter, or adopt"
    if _of_another_target(config):
        return "the target is another one than the champion's: slipstream retire, then init-drafter or adopt"
    if (found := lease.holder(config.root)) and found.run != asked_by:
        return f"run {found.run} is under way on {found.host.split()[0]}"
    if not new_bytes:
        return "no traffic that the last retraining has not seen"
    return _too_soon(config.retrain, records, now)


def _too_soon(settings: RetrainConfig, records: Sequence[Retraining], now: datetime) -> str | None:
    """Why it is too soon after the last run. What was killed is gone on with at once, as often as a run is tried."""
    killed = sum(1 for _ in takewhile(lambda one: one.ended is None, reversed(records)))
    if not records or 0 < killed < settings.tries:
        return None
    last = records[-1]
    next_at = datetime.fromtimestamp(last.began, UTC) + timedelta(hours=settings.min_hours_between)
    became = " and was killed" if killed else " and failed" if last.outcome == "failed" else ""
    told = f"the last run began at {_told(last.began)}{became}: not before {_told(next_at.timestamp())}"
    return told if now < next_at else None


def _unanswered(alarms: Sequence[Alarm], records: Sequence[Retraining], settings: RetrainConfig) -> list[Alarm]:
    done = {one for record in records if record.is_answered for one in record.alarms}
    kinds = settings.alarm_kinds
    open_ = [alarm for alarm in alarms if alarm.retrains and alarm.id not in done]
    return [alarm for alarm in open_ if not kinds or alarm.kind in kinds]


def _new_bytes(logs: Mapping[str, Stored], seen: Mapping[str, int]) -> int:
    return sum(max(0, stored.size_bytes - seen.get(name, 0)) for name, stored in logs.items())


def _requests(new_bytes: int, answered: Retraining | None, logs: Mapping[str, Stored]) -> int | None:
    """About how many requests so many bytes hold: as the last retraining found, else as the first plain log begins."""
    if answered is not None and answered.records:
        return round(new_bytes * answered.records / max(1, sum(answered.sources.values())))
    for name, stored in sorted(logs.items()):
        if is_remote(stored.location) or opener_of(name) is not None:
            continue
        with opened(stored.location, stop=min(stored.size_bytes, _HEAD_BYTES)) as file:
            head = file.read()
        if lines := head.count(b"\n"):
            return round(new_bytes * lines / len(head))
    return None


def _when(at: str | float) -> str:
    return at if isinstance(at, str) else _told(at)


def _told(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat("T", "seconds")
