"""MLflow, and nothing else in the project imports it: drafter versions, what they hold, and who moved which alias.

connection.py  one MLflow, and what its errors mean      runs.py      runs: parameters, figures, files that arrived
moves.py       alias moves and how they replay           registry.py  versions: registered, judged, given back
alias_log.py   the moves, kept in MLflow                 stored.py    what a stored version must be, file by file
version.py     the tags of a version, and its states
"""

from jobs.registry.alias_log import ANY
from jobs.registry.moves import AliasMoved, Move
from jobs.registry.registry import Registry
from jobs.registry.runs import Dataset, metric_name
from jobs.registry.version import (
    FAILED,
    PASSED,
    PENDING,
    RETIRED,
    UNLEARN_BY,
    UNLEARN_WHY,
    WHY,
    Version,
    chain_of,
    data_tags,
    lineage_tags,
)

__all__ = [
    "ANY",
    "FAILED",
    "PASSED",
    "PENDING",
    "RETIRED",
    "UNLEARN_BY",
    "UNLEARN_WHY",
    "WHY",
    "AliasMoved",
    "Dataset",
    "Move",
    "Registry",
    "Version",
    "chain_of",
    "data_tags",
    "lineage_tags",
    "metric_name",
]
