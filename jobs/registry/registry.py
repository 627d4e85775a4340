"""Drafter versions: registered once for a derivation id, judged, and given back as they were sent.

A version starts as pending. It is passed once its files came back as they were sent and it was let through, and only
then an alias that fleets serve by may name it.
"""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.registry import stored
from jobs.registry.alias_log import ANY, AliasLog
from jobs.registry.connection import TRIES, Connection, contended, wait
from jobs.registry.moves import Move
from jobs.registry.runs import Dataset, Runs
from jobs.registry.version import ATTACHED, CONTENT, DERIVATION, PASSED, PENDING, STATE, WHY, Version, lineage_tags
from pipeline.artifacts import MANIFEST, DrafterCheckpoint, verify, write_durably
from pipeline.errors import SchemaError, StageError
from pipeline.stages import Artifact, exclusive

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger("slipstream")

_SERVING = ("approved", "champion")  # a fleet serves what these name
_FOLDER = "drafter"  # the run's artifact folder with the checkpoint


class Registry:
    """The drafter versions of one MLflow, embedded (SQLite and a folder under the root) or a server."""

    def __init__(self, tracking_uri: str | None, root: Path):
        self.mlflow = Connection(tracking_uri, root)
        self.uri, self.root = self.mlflow.uri, self.mlflow.root
        self.log = AliasLog(self.mlflow)
        self.runs = Runs(self.mlflow)

    def register(
        self, model_name: str, checkpoint: Artifact[DrafterCheckpoint], *, tags: Mapping[str, str] | None = None
    ) -> str:
        """The version of this checkpoint: the one it has already, or a new, pending one with its files and lineage.

        Raises: SchemaError when a file is missing or differs from the manifest; StageError when MLflow does
        not hold, after several tries, what was sent.
        """
        stored.require_files(checkpoint.folder, checkpoint.manifest)
        verify(checkpoint.folder, checkpoint.manifest)
        lineage = {**lineage_tags(checkpoint), **(tags or {})}
        with self.mlflow.lock(f"{model_name}-{checkpoint.id}"):
            if (version := self.version_of(model_name, checkpoint.id)) is None:
                name = f"{checkpoint.manifest.role}-{checkpoint.id}"
                run_id = self.runs.open(model_name, name, lineage, key=DERIVATION)
                self.runs.log_training(run_id, checkpoint.manifest.config, checkpoint.manifest.curve)
                names = (*(shard.path for shard in checkpoint.manifest.shards), MANIFEST)
                self.runs.store(run_id, {name: checkpoint.folder / name for name in names}, folder=_FOLDER)
                version = self._create_version(model_name, run_id, {**lineage, STATE: PENDING})
                self.runs.finish(run_id)
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
        datasets: Sequence[Dataset] = (),
    ) -> str:
        """The run id of a training, logged once for its derivation id; registering it later adds to this run."""
        with self.mlflow.lock(f"{experiment}-{derivation_id}"):
            run_id = self.runs.open(experiment, run_name, {DERIVATION: derivation_id, **(tags or {})}, key=DERIVATION)
            self.runs.log_training(run_id, params, curve)
            self.runs.log_datasets(run_id, datasets)
            self.runs.finish(run_id)
        return run_id

    def alias(self, model_name: str, alias: str) -> str | None:
        """The version that an alias names, or None where MLflow says that there is no such alias or model."""
        return self.log.alias(model_name, alias)

    def settled(self, model_name: str, alias: str) -> str | None:
        """The version that an alias names, once a move that a killed process left half done is finished.

        Raises: StageError for an alias that was moved by hand.
        """
        return self.log.settle(model_name, {alias}).get(alias)

    def set_alias(
        self,
        model_name: str,
        alias: str,
        version: str,
        *,
        expected: Any = ANY,
        given: Mapping[str, str | None] | None = None,
        reason: str = "set",
        decision: str | None = None,
    ) -> str | None:
        """Move an alias and return the version it named before; the move is in the history first.

        Raises: AliasMoved when the alias does not name ``expected`` (None: no version), or another alias not what
        ``given`` says, any more; StageError for a version that may not serve, or an alias that was moved by hand.
        """
        made = self._get(model_name, version)
        if alias in _SERVING and (state := made.tags.get(STATE)) != PASSED:
            raise StageError(
                f"{model_name} version {version} is {state or 'not ours'}, so {alias} cannot name it; only a version "
                "that `slipstream promote` or `adopt` let through serves"
            )
        asked = {"expected": expected, "given": given or {}, "reason": reason, "decision": decision}
        return self.log.move(model_name, alias, version, **asked, source=made)

    def history(self, model_name: str, alias: str | None = None, *, refused: bool = False) -> list[Move]:
        """The moves of the aliases that happened, oldest first; with ``refused``, also those that came too late."""
        return [
            move
            for move in self.log.read(model_name)
            if (alias is None or move.alias == alias) and (refused or move.refused is None)
        ]

    def versions(self, model_name: str) -> list[Version]:
        """All versions of ours, by number; one that was registered twice at once appears once."""
        found: dict[str, Version] = {}
        for made in self.mlflow.versions(model_name):
            if (derivation := made.tags.get(DERIVATION)) and derivation not in found:
                found[derivation] = Version(str(made.version), derivation, dict(made.tags))
        return list(found.values())

    def version_of(self, model_name: str, derivation_id: str) -> str | None:
        """The version of a derivation id, or None."""
        found = self.mlflow.versions(model_name, f"tags.`{DERIVATION}` = '{derivation_id}'")
        return str(found[0].version) if found else None

    def derivation(self, model_name: str, version: str) -> str:
        """The derivation id of a version. Raises: StageError for one that is not ours."""
        return self._tags(model_name, version)[DERIVATION]

    def state(self, model_name: str, version: str) -> str:
        """pending, passed, failed or retired. Raises: StageError for a version that is not ours."""
        return self._tags(model_name, version)[STATE]

    def set_state(self, model_name: str, version: str, state: str, *, reason: str) -> None:
        """Set a version's state, with the reason."""
        self.tag(model_name, version, WHY, reason)
        self.tag(model_name, version, STATE, state)

    def tag(self, model_name: str, version: str, key: str, value: str) -> None:
        """Set a tag of a version."""
        self.mlflow.retried(self.mlflow.client.set_model_version_tag, model_name, version, key, value)

    def tags(self, model_name: str, version: str) -> dict[str, str]:
        """The tags of a version."""
        return dict(self.mlflow.client.get_model_version(model_name, version).tags)

    def log_figures(self, model_name: str, version: str, figures: Mapping[str, float]) -> None:
        """Log figures as metrics of the version's run."""
        self.runs.log_figures(self._get(model_name, version).run_id, figures)

    def attach(self, model_name: str, version: str, files: Mapping[str, bytes], *, folder: str) -> None:
        """Store files beside a version's checkpoint, in a folder of its run; they came back as they were sent.

        Raises: StageError or SchemaError when MLflow does not hold what was sent.
        """
        made, bodies = self._get(model_name, version), {**files, stored.CONTENTS: stored.contents_of(files)}
        tag = f"{folder} {stored.sha256(bodies[stored.CONTENTS])}"
        if made.tags.get(ATTACHED) == tag and self._holds_attached(model_name, version):
            return
        with tempfile.TemporaryDirectory(prefix=".attach-", suffix=".tmp", dir=self.root) as local:
            for name, body in bodies.items():
                write_durably(Path(local, name), body)
            self.runs.store(made.run_id, {name: Path(local, name) for name in bodies}, folder=folder)
        self.tag(model_name, version, ATTACHED, tag)
        self.attached(model_name, version)

    def attached(self, model_name: str, version: str) -> dict[str, bytes]:
        """Name → body of what was attached last, from a clean download; empty where nothing was.

        Raises: SchemaError or StageError when it is not what was attached.
        """
        made = self._get(model_name, version)
        if ATTACHED not in made.tags:
            return {}
        folder, sha256 = made.tags[ATTACHED].rsplit(" ", 1)
        with self.runs.fetched(made.run_id, folder) as got:
            return stored.read_contents(got, sha256)

    def download(self, model_name: str, version: str, to: Path | None = None, *, anew: bool = False) -> Path:
        """The immutable folder of a version (``versions/<model>/<n>`` under the root), complete and verified.

        With ``anew`` the registry's files are fetched and checked also where a copy lies here already.

        Raises: SchemaError or StageError when what the registry holds is not what was registered; nothing is
        left behind then.
        """
        to = Path(to) if to else self.root / "versions" / model_name / version
        content = self._tags(model_name, version)[CONTENT]
        with exclusive(to, f"download of {model_name} version {version}", wait=True):
            if anew or not to.exists():
                with self.runs.fetched(self._get(model_name, version).run_id, _FOLDER) as clean:
                    stored.seal(clean, content)
                    if not to.exists():
                        os.rename(clean, to)
            stored.check(to, content)
        return to

    def _holds_attached(self, model_name: str, version: str) -> bool:
        try:
            return bool(self.attached(model_name, version))
        except (SchemaError, StageError) as error:
            logger.warning("registry: attachments of %s version %s are sent again (%s)", model_name, version, error)
            return False

    def _get(self, model_name: str, version: str) -> "ModelVersion":
        from mlflow.exceptions import MlflowException

        try:
            return self.mlflow.client.get_model_version(model_name, version)
        except MlflowException as error:
            raise StageError(f"{model_name}: MLflow at {self.uri} gave no version {version} ({error})")

    def _tags(self, model_name: str, version: str) -> dict[str, str]:
        tags = self._get(model_name, version).tags
        if missing := [key for key in (DERIVATION, CONTENT, STATE) if key not in tags]:
            raise StageError(
                f"{model_name} version {version}: not registered by Slipstream (tags {missing} are missing), so there "
                "is no manifest to verify it against; register the folder with `slipstream adopt`"
            )
        return tags

    def _create_version(self, model_name: str, run_id: str, tags: Mapping[str, str]) -> str:
        """Registries elsewhere may number versions at the same moment: bounded tries, and one version a checkpoint."""
        from mlflow.exceptions import MlflowException

        source = f"{self.mlflow.client.get_run(run_id).info.artifact_uri}/{_FOLDER}"
        for attempt in range(TRIES):
            try:
                self.mlflow.ensure_model(model_name)
                self.mlflow.client.create_model_version(model_name, source, run_id, tags=dict(tags))
            except MlflowException as error:
                if not contended(error) or attempt == TRIES - 1:
                    raise
                wait(attempt)
            # The lowest number counts: who else registered this very checkpoint meanwhile sees the same one.
            if (version := self.version_of(model_name, tags[DERIVATION])) is not None:
                return version
        raise StageError(f"{model_name}: MLflow at {self.uri} made no version in {TRIES} tries; run the stage again")
