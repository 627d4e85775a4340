"""Deploy: an approved version onto every replica, verified or put back; then the alias `champion`.

python jobs/deploy.py --config slipstream.toml             the approved version
python jobs/deploy.py --config slipstream.toml 2           a version by its number
python jobs/deploy.py --config slipstream.toml --rollback  the champion before
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import preflight
from jobs.registry import PASSED, WHY, Registry
from jobs.session import job_main
from pipeline.artifacts import DrafterCheckpoint, Release, artifact_dir, commit, find, load
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError, SwapError
from pipeline.stages import exclusive, open_artifact, set_current
from serving.deploy import SwapOutcome, status, swap_replica
from serving.errors import DeployError

logger = logging.getLogger("slipstream")

# Greedy, one at a time, before and after: they prove that the replica drafts and that its answers stay the same.
PROBE = tuple(
    {"messages": [{"role": "user", "content": text}], "max_tokens": 16}
    for text in (
        "Write one sentence about the sea.",
        "List the days of the week.",
        "Explain in two sentences why bread rises.",
    )
)


def run(config: Config, version: str | None = None) -> Release:
    """The release of a version (None: the approved one) on every replica of ``serving.replicas``.

    Replicas that serve it already are left alone, so an interrupted deploy is finished by the next one.

    Raises: StageError when there is no version that may be deployed; SwapError when a replica did not take
    it: every replica serves then what it served before, and ``champion`` stays.
    """
    registry = Registry(config.promote.tracking_uri, config.root)
    version = _approved(registry, config.model_name) if version is None else version
    return _deploy(config, registry, version, reason="deploy")


def rollback(config: Config) -> Release:
    """The release of the champion before the present one; again, the one before that.

    Raises: StageError when there was none.
    """
    registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
    champions = _champions(registry, model)
    if len(champions) < 2:
        raise StageError(
            f"{model}: no earlier champion to go back to (champions so far: {', '.join(champions) or 'none'}); "
            "`slipstream deploy N` serves a version by its number"
        )
    return _deploy(config, registry, champions[-2], reason="rollback")


def _deploy(config: Config, registry: Registry, version: str, *, reason: str) -> Release:
    model, token = config.model_name, _token(config)
    with exclusive(config.root / Release.kind, "deploy"):
        _require_passed(registry, model, version)
        folder = registry.download(model, version)
        sha256 = preflight.check(config, folder).sha256
        previous = registry.settled(model, "champion")
        before = {url: _status(config, url, token) for url in config.serving.replicas}
        swaps: list[SwapOutcome] = []
        try:
            for url, now in before.items():
                if not _serves(now, version, sha256):
                    swaps.append(_swap(config, url, token, folder, version, sha256, now["version"]))
            after = {url: _status(config, url, token) for url in before}
            if behind := [url for url, now in after.items() if not _serves(now, version, sha256)]:
                raise SwapError(f"{', '.join(behind)}: no longer serving version {version}; restarted meanwhile?")
            registry.set_alias(model, "champion", version, expected=previous, reason=reason)
        except (DeployError, StageError, SwapError) as error:
            raise SwapError(f"{error}. {_put_back(config, token, swaps)}. Champion is still version {previous}")
        return _record(config, folder, version, previous=previous, reason=reason, swaps=swaps, after=after)


def _serves(now: Mapping[str, Any], version: str, sha256: str) -> bool:
    return (now["version"], now["sha256"]) == (version, sha256)


def _swap(config: Config, url: str, token: str, folder: Path, version: str, sha256: str, expected: str) -> SwapOutcome:
    outcome = swap_replica(
        url,
        token,
        folder=folder,
        version=version,
        sha256=sha256,
        expected_version=expected,
        probe=PROBE,
        # In half precision near-ties move with the batch shape, between two plain runs too.
        allow_changed_outputs=config.target.dtype != "float32",
    )
    logger.info("deploy: %s serves version %s, paused %.2f s", url, version, outcome.pause_s)
    return outcome


def _put_back(config: Config, token: str, swaps: Sequence[SwapOutcome]) -> str:
    """What was done with the replicas that had swapped before another one failed."""
    notes = []
    for swap in reversed(swaps):
        try:
            old = (Path(swap.previous_folder), swap.previous, swap.previous_sha256)
            _swap(config, swap.url, token, *old, swap.version)
            notes.append(f"{swap.url}: version {swap.previous} serves again")
        except DeployError as error:
            notes.append(f"{swap.url}: COULD NOT BE PUT BACK ({error}); take it out and restart it")
    return "; ".join(notes) or "No other replica had been swapped"


def _record(
    config: Config,
    folder: Path,
    version: str,
    *,
    previous: str | None,
    reason: str,
    swaps: Sequence[SwapOutcome],
    after: dict[str, dict[str, Any]],
) -> Release:
    """The release, written; an event, so it is numbered, where other artifacts are named by what they came from."""
    releases = sorted(artifact_dir(config.root, Release, "").glob("*/"))
    last = find(releases[-1], Release) if releases else None
    if last is not None and last.version == previous == version and not swaps:
        logger.info("deploy: version %s serves on every replica already", version)
        return last
    swapped = {swap.url: swap.as_dict() for swap in swaps}
    unchanged = {"pause_s": 0.0, "changed_outputs": 0}
    release = Release(
        derivation_id=f"{len(releases) + 1:06d}-v{version}",
        parents={"drafter": load(folder, DrafterCheckpoint).derivation_id},
        version=version,
        previous=previous,
        reason=reason,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        replicas=[
            {"url": url, "live_fingerprint": now["live_fingerprint"][0], **unchanged, **swapped.get(url, {})}
            for url, now in after.items()
        ],
    )
    commit(artifact_dir(config.root, Release, release.derivation_id), release)
    return release


def remember_champion(config: Config, release: Release) -> None:
    """Make the released drafter the ``champion`` that the next round trains from."""
    derivation = release.parents["drafter"]
    folder = artifact_dir(config.root, DrafterCheckpoint, derivation)
    if find(folder, DrafterCheckpoint) is None:  # trained under another root: take the verified copy
        copy = folder.with_name(f".{derivation}.{os.getpid()}.tmp")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(config.root / "versions" / config.model_name / release.version, copy)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(copy, folder)
    set_current(config.root, "champion", open_artifact(config.root, DrafterCheckpoint, derivation))


def _approved(registry: Registry, model: str) -> str:
    version = registry.alias(model, "approved")
    if version is None:
        raise StageError(f"{model}: no approved version; `slipstream promote` approves one that the gate let through")
    moves = registry.history(model, "champion")
    if moves and moves[-1].reason == "rollback" and moves[-1].previous == version:
        raise StageError(
            f"{model}: the approved version {version} was rolled back at {moves[-1].at} and is not deployed again "
            f"by itself; `slipstream deploy {version}` does so"
        )
    return version


def _champions(registry: Registry, model: str) -> list[str]:
    """What has been champion, oldest first, as a stack: a rollback takes away what it left."""
    stack: list[str] = []
    for move in registry.history(model, "champion"):
        if move.reason == "rollback" and move.version in stack:
            del stack[len(stack) - stack[::-1].index(move.version) :]
        else:
            stack.append(move.version)
    return stack


def _require_passed(registry: Registry, model: str, version: str) -> None:
    """Raises: StageError for a version that was not let through, or whose last verdict withdrew it."""
    passed = {move.version for move in registry.history(model) if move.alias in ("approved", "champion")}
    if version not in passed:
        raise StageError(
            f"{model}: version {version} never was approved or champion, so the gate did not let it through "
            f"(these may be deployed: {', '.join(sorted(passed, key=int)) or 'none'})"
        )
    if (state := registry.state(model, version)) != PASSED:
        why = registry.tags(model, version).get(WHY)
        raise StageError(f"{model}: version {version} is {state} now ({why}); measure it again, then promote it")


def _token(config: Config) -> str:
    if not config.serving.replicas:
        raise ConfigError(
            "serving.replicas is empty, so there is nothing to deploy to; list the base URLs of the vLLM servers, "
            "e.g. --set 'serving.replicas=[\"http://127.0.0.1:8000\"]'"
        )
    token = os.environ.get(config.serving.token_env, "")
    if not token:
        raise ConfigError(
            f"{config.serving.token_env} is not set; export the token that the replicas were started with "
            "(their SLIPSTREAM_CONTROL_TOKEN)"
        )
    return token


def _status(config: Config, url: str, token: str) -> dict[str, Any]:
    try:
        return status(url, token)
    except DeployError as error:
        hint = f"; is {config.serving.token_env} the replica's token?" if "token" in str(error) else ""
        raise SwapError(f"{error}{hint}")


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Deploy or roll back, and say what serves now."""
    if arguments.rollback and arguments.version:
        raise ConfigError(f"give a version ({arguments.version}) or --rollback, not both")
    release = rollback(config) if arguments.rollback else run(config, arguments.version)
    remember_champion(config, release)
    print(f"version {release.version} serves on {len(release.replicas)} replica(s), champion (was {release.previous})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A version, or the way back."""
    parser.add_argument("version", nargs="?", help="version number; without it, the approved one")
    parser.add_argument("--rollback", action="store_true", help="serve the champion before the present one again")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
