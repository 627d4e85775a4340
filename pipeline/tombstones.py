"""Subjects that were erased: what remains of them is a keyed hash, which later runs of collect look for.

A record of theirs that turns up late, in a log that was restored or in one that another region delivers, is dropped.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from pipeline.artifacts import Frozen, write_durably
from pipeline.errors import SchemaError
from pipeline.split import SplitKey
from pipeline.stages import exclusive

FILE = "tombstones.json"
# What a record may call the one that it belongs to (pipeline/canonical.py); an erasure means all of them.
NAMES = ("subject", "conversation", "conversation_id")


class Tombstone(Frozen):
    """One subject that is gone."""

    subject: str
    """Its keyed hash, as rows carry it."""
    at: datetime


def subject_hashes(key: SplitKey, subject: str) -> tuple[str, ...]:
    """Every keyed hash that rows of this subject may carry."""
    return tuple(key.hash("conversation", f"{name}:{subject}") for name in NAMES)


def read_tombstones(root: Path) -> tuple[Tombstone, ...]:
    """All of a root, in the order of their hashes. Raises: SchemaError for a file that is no list of them."""
    path = Path(root) / FILE
    if not path.exists():
        return ()
    try:
        found = [Tombstone.model_validate(one) for one in json.loads(path.read_text())]
    except ValueError as error:
        raise SchemaError(
            f"{path}: not a list of erased subjects ({type(error).__name__}). Restore it: without it records of erased "
            "subjects would be collected again"
        )
    return tuple(sorted(found, key=lambda one: one.subject))


def add_tombstones(root: Path, subjects: Iterable[str], *, now: datetime) -> None:
    """Write down that these hashes' subjects are erased. Those that are on record keep their time."""
    with exclusive(Path(root) / FILE, FILE, wait=True):
        known = {one.subject: one for one in read_tombstones(root)}
        known |= {subject: Tombstone(subject=subject, at=now) for subject in subjects if subject not in known}
        body = [known[subject].model_dump(mode="json") for subject in sorted(known)]
        write_durably(Path(root) / FILE, (json.dumps(body, indent=1) + "\n").encode())
