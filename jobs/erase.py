"""Erase: every request of a subject leaves the run root, and drafter versions that learned from one get a deadline.

python jobs/erase.py --config slipstream.toml --subject customer-4711
python jobs/erase.py --config slipstream.toml --subjects-file -        one a line, from the standard input

What stays is a keyed hash: records of the subject that turn up later are dropped. In the tap's committed logs on this
machine the records are blanked; of other logs it is told which still hold some. Sealed ones and object storage go by
their own time to live (SLIPSTREAM_TAP_TTL_HOURS, a lifecycle rule).
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import unlearn
from jobs.session import job_main, ray_session
from pipeline import erase
from pipeline.config import Config
from pipeline.erase_logs import Logs, erase_from_logs
from pipeline.errors import ConfigError
from pipeline.split import load_key
from pipeline.tombstones import add_tombstones, subject_hashes

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Erased:
    """What an erasure did."""

    removed: erase.Removed
    tagged: dict[str, str]
    """Version → the date by which it has to be out of service."""
    logs: Logs = field(default_factory=Logs)

    def lines(self) -> list[str]:
        """For people."""
        rows, artifacts = len(self.removed.rows), len(self.removed.artifacts)
        lines = [f"{rows} rows gone; {artifacts} artifacts written anew or removed"]
        lines += self.logs.lines()
        lines += [f"version {number} learned from them: out of service by {by}" for number, by in self.tagged.items()]
        return lines


def run(config: Config, subjects: Sequence[str], *, now: datetime | None = None) -> Erased:
    """Erase these subjects, by the names that requests gave them.

    Killed at any line, the same call goes on. The order matters: the hash first, so that no run collects them again;
    then the versions, since nobody can tell what they learned once the rows are gone.

    Raises: ConfigError without a subject; StageError when another process builds or reads what has to change.
    """
    now = now or datetime.now(UTC)
    if not subjects or not all(subject.strip() for subject in subjects):
        raise ConfigError("erase: no subject given; name one with --subject, or a file with one a line")
    key = load_key(config)
    hashes = [one for subject in subjects for one in subject_hashes(key, subject)]
    add_tombstones(config.root, hashes, now=now)
    learned_from = erase.affected(config.root, erase.without_subjects(hashes))
    tagged = unlearn.tag(config, learned_from, why="erasure", now=now)
    removed = erase.erase(config.root, hashes)
    return Erased(removed, tagged, erase_from_logs(config.root, config.collect.sources, key, frozenset(hashes)))


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Erase, say what was done and, where the policy asks for it, begin the lineage anew at once."""
    done = run(config, _subjects(arguments))
    print("\n".join(done.lines()))
    if not (done.removed.rows or done.removed.artifacts or done.logs.records):
        print(
            "nothing was found by these names, which count letter for letter: spelt as the requests spelt them? Their "
            "hashes are in tombstones.json all the same: records of these names will be dropped"
        )
    if done.tagged and config.retention.restart == "at_once":
        from jobs import loop

        with ray_session():
            loop.run(config)


def _subjects(arguments: argparse.Namespace) -> list[str]:
    named = list(arguments.subject)
    if arguments.subjects_file is not None:
        text = sys.stdin.read() if str(arguments.subjects_file) == "-" else arguments.subjects_file.read_text()
        named += [line.strip() for line in text.splitlines() if line.strip()]
    return named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom."""
    about = "as the requests named them: the subject header, or the conversation"
    parser.add_argument("--subject", action="append", default=[], metavar="NAME", help=about)
    kept = "a file with one a line, - for the standard input: keeps names out of the shell's history"
    parser.add_argument("--subjects-file", type=Path, metavar="FILE", help=kept)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
