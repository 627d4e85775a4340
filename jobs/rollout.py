"""One rollout: begun or gone on with, driven to its end, and what is told of it."""

import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from jobs import preflight, replicas
from jobs.attachments import manifests_in
from jobs.in_charge import Term
from jobs.ledger import Ledger, last_release, next_id
from jobs.registry import PASSED, WHY, Registry
from pipeline.artifacts import AcceptanceReport, DrafterCheckpoint, Release, artifact_dir, find, load, sha256_file
from pipeline.config import Config
from pipeline.errors import SchemaError, StageError, SwapError
from pipeline.stages import open_artifact, set_current
from serving.fleet.controller import Controller, NamingError
from serving.fleet.replicas import Drafter, Seen, look_at_all
from serving.fleet.rollout import FORWARD, Rollout

logger = logging.getLogger("slipstream")

RECONCILE = "reconcile"


def begin(config: Config, registry: Registry, term: Term, version: str, *, reason: str) -> Release:
    """The release of a version, driven to its end; the last one, where nothing is to be done.

    Raises: SwapError when the fleet was put back, or before anything was changed; StageError for a version that did not
    pass the gate, and when another process has taken over; ConfigError or FingerprintError for one that cannot serve
    this target.
    """
    model = config.model_name
    require_passed(registry, model, version)
    folder = registry.download(model, version)
    target = Drafter(version, str(folder), preflight.check(config, folder).sha256)
    previous = registry.settled(model, "champion")
    seen = _first_look(config, max_down=None if reason == RECONCILE else config.deploy.max_failed)
    if (last := _last_if_done(config, target, previous, seen.values())) is not None:
        return last
    release = Release(
        derivation_id=next_id(config.root, version),
        parents={"drafter": load(folder, DrafterCheckpoint).derivation_id},
        version=version,
        previous=previous,
        reason=reason,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        phase="canary",
        target=target.as_dict(),
    )
    # Who aborts a reconciliation wants each replica to serve what it came up with.
    base = None if reason == RECONCILE else _base(registry, model, previous)
    rollout = Rollout(target, base, promise=_promise(registry, model, version))
    return _drive(config, Ledger(config.root, release, term), rollout)


def go_on(config: Config, term: Term, begun: Release, *, aborted_is_well: bool = False) -> Release:
    """A release that its controller left unfinished, driven to its end. ``aborted_is_well``: also to an aborted one.

    Meanwhile its version may have been withdrawn: then the fleet goes back. Raises: as ``begin``.
    """
    logger.info("deploy: going on with release %s (%s, %s)", begun.derivation_id, begun.reason, begun.phase)
    ledger = Ledger(config.root, begun, term)
    rollout = ledger.rollout
    if rollout.phase in FORWARD and not ledger.orders().aborted:
        try:
            require_passed(Registry(config.promote.tracking_uri, config.root), config.model_name, begun.version)
        except StageError as error:
            logger.warning("deploy: going back: %s", error)
            rollout = rollout.reverting(str(error))
        else:
            preflight.check(config, Path(begun.target["folder"]))
    return _drive(config, ledger, rollout, aborted_is_well=aborted_is_well)


def make_way(config: Config, term: Term, begun: Release, what: str) -> None:
    """End a reconciliation that its controller left unfinished: what comes now looks at every replica anyway."""
    ledger = Ledger(config.root, begun, term)
    ledger.save(replace(ledger.rollout, phase="stopped", why=f"made way for a {what}"))


def require_passed(registry: Registry, model: str, version: str) -> None:
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


def _drive(config: Config, ledger: Ledger, rollout: Rollout, *, aborted_is_well: bool = False) -> Release:
    begun, size = ledger.release, max(len(rollout.replicas), len(replicas.listed(config)))
    registry = Registry(config.promote.tracking_uri, config.root)

    def name() -> None:
        moved = {"expected": begun.previous, "reason": begun.reason}
        try:
            registry.set_alias(config.model_name, "champion", begun.version, **moved)
        except StageError as error:
            raise NamingError(str(error))
        remember_champion(config, begun)  # in this step, so that whoever goes on does it too

    policy = replicas.policy(config, size, reconciles=begun.reason == RECONCILE)
    ended = Controller(replicas.fleet(config), ledger, policy=policy, name=name).run(rollout)
    if ended.phase == "reverted" and aborted_is_well and ledger.orders().aborted:
        return ledger.release
    if ended.phase != "converged":
        raise SwapError(_gone_back(ended, begun.previous))
    missed = [record for record in ended.replicas if record.state != "serving" or record.down_since is not None]
    if missed and begun.reason == RECONCILE:
        told = "; ".join(record.why or record.name for record in missed)
        raise SwapError(f"{told}. These do not serve version {begun.version}; the others do")
    for record in missed:
        logger.warning("deploy: %s does not serve version %s: %s", record.name, begun.version, record.why)
    return ledger.release


def _first_look(config: Config, *, max_down: int | None) -> dict[str, Seen]:
    """What every replica serves. Raises: SwapError when too many don't answer, before anything is changed."""
    addresses = replicas.listed(config)
    seen = look_at_all(addresses, replicas.token(config))
    ready = {address.name: address for address in addresses if address.ready}
    down = [seen[name].why for name in ready if not seen[name].is_up]
    if any("token" in why for why in down):
        raise SwapError(f"{'; '.join(down)}; is {config.serving.token_env} the replica's token?")
    if max_down is not None and len(down) > max_down:
        raise SwapError(
            f"{'; '.join(down)}. {len(down)} of {len(addresses)} replicas don't serve, so nothing was changed; "
            f"deploy.max_failed = {config.deploy.max_failed} says how many may be left out"
        )
    return seen


def _last_if_done(config: Config, target: Drafter, previous: str | None, seen: Iterable[Seen]) -> Release | None:
    """The last release, where it is what is asked for and every replica serves it."""
    last = last_release(config.root)
    if last is None or (last.version, last.phase, previous) != (target.version, "converged", target.version):
        return None
    if not all(target.same_as(one.drafter) for one in seen):
        return None
    logger.info("deploy: version %s serves on every replica already", target.version)
    return last


def _gone_back(ended: Rollout, previous: str | None) -> str:
    """What became of a fleet that was put back."""
    notes = [
        f"{record.name}: COULD NOT BE PUT BACK ({record.why}); take it out and restart it"
        for record in ended.replicas
        if record.state == "failed" or record.down_since is not None
    ]
    back = f"version {ended.base.version}" if ended.base else "what they served before"
    told = "; ".join(notes) or f"Every replica serves {back}"
    return f"{ended.why}. {told}. Champion is still version {previous}"


def _base(registry: Registry, model: str, previous: str | None) -> Drafter | None:
    """What every replica is put back to; None, each to what it served, where the champion can't be had any more."""
    if previous is None:
        return None
    try:
        return drafter_of(registry, model, previous)
    except (SchemaError, StageError) as error:
        logger.warning("deploy: the champion can't be fetched (%s); a replica is put back to what it served", error)
        return None


def drafter_of(registry: Registry, model: str, version: str) -> Drafter:
    """A version as replicas serve it. Raises: SchemaError or StageError where the registry can't give it back."""
    folder = registry.download(model, version)
    return Drafter(version, str(folder), sha256_file(folder / "model.safetensors"))


def _promise(registry: Registry, model: str, version: str) -> float | None:
    """The acceptance length that the gate measured of a version; None where no report is kept with it."""
    derivation = registry.derivation(model, version)
    try:
        kept = manifests_in(registry.attached(model, version)).values()
    except (SchemaError, StageError) as error:
        logger.warning("deploy: what the gate measured of version %s can't be read (%s)", version, error)
        return None
    for report in kept:
        if report["kind"] == AcceptanceReport.kind and report["parents"].get("challenger") == derivation:
            return report["measured"].get("challenger", {}).get("served_acceptance_length")
    return None
