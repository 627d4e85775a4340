"""What is on record of the retrainings of a root: when each began, why, what it had seen, and what came of it.

retrainings/000003.json    one run
retrainings/lease.json     whose turn it is (pipeline/lease.py)
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts import Frozen, GateDecision, PromptSet, artifact_dir, find, write_durably
from pipeline.errors import SchemaError
from pipeline.stages import current_names

ANSWERED = ("deployed", "approved", "not_promoted")
"""Outcomes by which the traffic that a run saw, and the alarms that began it, are dealt with."""


class Retraining(Frozen):
    """One run. Times are seconds since 1970."""

    number: int
    run: str
    began: float
    reasons: tuple[str, ...]
    alarms: tuple[str, ...] = ()
    """Ids of the alarms that were there when it began."""
    sources: dict[str, int] = {}
    """Log → bytes that it had when the run began."""
    before: dict[str, str] = {}
    """What current.json named then."""
    ended: float | None = None
    outcome: str | None = None
    """deployed, approved, not_promoted, unfinished or failed (all its tries); None while it is under way, or if it was
    killed."""
    records: int | None = None
    """Records that collect read in it, without other tenants'."""

    @property
    def is_answered(self) -> bool:
        """Whether it came to a verdict."""
        return self.outcome in ANSWERED


def on_record(root: Path) -> list[Retraining]:
    """All runs, oldest first. Raises: SchemaError for one that cannot be read."""
    return [_read(path) for path in sorted((Path(root) / "retrainings").glob("[0-9]*.json"))]


def begin(
    root: Path, run: str, *, now: float, reasons: Sequence[str], alarms: Sequence[str], sources: Mapping[str, int]
) -> Retraining:
    """A new run on record; the one of this name goes on where it is not through. The caller holds the lease."""
    earlier = on_record(root)
    if (found := goes_on(earlier, run)) is not None:
        return found if found.ended is None else _write(root, found.model_copy(update={"ended": None, "outcome": None}))
    record = Retraining(
        number=earlier[-1].number + 1 if earlier else 1,
        run=run,
        began=now,
        reasons=tuple(reasons),
        alarms=tuple(alarms),
        sources=dict(sources),
        before=current_names(root),
    )
    return _write(root, record)


def goes_on(records: Sequence[Retraining], run: str) -> Retraining | None:
    """The run of this name, where it began and is not through: a scheduler may try a stage of it again, such as the
    deploy of what was approved."""
    found = _of(records, run)
    return None if found is None or found.outcome in ("deployed", "not_promoted") else found


def end(root: Path, run: str, *, now: float, failed: bool = False) -> Retraining | None:
    """What came of a run, told from what it left; None where no such run began. ``failed``: all its tries did."""
    records = on_record(root)
    record = _of(records, run)
    if record is None or record.ended is not None:
        return record
    names = current_names(root)
    outcome = _outcome(root, _baseline(records, record), names)
    update = {
        "ended": now,
        "outcome": "failed" if failed and outcome == "unfinished" else outcome,
        "records": _own_records(_manifest(root, PromptSet, names.get("prompts"))),
    }
    return _write(root, record.model_copy(update=update))


def _of(records: Sequence[Retraining], run: str) -> Retraining | None:
    return next((one for one in reversed(records) if one.run == run), None)


def _own_records(prompts: PromptSet | None) -> int | None:
    if prompts is None or "records" not in prompts.counts:
        return None
    return prompts.counts["records"] - prompts.rejects.get("other_tenant", 0)


def _baseline(records: Sequence[Retraining], record: Retraining) -> dict[str, str]:
    """What was current before the first of the runs that this one goes on with."""
    before = record.before
    for earlier in reversed(records[: records.index(record)]):
        if earlier.is_answered:
            break
        before = earlier.before
    return before


def _outcome(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    champion = after.get("champion")
    # Another champion than its challenger is somebody's rollback.
    if champion != before.get("champion") and champion == after.get("challenger"):
        return "deployed"
    if after.get("decision") == before.get("decision"):
        return "unfinished"
    decision = _manifest(root, GateDecision, after["decision"])
    return "approved" if decision is not None and decision.decision == "promote" else "not_promoted"


def _manifest(root: Path, kind: type[Any], derivation: str | None) -> Any:
    return None if derivation is None else find(artifact_dir(root, kind, derivation), kind)


def _write(root: Path, record: Retraining) -> Retraining:
    path = Path(root) / "retrainings" / f"{record.number:06d}.json"
    write_durably(path, (json.dumps(record.model_dump(mode="json"), indent=1) + "\n").encode())
    return record


def _read(path: Path) -> Retraining:
    try:
        return Retraining.model_validate_json(path.read_text())
    except ValueError as error:
        raise SchemaError(f"{path}: not a readable retraining ({type(error).__name__}); remove it to go on without it")
