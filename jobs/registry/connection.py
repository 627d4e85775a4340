"""One MLflow, embedded (SQLite and a folder) or a server: how it is reached, and what its errors mean."""

import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.errors import StageError
from pipeline.stages import exclusive

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger("slipstream")

TRIES = 8
FIRST_WAIT_S = 0.1  # before the second try; doubles, up to LONGEST_WAIT_S
LONGEST_WAIT_S = 2.0
_PAGE = 10_000  # versions in one answer
_CONTENTION = ("RESOURCE_ALREADY_EXISTS", "TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED")
_COLLISIONS = ("IntegrityError", "UNIQUE constraint", "duplicate key")  # two first writes of one row

T = TypeVar("T")


class Connection:
    """An MLflow client, where its files go, and patience with contention."""

    def __init__(self, tracking_uri: str | None, root: Path):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.root = Path(root).resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.uri = tracking_uri or f"sqlite:///{self.root}/mlflow.db"
        database = Path(self.uri.removeprefix("sqlite:///")).resolve() if self.uri.startswith("sqlite:///") else None
        self.artifacts = (database.parent / "mlartifacts").as_uri() if database else None
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        # Processes that meet an empty database at once break each other's migrations: one after the other, wherever
        # their roots are. A server has done its own.
        beside = database.with_name(f"registry-{database.name}") if database else self.root / "registry-schema"
        with exclusive(beside, "MLflow's schema", wait=True):
            try:
                self.client.search_experiments(max_results=1)
                self.client.search_registered_models(max_results=1)
            except MlflowException as error:
                raise StageError(f"MLflow at {self.uri} does not answer ({error}); is promote.tracking_uri right?")

    def lock(self, name: str) -> AbstractContextManager[None]:
        """The lock of a name under this root: it saves work done twice, and nothing relies on it."""
        return exclusive(self.root / f"registry-{name}", f"registry {name}", wait=True)

    def retried(self, call: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """What an idempotent call returns, tried again when others wrote at the same moment."""
        from mlflow.exceptions import MlflowException

        for attempt in range(TRIES):
            try:
                return call(*arguments, **more)
            except MlflowException as error:
                if not contended(error) or attempt == TRIES - 1:
                    raise
                wait(attempt)
        raise AssertionError("unreachable")

    def ensure_model(self, name: str) -> None:
        """Make a registered model where there is none."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def ensure_experiment(self, name: str) -> str:
        """The id of an experiment, made where there is none."""
        from mlflow.exceptions import MlflowException

        if (found := self.client.get_experiment_by_name(name)) is None:
            try:
                return self.client.create_experiment(name, artifact_location=self.artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)
        return found.experiment_id

    def versions(self, name: str, also: str = "") -> list["ModelVersion"]:
        """All versions of a model, by number (``also`` narrows the search)."""
        query, found, token = f"name = '{name}'{also and f' and {also}'}", [], None
        while True:
            page = self.client.search_model_versions(
                query, max_results=_PAGE, order_by=["version_number ASC"], page_token=token
            )
            found += page
            if not (token := page.token):
                return found


def contended(error: Exception) -> bool:
    """Whether an MLflow error only says that others wrote at the same moment, or that the answer got lost."""
    code = getattr(error, "error_code", None)
    return code in _CONTENTION or (code == "BAD_REQUEST" and any(text in str(error) for text in _COLLISIONS))


def wait(attempt: int) -> None:
    """Sleep before the next try; at random lengths, so that those who collided don't do so again."""
    time.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.5))
