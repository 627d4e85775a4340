"""What a stored version must be: exactly the files that its manifest lists, with their hashes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.artifacts import MANIFEST, DrafterCheckpoint, load, verify
from pipeline.errors import SchemaError
from pipeline.shards import fsync_file

FILES = ("config.json", "model.safetensors")
CONTENTS = "contents.json"
"""Lists the files of a folder of attachments; its own hash is a tag of the version."""


def require_files(folder: Path, manifest: DrafterCheckpoint) -> None:
    """Raises: SchemaError when a manifest does not list what every drafter needs."""
    listed = {shard.path for shard in manifest.shards}
    if missing := [name for name in FILES if name not in listed]:
        raise SchemaError(
            f"{folder}: the manifest lists {sorted(listed)}, a drafter needs {' and '.join(FILES)} too "
            f"(missing: {', '.join(missing)}); make the checkpoint again"
        )


def check(folder: Path, content_id: str) -> None:
    """Raises: SchemaError unless the folder holds exactly the files of the manifest that was registered."""
    manifest = load(folder, DrafterCheckpoint)
    require_files(folder, manifest)
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


def seal(folder: Path, content_id: str) -> None:
    """Check a clean download, make it durable and read-only."""
    check(folder, content_id)
    for path in folder.rglob("*"):
        if path.is_file():
            fsync_file(path)
            path.chmod(0o444)


def contents_of(files: Mapping[str, bytes]) -> bytes:
    """The body of CONTENTS."""
    listed = {name: {"bytes": len(body), "sha256": sha256(body)} for name, body in files.items()}
    return (json.dumps({"files": listed}, indent=1, sort_keys=True) + "\n").encode()


def read_contents(folder: Path, expected_sha256: str) -> dict[str, bytes]:
    """Name → body of the files that a downloaded folder of attachments lists.

    Raises: SchemaError when a file, or the list itself, is not what was stored.
    """
    listing = folder / CONTENTS
    if not listing.exists() or sha256(listing.read_bytes()) != expected_sha256:
        raise SchemaError(f"{listing}: {'changed' if listing.exists() else 'missing'}; promote the version again")
    files = {}
    for name, expected in json.loads(listing.read_text())["files"].items():
        path = folder / name
        if not path.exists():
            raise SchemaError(f"{path}: listed in {CONTENTS}, but missing; promote the version again")
        files[name] = path.read_bytes()
        if sha256(files[name]) != expected["sha256"]:
            raise SchemaError(
                f"{path}: {len(files[name])} bytes that differ from {CONTENTS}; promote the version again"
            )
    return files


def sha256(body: bytes) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(body).hexdigest()
