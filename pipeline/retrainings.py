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
    """deployed, approved, not_promoted or unfinished; None while it is under way, or if it was killed."""
    records: int | None = None
    """Records that collect read in it."""

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
    """A new run on record; the one of this name, where it began already. The caller holds the lease."""
    earlier = on_record(root)
    if found := next((one for one in earlier if one.run == run), None):
        return found
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


def end(root: Path, run: str, *, now: float) -> Retraining | None:
    """What came of a run, told from what it left; None where no such run began."""
    records = on_record(root)
    record = next((one for one in records if one.run == run), None)
    if record is None or record.ended is not None:
        return record
    names = current_names(root)
    prompts = _manifest(root, PromptSet, names.get("prompts"))
    update = {
        "ended": now,
        "outcome": _outcome(root, _baseline(records, record), names),
        "records": None if prompts is None else prompts.counts.get("records"),
    }
    return _write(root, record.model_copy(update=update))


def _baseline(records: Sequence[Retraining], record: Retraining) -> dict[str, str]:
    """What was current before the first of the runs that this one goes on with."""
    before = record.before
    for earlier in reversed(records[: records.index(record)]):
        if earlier.is_answered:
            break
        before = earlier.before
    return before


def _outcome(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    if after.get("champion") != before.get("champion"):
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
