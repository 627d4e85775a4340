"""A stage's parts as engines do them: progress for people, and an early end where too many rows are rejected."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from pipeline.engines import Engines, Work
from pipeline.errors import StageError
from pipeline.progress import Progress

# Reasons of rows that are answered, but whose states are kept out, begin with this.
STATES = "states/"


@dataclass(frozen=True)
class Limit:
    """The share of a stage's rows that may be rejected; all others must be kept."""

    stage: str
    max_share: float

    def require(self, reasons: Mapping[str, int], total: int) -> None:
        """Raises: StageError when more than this share of all rows is rejected."""
        if (rejected := sum(reasons.values())) > self.max_share * total:
            raise StageError(
                f"{self.stage}: {rejected} of {total} rows rejected ({dict(reasons)}), more than "
                f"{self.stage}.max_reject_share = {self.max_share}. The committed parts list them with reasons; repair "
                "the cause, or raise the limit"
            )

    def require_all(self, kept: int, reasons: Mapping[str, int], total: int) -> None:
        """Raises: StageError when rows are neither kept nor rejected, or are there twice."""
        if kept + (rejected := sum(reasons.values())) != total:
            raise StageError(
                f"{self.stage}: {kept} rows kept and {rejected} rejected of {total}; remove the stage's folder and run "
                "it again, and report this: a row was lost or is there twice"
            )


def follow(
    engines: Engines, work: Work, todo: Sequence[int], *, progress: Progress, rows: Limit, states: Limit | None = None
) -> int:
    """Have these parts done; how many engines died over parts that another one then did.

    Raises: StageError as soon as more of all rows are rejected than the limits allow; the engines are ended then.
    """
    reasons: Counter[str] = Counter()
    kept_out: Counter[str] = Counter()
    retries = 0
    with closing(engines.run(work, todo)) as parts:
        for done in parts:
            progress.add(rows=done.rows, tokens=done.tokens, seconds=done.seconds)
            retries += done.tries - 1
            for reason, count in done.rejects.items():
                if reason.startswith(STATES):
                    kept_out[reason.removeprefix(STATES)] += count
                else:
                    reasons[reason] += count
            rows.require(reasons, progress.total_rows)
            if states is not None:
                states.require(kept_out, progress.total_rows)
    return retries
