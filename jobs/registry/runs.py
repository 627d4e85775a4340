"""MLflow runs: one a checkpoint, with its parameters, its curve, its files, and the figures that judged it."""

import hashlib
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.registry.connection import TRIES, Connection, wait
from pipeline.artifacts import sha256_file
from pipeline.errors import StageError

logger = logging.getLogger("slipstream")

_LOGGED = "slipstream.logged"
_BATCH = 100  # parameters in one request; metrics allow more
_MAX_PARAMETER = 500  # characters


@dataclass(frozen=True)
class Dataset:
    """Data that a run learned from."""

    name: str
    digest: str
    """The derivation id."""
    source: str
    """Where it lay."""
    counts: Mapping[str, int]
    context: str
    """training or replay."""


class Runs:
    """The runs of one MLflow."""

    def __init__(self, connection: Connection):
        self._mlflow = connection

    def open(self, experiment: str, name: str, tags: Mapping[str, str], *, key: str) -> str:
        """The id of the run whose tag ``key`` is as in ``tags``: found, or made."""
        experiment_id = self._mlflow.ensure_experiment(experiment)
        client = self._mlflow.client
        runs = client.search_runs([experiment_id], f"tags.`{key}` = '{tags[key]}'", max_results=1)
        if not runs:
            return client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id
        for name, value in tags.items():
            self._mlflow.retried(client.set_tag, runs[0].info.run_id, name, value)
        return runs[0].info.run_id

    def log_training(self, run_id: str, params: Mapping[str, Any], curve: Sequence[Mapping[str, float]]) -> None:
        """Log parameters and a training curve, once."""
        from mlflow.entities import Metric, Param

        run = self._mlflow.client.get_run(run_id)
        if _LOGGED in run.data.tags:
            return
        flat = [Param(key, str(value)[:_MAX_PARAMETER]) for key, value in _flatten(params)]
        # One fixed time, so that logging again after an interruption repeats rows instead of adding any.
        points = [
            Metric(_levels(key), float(value), run.info.start_time, int(point["step"]))
            for point in curve
            for key, value in point.items()
            if key != "step" and value is not None
        ]
        for start in range(0, max(len(flat), len(points)), _BATCH):
            stop = start + _BATCH
            self._mlflow.retried(
                self._mlflow.client.log_batch, run_id, metrics=points[start:stop], params=flat[start:stop]
            )
        self._mlflow.retried(self._mlflow.client.set_tag, run_id, _LOGGED, "yes")

    def log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        """Log data as the run's inputs; what is there already is left alone."""
        from mlflow.entities import Dataset as Logged
        from mlflow.entities import DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Logged(one.name, one.digest, "local", one.source, profile=json.dumps(one.counts, sort_keys=True)),
                [InputTag("mlflow.data.context", one.context)],
            )
            for one in datasets
        ]
        if inputs:
            self._mlflow.retried(self._mlflow.client.log_inputs, run_id, datasets=inputs)

    def log_figures(self, run_id: str, figures: Mapping[str, float]) -> None:
        """Log figures as metrics; those that the run shows already are left alone."""
        from mlflow.entities import Metric

        known = self._mlflow.client.get_run(run_id).data.metrics
        now = int(time.time() * 1000)
        new = [Metric(name, value, now, 0) for name, value in figures.items() if known.get(name) != value]
        for start in range(0, len(new), _BATCH):
            self._mlflow.retried(self._mlflow.client.log_batch, run_id, metrics=new[start : start + _BATCH])

    def finish(self, run_id: str) -> None:
        """Mark a run as finished."""
        self._mlflow.retried(self._mlflow.client.set_terminated, run_id)

    def store(self, run_id: str, files: Mapping[str, Path], *, folder: str) -> None:
        """Keep files under a folder of the run.

        A store may answer with an error after it took a file, or without one and not have it: what arrived is looked
        at, and sent again where it is missing or differs.

        Raises: StageError when MLflow does not hold, after several tries, what was sent.
        """
        from mlflow.exceptions import MlflowException

        error: Exception | None = None
        for attempt in range(TRIES):
            try:
                for name, path in files.items():
                    self._mlflow.client.log_artifact(run_id, str(path), str(Path(folder, name).parent))
            except (MlflowException, OSError) as raised:
                error = raised
                logger.warning("registry: upload to %s failed (%s), looking at what arrived", folder, raised)
            if self._arrived(run_id, files, folder=folder, hashes=error is not None):
                return
            wait(attempt)
        raise StageError(
            f"run {run_id}, {folder}: MLflow at {self._mlflow.uri} did not keep the files in {TRIES} tries ({error}); "
            "look at its artifact store, then run the stage again"
        )

    @contextmanager
    def fetched(self, run_id: str, folder: str) -> Iterator[Path]:
        """A clean download of a folder of the run, for as long as the block runs; the block may move it away.

        Raises: StageError when MLflow cannot give it back.
        """
        from mlflow.exceptions import MlflowException

        clean = Path(tempfile.mkdtemp(prefix=".download-", suffix=".tmp", dir=self._mlflow.root))
        try:
            try:
                got = Path(self._mlflow.client.download_artifacts(run_id, folder, str(clean)))
            except (MlflowException, OSError) as error:
                raise StageError(
                    f"run {run_id}: MLflow at {self._mlflow.uri} cannot give back {folder} ({error}); look at its "
                    "artifact store"
                )
            yield got
        finally:
            shutil.rmtree(clean, ignore_errors=True)

    def _arrived(self, run_id: str, files: Mapping[str, Path], *, folder: str, hashes: bool) -> bool:
        stored = self._sizes(run_id, folder, folder)
        if any(stored.get(name) != path.stat().st_size for name, path in files.items()):
            return False
        if not hashes:
            return True
        try:
            with self.fetched(run_id, folder) as got:
                return all(sha256_file(got / name) == sha256_file(path) for name, path in files.items())
        except (StageError, OSError):
            return False

    def _sizes(self, run_id: str, folder: str, top: str) -> dict[str, int]:
        found = {}
        for entry in self._mlflow.client.list_artifacts(run_id, folder):
            if entry.is_dir:
                found |= self._sizes(run_id, entry.path, top)
            else:
                found[str(Path(entry.path).relative_to(top))] = entry.file_size
        return found


def metric_name(key: str) -> str:
    """The key in letters that MLflow takes; what had to be replaced is told apart by a hash."""
    spelled = key.replace("≤", "le_").replace(">", "gt_").replace("=", ":").replace("/", "_")
    plain = re.sub(r"[^A-Za-z0-9_ :-]", "_", spelled)
    return plain if plain == spelled and plain else f"{plain}_{hashlib.sha256(key.encode()).hexdigest()[:6]}"


def _levels(key: str) -> str:
    """A curve's name: a group before the first slash, and what was measured of it after it."""
    return "/".join(metric_name(level) for level in key.split("/", 1))


def _flatten(params: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in params.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat
