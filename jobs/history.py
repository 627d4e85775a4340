"""History: who moved which alias, when, from where and why.

python jobs/history.py --config slipstream.toml
python jobs/history.py --config slipstream.toml --alias champion
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.registry import Move, Registry
from jobs.session import job_main
from pipeline.config import Config
from pipeline.errors import StageError

_COLUMNS = ("when", "alias", "version", "from", "reason", "decision", "who")


def run(config: Config, alias: str | None = None, *, refused: bool = False) -> list[str]:
    """A table of the moves, oldest first; ``refused`` adds those that came too late. Nothing is made.

    Below it, one line for each alias that is not where its moves put it.

    Raises: StageError for an alias that never was moved.
    """
    if nothing_registered(config):
        return [f"{config.model_name}: nothing registered yet; slipstream init-drafter or adopt begins"]
    registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
    moves = registry.history(model, refused=True)
    known = sorted({move.alias for move in moves})
    if alias is not None and alias not in known:
        raise StageError(f"{model}: alias {alias} never was moved (aliases: {', '.join(known) or 'none'})")
    shown = [move for move in moves if alias in (None, move.alias) and (refused or move.refused is None)]
    return [*table([_COLUMNS, *map(_row, shown)]), *registry.log.disagreements(model)]


def nothing_registered(config: Config) -> bool:
    """Whether the embedded MLflow of this root does not even exist."""
    return config.promote.tracking_uri is None and not (config.root / "mlflow.db").exists()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(move: Move) -> tuple[str, ...]:
    reason = f"{move.reason} (REFUSED: {move.refused})" if move.refused else move.reason
    return (
        move.at[:19].replace("T", " "),
        move.alias,
        move.version,
        move.previous or "-",
        reason,
        move.decision or "-",
        move.actor,
    )


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Print the table."""
    print("\n".join(run(config, arguments.alias, refused=arguments.refused)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which moves."""
    parser.add_argument("--alias", help="only this one: champion, approved or challenger")
    parser.add_argument("--refused", action="store_true", help="also the moves that came too late")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
