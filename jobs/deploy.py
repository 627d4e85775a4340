"""Deploy: an approved version onto every replica, verified or put back; then the alias `champion`.

python jobs/deploy.py --config slipstream.toml              the approved version, or what a killed deploy was at
python jobs/deploy.py --config slipstream.toml 2            a version by its number
python jobs/deploy.py --config slipstream.toml --rollback   the champion before
python jobs/deploy.py --config slipstream.toml --reconcile  the champion, onto replicas that serve something else
python jobs/deploy.py --config slipstream.toml --pause      also --resume, --abort: to the deploy that is under way
"""

import argparse
import logging
import os
import shutil
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import replicas
from jobs.in_charge import in_charge, who_is_in_charge
from jobs.ledger import give_order, unfinished
from jobs.registry import PASSED, WHY, Registry
from jobs.rollout import RECONCILE, begin, drafter_of, go_on
from jobs.session import job_main
from pipeline import lease
from pipeline.artifacts import DrafterCheckpoint, Release, artifact_dir, find
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError
from pipeline.stages import open_artifact, set_current
from serving.fleet.replicas import look_at_all

logger = logging.getLogger("slipstream")


def run(config: Config, version: str | None = None) -> Release:
    """The release of a version (None: the approved one) on every replica, canary replica first.

    A deploy that was interrupted is gone on with first. Replicas that serve the version already are left alone.

    Raises: StageError when there is no version that may be deployed, or another process is in charge; SwapError when a
    replica did not take it, or the canary replica's soak failed: the fleet serves then what it served before, and
    ``champion`` stays.
    """
    with in_charge(config.root, "deploy") as term:
        if (begun := unfinished(config.root)) is not None:
            if version not in (None, begun.version):
                raise StageError(_under_way(begun, f"version {version} can be deployed after that"))
            release = go_on(config, term, begun)
            if version is not None or release.reason != "deploy":
                return release
        registry = Registry(config.promote.tracking_uri, config.root)
        version = _approved(registry, config.model_name) if version is None else version
        _require_passed(registry, config.model_name, version)
        return begin(config, registry, term, version, reason="deploy")


def rollback(config: Config) -> Release:
    """The release of the champion before the present one; again, the one before that.

    Raises: StageError when there was none, or a deploy is under way: that one is aborted instead.
    """
    with in_charge(config.root, "rollback") as term:
        if (begun := unfinished(config.root)) is not None:
            if begun.reason == "rollback":
                return go_on(config, term, begun)
            raise StageError(_under_way(begun, f"`slipstream deploy --abort` serves version {begun.previous} again"))
        registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
        champions = _champions(registry, model)
        if len(champions) < 2:
            raise StageError(
                f"{model}: no earlier champion to go back to (champions so far: {', '.join(champions) or 'none'}); "
                "`slipstream deploy N` serves a version by its number"
            )
        _require_passed(registry, model, champions[-2])
        return begin(config, registry, term, champions[-2], reason="rollback")


def reconcile(config: Config) -> Release | None:
    """The release by which replicas that came up with something else got the champion; None where none had.

    A deploy that was interrupted is gone on with instead. Raises: StageError when there is no champion, or another
    process is in charge; SwapError naming the replicas that are down or did not take it.
    """
    with in_charge(config.root, RECONCILE) as term:
        if (begun := unfinished(config.root)) is not None:
            return go_on(config, term, begun)
        registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
        champion = registry.settled(model, "champion")
        if champion is None:
            raise StageError(f"{model}: no champion yet, so there is nothing that replicas should serve")
        served = drafter_of(registry, model, champion)
        seen = look_at_all(replicas.listed(config), replicas.token(config))
        if all(served.same_as(one.drafter) for one in seen.values()):
            return None
        return begin(config, registry, term, champion, reason=RECONCILE)


def pause(config: Config) -> Release:
    """The release under way, which begins no further step. Raises: StageError where none is."""
    return give_order(config.root, "pause")


def resume(config: Config) -> Release:
    """The release under way, no longer paused; gone on with here where nobody is in charge. Raises: as ``run``."""
    begun = give_order(config.root, "resume")
    return _take_over(config, begun)


def abort(config: Config) -> Release:
    """The release under way, of which every replica is put back; here where nobody is in charge.

    Raises: StageError where none is under way; SwapError when not every replica could be put back.
    """
    return _take_over(config, give_order(config.root, "abort"))


def _take_over(config: Config, begun: Release) -> Release:
    if (owner := who_is_in_charge(config.root)) is not None:
        logger.info("%s; it was asked", owner)
        return begun
    with in_charge(config.root, "deploy") as term:
        now = unfinished(config.root)
        return begun if now is None else go_on(config, term, now, aborted_is_well=True)


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


def _under_way(begun: Release, then: str) -> str:
    return (
        f"release {begun.derivation_id} ({begun.reason} of version {begun.version}) is not finished: `slipstream "
        f"{'rollback' if begun.reason == 'rollback' else 'deploy'}` goes on with it; {then}"
    )


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Deploy, roll back, reconcile, or reach the deploy under way; and say what serves now."""
    asked = [name for name in ("rollback", *ORDERS) if getattr(arguments, name)]
    if len(asked) + (arguments.version is not None) > 1:
        given = [*([arguments.version] if arguments.version else []), *(f"--{name}" for name in asked)]
        raise ConfigError(f"give a version or one of --rollback, --reconcile, --pause, --resume, --abort: {given}")
    if asked in (["pause"], ["resume"], ["abort"]):
        release = {"pause": pause, "resume": resume, "abort": abort}[asked[0]](config)
        if release.ended is None:
            print(f"release {release.derivation_id}: asked to {asked[0]}; `slipstream status` shows how far it is")
            return
    elif asked == ["reconcile"]:
        release = reconcile(config)
        if release is None:
            print("every replica serves the champion")
            return
    elif asked:
        release = rollback(config)
    else:
        with lease.kept(config.root, seconds=60 * config.retrain.lease_minutes):
            release = run(config, arguments.version)
    if release.phase != "converged":
        print(f"release {release.derivation_id} was put back, version {release.previous} serves: {release.why}")
        return
    remember_champion(config, release)
    serving = sum(one["state"] == "serving" for one in release.replicas)
    print(f"version {release.version} serves on {serving} replica(s), champion (was {release.previous})")


ORDERS = ("reconcile", "pause", "resume", "abort")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A version, the way back, or an order."""
    parser.add_argument("version", nargs="?", help="version number; without it, the approved one")
    parser.add_argument("--rollback", action="store_true", help="serve the champion before the present one again")
    parser.add_argument("--reconcile", action="store_true", help="the champion, onto replicas that serve another")
    parser.add_argument("--pause", action="store_true", help="the deploy under way begins no further step")
    parser.add_argument("--resume", action="store_true", help="it goes on; here, where its process is gone")
    parser.add_argument("--abort", action="store_true", help="every replica is put back; here, where it is gone")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
