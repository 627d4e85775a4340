"""Whose words a drafter may learn from, where tenants share it: not too few people's, nor mostly one's.

A drafter proposes what it has seen. One that several tenants share must not have learned a phrase that only a handful
of people ever wrote, since its proposals, by their speed, could tell others of it. Two floors and a ceiling stand
against that. A tenant with too few subjects of its own is left out, whatever the others have: its people would be
singled out among their own, and its rows are dropped rather than the run stopped, since the next tenant to join would
otherwise stop everybody's. Too few subjects in all, or one that is too much of the training rows, stop the run.

A drafter of a single tenant's own traffic learns from that tenant's people for them, and nothing is asked.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.errors import StageError


@dataclass
class Subjects:
    """Counts of rows by tenant and subject; those of parts of the data add up."""

    rows: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Tenant ("" where none is named) → keyed hash of the subject ("" where none is on record) → rows."""

    def add(self, tenant: str | None, subject: str | None) -> None:
        """Count a row. A conversation is no subject: a tenant's rows without one count as a single person's."""
        self.rows[tenant or ""][subject or ""] += 1

    def merge(self, parts: Iterable["Subjects"]) -> None:
        """Add the counts of other parts."""
        for part in parts:
            for tenant, counts in part.rows.items():
                self.rows[tenant].update(counts)

    @property
    def is_shared(self) -> bool:
        """Whether there are two tenants or more."""
        return len(self.rows) > 1

    def too_small(self, *, min_subjects: int) -> set[str]:
        """The tenants whose rows are left out, of every split: a count of reason ``few_subjects``."""
        if not self.is_shared:
            return set()
        return {tenant for tenant, counts in self.rows.items() if len(counts) < min_subjects}


def require_subjects(train: Subjects, *, min_subjects: int, max_subject_share: float, is_shared: bool) -> None:
    """Raises: StageError when a shared drafter would learn from too few subjects, or too much from one.

    ``train``: the rows that are left to train on; ``is_shared``: whether several tenants had any rows at all.
    """
    if not is_shared:
        return
    total: Counter[str] = Counter()
    for tenant, counts in train.rows.items():
        # The same subject hash under two tenants is two people.
        total.update({f"{tenant}\0{subject}": rows for subject, rows in counts.items()})
    if len(total) < min_subjects:
        raise StageError(
            f"collect: the training rows are of {len(total)} subjects, and a drafter that tenants share needs "
            f"collect.min_subjects = {min_subjects}. Collect more traffic, give every tenant a drafter of its own "
            "(a config with its traffic alone), or lower the floor if whoever answers for privacy agrees"
        )
    most, rows = max(total.items(), key=lambda item: item[1])
    if (share := rows / total.total()) > max_subject_share:
        whose = "of one subject" if most.split("\0")[1] else "of one tenant and on record without a subject"
        raise StageError(
            f"collect: {share:.1%} of the training rows of a drafter that tenants share are {whose}, more than "
            f"collect.max_subject_share = {max_subject_share:g}. Tap that subject at a lower rate or not at all, have "
            "the gateway name subjects, or raise the limit if whoever answers for privacy agrees"
        )
