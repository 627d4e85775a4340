"""The log of alias moves in MLflow. MLflow's own aliases are its projection, and can always be made from it.

An entry is a version of the model ``<model>.log``: MLflow numbers versions one by one, whoever asks, so an append is
atomic and the order is the same for all, on SQLite and behind a server. A mover appends, replays, and, if its move
counts, sets the alias and looks again, until alias and log agree. What a killed mover left is finished by the next.
"""

import getpass
import logging
import os
import socket
import uuid
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs.registry.connection import TRIES, Connection, contended, wait
from jobs.registry.moves import AliasMoved, Move, broken, parse, replay, state_after
from pipeline.errors import StageError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger("slipstream")

ANY = object()
"""For ``expected``: move the alias wherever it is now."""

_MOVE = "slipstream.move"
_APPLIED = "slipstream.applied"
_LOOKS = 50  # a mover sets the alias again for as long as others append
# A mover that is alive looks again within this time after it set the alias: until then its move stays open for it.
_DEAD_AFTER_S = 60


class AliasLog:
    """The moves of the aliases of one MLflow's models."""

    def __init__(self, connection: Connection):
        self._mlflow = connection

    def alias(self, model: str, alias: str) -> str | None:
        """The version that MLflow's alias names, or None where MLflow says that there is no such alias or model."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self._mlflow.client.get_model_version_by_alias(model, alias).version)
        except MlflowException as error:
            # A missing alias comes as "invalid parameter"; anything else is a failure, and no answer.
            missing_alias = error.error_code == "INVALID_PARAMETER_VALUE" and "alias" in str(error)
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" or (missing_alias and "not found" in str(error)):
                return None
            raise

    def read(self, model: str) -> list[Move]:
        """All moves in order, replayed. Raises: StageError when entries were deleted from the log."""
        entries = self._mlflow.versions(log_of(model))
        numbers = {int(entry.version) for entry in entries}
        if gone := sorted(set(range(1, max(numbers, default=0) + 1)) - numbers):
            raise StageError(
                f"{log_of(model)}: entries {gone} are missing, someone deleted them in MLflow at {self._mlflow.uri}; "
                "what the aliases should name can't be known. Restore them from a backup of MLflow's database"
            )
        return replay(
            parse(entry.tags[_MOVE], number=int(entry.version), applied=_APPLIED in entry.tags)
            for entry in entries
            if _MOVE in entry.tags
        )

    def move(
        self,
        model: str,
        alias: str,
        version: str,
        *,
        expected: Any,
        given: Mapping[str, str | None],
        reason: str,
        decision: str | None,
        source: "ModelVersion",
    ) -> str | None:
        """Move an alias, and return the version that it named before.

        Raises: AliasMoved when it, or an alias in ``given``, does not name what was expected (any more).
        """
        conditions = {**given, **({} if expected is ANY else {alias: expected})}
        state = self.settle(model, {alias, *conditions})
        if (before := state.get(alias)) == version:
            return before
        if wrong := broken(conditions, state):
            raise AliasMoved(_moved(model, wrong))
        made = Move(uuid.uuid4().hex, alias, version, conditions, reason, decision, actor(), _now())
        self._append(model, made, source)
        own = next(move for move in self.read(model) if move.id == made.id)
        if own.refused:
            raise AliasMoved(_moved(model, own.refused))
        self.settle(model, {alias}, own=own.id)
        logger.info("registry: %s of %s is version %s (was %s)", alias, model, version, own.previous)
        return own.previous

    def settle(self, model: str, aliases: Collection[str], *, own: str | None = None) -> dict[str, str]:
        """Alias → version by the log, once MLflow's aliases agree with it; finishes what killed movers left.

        Raises: StageError when an alias names what no open move explains: someone set it by hand.
        """
        strange: set[tuple[str, int]] = set()
        for attempt in range(_LOOKS):
            moves = self.read(model)
            state, again = state_after(moves), False
            for alias in sorted(aliases):
                found, wanted = self.alias(model, alias), state.get(alias)
                pending = [move for move in moves if move.alias == alias and not move.refused and not move.applied]
                if found == wanted:
                    self._mark(model, [move for move in pending if move.id == own or _is_old(move)])
                    continue
                again = True
                if found in {named for move in pending for named in (move.previous, move.version)}:
                    self._mlflow.retried(self._mlflow.client.set_registered_model_alias, model, alias, wanted)
                # Between reading the log and the alias someone may have moved it; twice on the same log is no accident.
                elif (alias, len(moves)) in strange:
                    raise StageError(by_hand(model, alias, found, wanted))
                else:
                    strange.add((alias, len(moves)))
            if not again:
                return state
            wait(min(attempt, 2))
        raise StageError(f"{model}: the aliases were moved by others {_LOOKS} times in a row; run the stage again")

    def disagreements(self, model: str) -> list[str]:
        """One line for every alias that is not where the log says, with the next step."""
        moves = self.read(model)
        lines = []
        for alias, wanted in sorted(state_after(moves).items()):
            if (found := self.alias(model, alias)) == wanted:
                continue
            open_ = any(move.alias == alias and not move.refused and not move.applied for move in moves)
            unfinished = f"{model}: the move of {alias} to version {wanted} is not finished; run the same command again"
            lines.append(unfinished if open_ else by_hand(model, alias, found, wanted))
        return lines

    def _append(self, model: str, move: Move, source: "ModelVersion") -> None:
        """Bounded tries; an append whose answer got lost is looked for, not repeated."""
        from mlflow.exceptions import MlflowException

        for attempt in range(TRIES):
            try:
                self._mlflow.ensure_model(log_of(model))
                self._mlflow.client.create_model_version(
                    log_of(model), source.source, source.run_id, tags={_MOVE: move.as_json()}
                )
                return
            except MlflowException as error:
                if not contended(error) or attempt == TRIES - 1:
                    raise
                if any(known.id == move.id for known in self.read(model)):
                    return
                wait(attempt)

    def _mark(self, model: str, moves: Collection[Move]) -> None:
        for move in moves:
            set_tag = self._mlflow.client.set_model_version_tag
            self._mlflow.retried(set_tag, log_of(model), str(move.number), _APPLIED, _now())


def log_of(model: str) -> str:
    """The model that holds the moves of a model's aliases. Workloads have no dot, so no drafter is called so."""
    return f"{model}.log"


def actor() -> str:
    """Who acts: SLIPSTREAM_ACTOR, or the user and the machine."""
    if named := os.environ.get("SLIPSTREAM_ACTOR"):
        return named
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def by_hand(model: str, alias: str, found: str | None, wanted: str | None) -> str:
    """What to tell someone whose alias was moved past the log."""
    now = f"version {found}" if found else "no version"
    recorded = f"its last recorded move was to version {wanted}" if wanted else "it has no recorded move"
    back = f"set it back to version {wanted}" if wanted else "remove it"
    return (
        f"{model}: alias {alias} names {now} in MLflow, but {recorded}: it was moved by hand, and is left as it is. "
        f"In MLflow, {back}; then move it with `slipstream promote`, `deploy N` or `rollback`"
    )


def _moved(model: str, wrong: str) -> str:
    return f"{model}: {wrong}: someone moved it in the meantime. Look at `slipstream history`, then run the stage again"


def _is_old(move: Move) -> bool:
    return (datetime.now(UTC) - datetime.fromisoformat(move.at)).total_seconds() > _DEAD_AFTER_S


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
