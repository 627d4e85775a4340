"""MLflow, and nothing else in the project imports it: runs, drafter versions, aliases and their history.

A version is registered once for a derivation id, whatever was interrupted before. An alias is read by its
name alone, moved under a lock of ours and only from where the caller last saw it. What comes out of the
registry is compared, file by file, with the manifest that went in.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.artifacts import MANIFEST, DrafterCheckpoint, load, verify
from pipeline.errors import SchemaError, StageError
from pipeline.shards import fsync_file
from pipeline.stages import Artifact, exclusive

logger = logging.getLogger("slipstream")

ANY = object()
"""For ``expected``: move the alias wherever it is now."""

FILES = ("config.json", "model.safetensors")
_FOLDER = "drafter"  # the run's artifact folder with the checkpoint
_DERIVATION = "slipstream.derivation_id"
_CONTENT = "slipstream.content_id"
_LOGGED = "slipstream.logged"
_MOVE = "slipstream.move."
_TRIES = 5
_FIRST_WAIT_S = 0.2  # before the second try; doubles
_BATCH = 100  # parameters in one request; metrics allow more
_CONTENTION = ("RESOURCE_ALREADY_EXISTS", "TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED")


class Registry:
    """The drafter versions of one MLflow, embedded (SQLite and a folder under the root) or a server."""

    def __init__(self, tracking_uri: str | None, root: Path):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        self.root = Path(root).resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.uri = tracking_uri or f"sqlite:///{self.root}/mlflow.db"
        self._artifacts = (self.root / "mlartifacts").as_uri() if self.uri.startswith("sqlite:") else None
        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        with self._lock("schema"):  # processes that meet an empty database at once break each other's migrations
            self._client.search_experiments(max_results=1)
            self._client.search_registered_models(max_results=1)

    def register(
        self, model_name: str, checkpoint: Artifact[DrafterCheckpoint], *, tags: Mapping[str, str] | None = None
    ) -> str:
        """The version of this checkpoint: the one it has already, or a new one with its files and its lineage.

        Raises: SchemaError when a file is missing or differs from the manifest; StageError when MLflow does
        not hold, after several tries, what was sent.
        """
        _require_files(checkpoint.folder, checkpoint.manifest)
        verify(checkpoint.folder, checkpoint.manifest)
        lineage = _lineage(checkpoint)
        with self._lock(model_name):
            if (version := self._version_of(model_name, checkpoint.id)) is None:
                name = f"{checkpoint.manifest.role}-{checkpoint.id}"
                run_id = self._run(model_name, name, {**lineage, **(tags or {})})
                self._log(run_id, checkpoint.manifest.config, checkpoint.manifest.curve)
                self._upload(run_id, checkpoint)
                version = self._create_version(model_name, run_id, {**lineage, **(tags or {})})
                self._client.set_terminated(run_id)
                logger.info("registry: %s is version %s of %s", checkpoint.id, version, model_name)
        return version

    def log_training(
        self,
        run_name: str,
        params: Mapping[str, Any],
        curve: Sequence[Mapping[str, float]],
        *,
        experiment: str,
        derivation_id: str,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """The run id of a training, logged once for its derivation id; registering it later adds to this run."""
        with self._lock(experiment):
            run_id = self._run(experiment, run_name, {_DERIVATION: derivation_id, **(tags or {})})
            self._log(run_id, params, curve)
            self._client.set_terminated(run_id)
        return run_id

    def alias(self, model_name: str, alias: str) -> str | None:
        """The version that an alias names, or None where MLflow says that there is no such alias or model."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.get_model_version_by_alias(model_name, alias).version)
        except MlflowException as error:
            # A missing alias comes as "invalid parameter"; anything else is a failure, and no answer.
            missing_alias = error.error_code == "INVALID_PARAMETER_VALUE" and "alias" in str(error)
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" or (missing_alias and "not found" in str(error)):
                return None
            raise

    def set_alias(
        self, model_name: str, alias: str, version: str, *, expected: Any = ANY, reason: str = "set"
    ) -> str | None:
        """Move an alias and return the version it named before; the move is in the history first.

        Raises: StageError when the alias does not name ``expected`` (None: no version) any more.
        """
        with self._lock(model_name):
            before = self.alias(model_name, alias)
            if before == version:
                return before
            if expected is not ANY and before != expected:
                raise StageError(
                    f"{model_name}: alias {alias} names version {before}, expected {expected}: someone moved it in "
                    "the meantime. Look at the history, then run the stage again"
                )
            number = len(self._moves(model_name)) + 1
            move = {"alias": alias, "version": version, "previous": before, "reason": reason, "at": _now()}
            self._client.set_registered_model_tag(model_name, f"{_MOVE}{number:06d}", json.dumps(move))
            self._client.set_registered_model_alias(model_name, alias, version)
        logger.info("registry: %s of %s is version %s (was %s)", alias, model_name, version, before)
        return before

    def history(self, model_name: str, alias: str | None = None) -> list[dict[str, Any]]:
        """The moves of the aliases, oldest first: alias, version, previous, reason and time.

        A move that was written down and then interrupted is left out: the next one of its alias, or the alias
        itself, starts elsewhere.
        """
        happened, after = [], {}
        for move in reversed(self._moves(model_name)):
            name = move["alias"]
            if (alias is None or name == alias) and move["version"] == after.get(name, self.alias(model_name, name)):
                happened.append(move)
                after[name] = move["previous"]
        return happened[::-1]

    def derivation(self, model_name: str, version: str) -> str:
        """The derivation id of a version's checkpoint. Raises: StageError for a version that is not ours."""
        return self._tags(model_name, version)[_DERIVATION]

    def attach(self, model_name: str, version: str, files: Sequence[Path], *, folder: str) -> None:
        """Store files beside a version's checkpoint, in a folder of its run."""
        run_id = self._client.get_model_version(model_name, version).run_id
        for file in files:
            self._client.log_artifact(run_id, str(file), folder)

    def tag(self, model_name: str, version: str, key: str, value: str) -> None:
        """Set a tag of a version."""
        self._client.set_model_version_tag(model_name, version, key, value)

    def tags(self, model_name: str, version: str) -> dict[str, str]:
        """The tags of a version."""
        return dict(self._client.get_model_version(model_name, version).tags)

    def download(self, model_name: str, version: str, to: Path | None = None) -> Path:
        """The immutable folder of a version (``versions/<model>/<n>`` under the root), complete and verified.

        Raises: SchemaError or StageError when what the registry holds is not what was registered; nothing is
        left behind then.
        """
        to = Path(to) if to else self.root / "versions" / model_name / version
        content = self._tags(model_name, version)[_CONTENT]
        with exclusive(to, f"download of {model_name} version {version}", wait=True):
            if not to.exists():
                clean = to.with_name(f".{to.name}.{os.getpid()}.tmp")
                shutil.rmtree(clean, ignore_errors=True)
                try:
                    clean.mkdir(parents=True)
                    self._fetch(self._client.get_model_version(model_name, version).run_id, clean)
                    _seal(clean, content)
                    os.rename(clean, to)
                finally:
                    shutil.rmtree(clean, ignore_errors=True)
            _check(to, content)
        return to

    def _version_of(self, model_name: str, derivation_id: str) -> str | None:
        query = f"name = '{model_name}' and tags.`{_DERIVATION}` = '{derivation_id}'"
        found = self._client.search_model_versions(query)
        return str(min(int(version.version) for version in found)) if found else None

    def _tags(self, model_name: str, version: str) -> dict[str, str]:
        from mlflow.exceptions import MlflowException

        try:
            tags = self.tags(model_name, version)
        except MlflowException as error:
            raise StageError(f"{model_name}: MLflow at {self.uri} gave no version {version} ({error})")
        if _DERIVATION not in tags or _CONTENT not in tags:
            raise StageError(
                f"{model_name} version {version}: not registered by Slipstream (tags {sorted(tags)}), so there is "
                "no manifest to verify it against; register the folder with `slipstream adopt`"
            )
        return tags

    def _run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = (
            found.experiment_id
            if found
            else self._client.create_experiment(experiment, artifact_location=self._artifacts)
        )
        runs = self._client.search_runs([experiment_id], f"tags.`{_DERIVATION}` = '{tags[_DERIVATION]}'", max_results=1)
        if not runs:
            return self._client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id
        for key, value in tags.items():
            self._client.set_tag(runs[0].info.run_id, key, value)
        return runs[0].info.run_id

    def _log(self, run_id: str, params: Mapping[str, Any], curve: Sequence[Mapping[str, float]]) -> None:
        from mlflow.entities import Metric, Param

        run = self._client.get_run(run_id)
        if _LOGGED in run.data.tags:
            return
        flat = [Param(key, str(value)[:500]) for key, value in _flatten(params)]
        # One fixed time, so that logging again after an interruption repeats rows instead of adding any.
        points = [
            Metric(key, float(value), run.info.start_time, int(point["step"]))
            for point in curve
            for key, value in point.items()
            if key != "step" and value is not None
        ]
        for start in range(0, max(len(flat), len(points)), _BATCH):
            stop = start + _BATCH
            self._client.log_batch(run_id, metrics=points[start:stop], params=flat[start:stop])
        self._client.set_tag(run_id, _LOGGED, "yes")

    def _upload(self, run_id: str, checkpoint: Artifact[DrafterCheckpoint]) -> None:
        """A store may answer with an error after it took the file, or without one and not have it: look."""
        from mlflow.exceptions import MlflowException

        for attempt in range(_TRIES):
            error: Exception | None = None
            try:
                for name in (*(shard.path for shard in checkpoint.manifest.shards), MANIFEST):
                    target = str(Path(_FOLDER, name).parent)
                    self._client.log_artifact(run_id, str(checkpoint.folder / name), target)
            except (MlflowException, OSError) as raised:
                error = raised
                logger.warning("registry: upload of %s failed (%s), looking at what arrived", checkpoint.id, raised)
            if self._arrived(run_id, checkpoint, hashes=error is not None):
                return
            time.sleep(_FIRST_WAIT_S * 2**attempt)
        raise StageError(f"{checkpoint.id}: MLflow at {self.uri} did not keep the files in {_TRIES} tries ({error})")

    def _arrived(self, run_id: str, checkpoint: Artifact[DrafterCheckpoint], *, hashes: bool) -> bool:
        sizes = {shard.path: shard.bytes for shard in checkpoint.manifest.shards}
        sizes[MANIFEST] = (checkpoint.folder / MANIFEST).stat().st_size
        if self._sizes(run_id, _FOLDER) != sizes:
            return False
        if not hashes:
            return True
        clean = self.root / f".arrived-{checkpoint.id}.{os.getpid()}.tmp"
        try:
            clean.mkdir()
            self._fetch(run_id, clean)
            _check(clean, checkpoint.manifest.content_id)
            return True
        except SchemaError:
            return False
        finally:
            shutil.rmtree(clean, ignore_errors=True)

    def _sizes(self, run_id: str, folder: str) -> dict[str, int]:
        found = {}
        for entry in self._client.list_artifacts(run_id, folder):
            if entry.is_dir:
                found |= self._sizes(run_id, entry.path)
            else:
                found[str(Path(entry.path).relative_to(_FOLDER))] = entry.file_size
        return found

    def _fetch(self, run_id: str, clean: Path) -> None:
        from mlflow.exceptions import MlflowException

        try:
            got = Path(self._client.download_artifacts(run_id, _FOLDER, str(clean)))
        except (MlflowException, OSError) as error:
            raise StageError(f"run {run_id}: MLflow at {self.uri} cannot give back the checkpoint ({error})")
        for path in sorted(got.iterdir()):
            os.rename(path, clean / path.name)
        got.rmdir()

    def _create_version(self, model_name: str, run_id: str, tags: Mapping[str, str]) -> str:
        """Registries elsewhere may number versions at the same moment: bounded tries, no version twice."""
        from mlflow.exceptions import MlflowException

        source = f"{self._client.get_run(run_id).info.artifact_uri}/{_FOLDER}"
        for attempt in range(_TRIES):
            try:
                self._ensure_model(model_name)
                made = self._client.create_model_version(model_name, source, run_id, tags=dict(tags))
                return str(made.version)
            except MlflowException as error:
                if error.error_code not in _CONTENTION or attempt == _TRIES - 1:
                    raise
                if (version := self._version_of(model_name, tags[_DERIVATION])) is not None:
                    return version
                time.sleep(_FIRST_WAIT_S * 2**attempt)
        raise AssertionError("unreachable")

    def _ensure_model(self, model_name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _moves(self, model_name: str) -> list[dict[str, Any]]:
        tags = self._client.get_registered_model(model_name).tags
        return [json.loads(tags[key]) for key in sorted(tags) if key.startswith(_MOVE)]

    def _lock(self, name: str) -> Any:
        return exclusive(self.root / f"registry-{name}", f"registry {name}", wait=True)


def _lineage(checkpoint: Artifact[DrafterCheckpoint]) -> dict[str, str]:
    manifest = checkpoint.manifest
    parents = {f"slipstream.parent.{role}": parent for role, parent in manifest.parents.items()}
    return {_DERIVATION: checkpoint.id, _CONTENT: manifest.content_id, "slipstream.role": manifest.role, **parents}


def _require_files(folder: Path, manifest: DrafterCheckpoint) -> None:
    listed = {shard.path for shard in manifest.shards}
    if missing := [name for name in FILES if name not in listed]:
        raise SchemaError(
            f"{folder}: the manifest lists {sorted(listed)}, a drafter needs {' and '.join(FILES)} too "
            f"(missing: {', '.join(missing)}); make the checkpoint again"
        )


def _check(folder: Path, content_id: str) -> None:
    """Raises: SchemaError unless the folder holds exactly the files of the manifest that was registered."""
    manifest = load(folder, DrafterCheckpoint)
    _require_files(folder, manifest)
    listed = {shard.path for shard in manifest.shards} | {MANIFEST}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if found != listed:
        raise SchemaError(
            f"{folder}: files missing {sorted(listed - found)}, not listed {sorted(found - listed)}; "
            "the version cannot be served, register the checkpoint again"
        )
    verify(folder, manifest)
    if manifest.content_id != content_id:
        raise SchemaError(f"{folder}: content {manifest.content_id}, the registry says {content_id}; it was exchanged")


def _seal(folder: Path, content_id: str) -> None:
    """Check a clean download, make it durable and read-only."""
    _check(folder, content_id)
    for path in folder.rglob("*"):
        if path.is_file():
            fsync_file(path)
            path.chmod(0o444)


def _flatten(params: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in params.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
