"""Expire: rows whose newest request is older than retention.ttl_days leave the run root.

python jobs/expire.py --config slipstream.toml --set retention.ttl_days=90
"""

import argparse
import logging
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import unlearn
from jobs.erase import Erased
from jobs.session import job_main
from pipeline import erase
from pipeline.config import Config
from pipeline.errors import ConfigError

logger = logging.getLogger("slipstream")


def run(config: Config, *, now: datetime | None = None) -> Erased:
    """Remove what is too old; versions that learned from it get a deadline where retention.expiry_unlearns says so.

    Raises: ConfigError without a time to live; StageError when another process builds or reads what has to change.
    """
    now = now or datetime.now(UTC)
    if config.retention.ttl_days is None:
        raise ConfigError("expire: retention.ttl_days is not set: nothing expires; --set retention.ttl_days=90")
    before = (now - timedelta(days=config.retention.ttl_days)).timestamp()
    tagged = {}
    if config.retention.expiry_unlearns:
        learned_from = erase.affected(config.root, erase.newer_than(before))
        tagged = unlearn.tag(config, learned_from, why="expiry", now=now)
    return Erased(erase.expire(config.root, before), tagged)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Expire, and say what was done."""
    print("\n".join(run(config).lines()))


if __name__ == "__main__":
    job_main(__doc__, main, needs_ray=False)
