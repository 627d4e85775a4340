"""Promote: GateDecision → MLflow version with its attachments, and the alias `approved` when the gate let it through.

python jobs/promote.py --config slipstream.toml
python jobs/promote.py --config slipstream.toml --instead-of 2   give up version 2, which is approved and not deployed
ray job submit --working-dir . -- python jobs/promote.py --config slipstream.toml
"""

import argparse
import logging
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import attachments, preflight
from jobs.attachments import Judged
from jobs.model_card import lift_of
from jobs.registry import FAILED, PASSED, PENDING, AliasMoved, Registry, data_tags
from jobs.session import job_main
from jobs.speed_report import speed_of
from pipeline import gate, lease
from pipeline.artifacts import AcceptanceReport, DrafterCheckpoint, GateDecision, verify
from pipeline.config import Config
from pipeline.errors import ConfigError, Declined, SchemaError, StageError
from pipeline.stages import Artifact, current, open_artifact, set_current

logger = logging.getLogger("slipstream")

PROMOTE = "promote"
LIFT = "slipstream.lift"


def run(
    config: Config,
    decision: Artifact[GateDecision],
    challenger: Artifact[DrafterCheckpoint],
    *,
    instead_of: str | None = None,
) -> str:
    """The challenger's version: registered with its attachments and, on a pass, `approved`.

    Every challenger is kept. No alias names it before its files came back from the registry as they were sent, in a
    clean download, and could serve the target. ``approved`` is moved as ``_approve`` says. A run that was
    interrupted is finished by the next.

    Raises: Declined with the gate's reasons when it did not let the challenger through; StageError when the verdict is
    about other drafters than this challenger and what fleets serve or are about to.
    """
    verify(decision.folder, decision.manifest)
    judged = Judged(decision, _report_on(config, decision, challenger))
    registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
    data = attachments.data_behind(config.root, challenger.manifest.parents)
    version = registry.register(model, challenger, tags=data_tags(data))
    _keep(config, registry, version, challenger, judged)
    registry.set_alias(model, "challenger", version, reason="measured", decision=decision.id)
    if decision.manifest.decision != PROMOTE:
        _withdraw(registry, model, version, FAILED, reason=f"decision {decision.id} is {decision.manifest.decision}")
        raise Declined(
            f"{model} version {version} is not approved, the gate says {decision.manifest.decision}:\n"
            + "\n".join(f"  {r['message']}" for r in decision.manifest.reasons if r["passed"] is False)
            + f"\nSee {decision.folder / 'report.html'}"
        )
    _approve(registry, model, version, judged, instead_of=instead_of)
    return version


def _report_on(
    config: Config, decision: Artifact[GateDecision], challenger: Artifact[DrafterCheckpoint]
) -> Artifact[AcceptanceReport]:
    report = open_artifact(config.root, AcceptanceReport, decision.manifest.parents["report"])
    if (about := report.manifest.parents.get("challenger")) != challenger.id:
        raise StageError(
            f"decision {decision.id} is about challenger {about}, not {challenger.id}; "
            "run evaluate and the gate on this challenger first"
        )
    return report


def _keep(
    config: Config, registry: Registry, version: str, challenger: Artifact[DrafterCheckpoint], judged: Judged
) -> None:
    """Store the attachments and the figures, and check all that the registry holds. Raises when any of it differs."""
    model, decision = config.model_name, judged.decision
    files = attachments.gather(config, version, challenger, judged)
    registry.attach(model, version, files, folder=f"attached/{decision.id}")
    registry.log_figures(model, version, attachments.figures(judged))
    registry.tag(model, version, "slipstream.decision", f"{decision.manifest.decision} {decision.id}")
    registry.tag(model, version, LIFT, lift_of(decision.manifest))
    try:
        preflight.check(config, registry.download(model, version, anew=True))
    except (ConfigError, SchemaError) as error:
        _withdraw(registry, model, version, FAILED, reason=str(error))
        raise


def _withdraw(registry: Registry, model: str, version: str, state: str, *, reason: str) -> None:
    """Mark a version as not passed. One that was champion has served, and a rollback may need it: it stays passed."""
    if all(move.version != version for move in registry.history(model, "champion")):
        registry.set_state(model, version, state, reason=reason)


def _approve(registry: Registry, model: str, version: str, judged: Judged, *, instead_of: str | None) -> None:
    """Move `approved` to a version, if its verdict still says something about what fleets serve.

    The rule: the champion is the one that it was measured against, and no other version is approved and waits to be
    deployed. A waiting one was measured against the same champion; nobody knows which of the two is better. Both
    are conditions of the move itself, so that of two promoters at once one wins, whatever the order of their steps.
    A verdict approves once. A version that is champion already, or approved already, stays what it is.

    Raises: AliasMoved with what was measured of both, for the promoter that has to measure again.
    """
    champion = _measured_champion(registry, model, version, judged)
    if champion == version:
        return
    decision, approved = judged.decision.id, registry.settled(model, "approved")
    if approved != version:
        _require_unused(registry, model, decision)
        if approved != instead_of and _waits(registry, model, approved):
            raise AliasMoved(_measure_again(registry, model, version, judged))
    reason = f"instead of version {instead_of}" if instead_of and approved == instead_of else "gate passed"
    registry.set_state(model, version, PASSED, reason=f"decision {decision} is {PROMOTE}")
    conditions = {"expected": approved, "given": {"champion": champion}}
    try:
        registry.set_alias(model, "approved", version, **conditions, reason=reason, decision=decision)
    except AliasMoved as moved:
        if registry.settled(model, "approved") == version:
            return  # the same promotion, run twice at once: the other one did it
        _withdraw(registry, model, version, PENDING, reason=f"decision {decision} came too late")
        _measured_champion(registry, model, version, judged)  # says so where it was the champion that moved
        raise AliasMoved(_measure_again(registry, model, version, judged)) from moved


def _require_unused(registry: Registry, model: str, decision: str) -> None:
    for move in registry.history(model, "approved"):
        if move.decision == decision:
            raise StageError(
                f"{model}: decision {decision} approved version {move.version} at {move.at} already, and another took "
                "its place since; a verdict approves once, measure again (`slipstream evaluate`)"
            )


def _measured_champion(registry: Registry, model: str, version: str, judged: Judged) -> str:
    """The champion's version, which the verdict is about. Once deployed, the challenger is the champion."""
    champion = registry.settled(model, "champion")
    if champion is None:
        raise StageError(
            f"{model}: no champion in MLflow, so there is nothing that version {version} was better than; "
            "register what the fleet serves with `slipstream adopt FOLDER`, then promote again"
        )
    present, measured = registry.derivation(model, champion), judged.report.manifest.parents.get("champion")
    if champion != version and present != measured:
        raise AliasMoved(
            f"{model}: the gate compared with champion {measured} ({lift_of(judged.decision.manifest)}), but version "
            f"{champion} ({present}) is champion now; measure version {version} against it (`slipstream evaluate`), "
            "then promote again"
        )
    return champion


def _waits(registry: Registry, model: str, approved: str | None) -> bool:
    """Whether an approved version has not been champion since it was approved (deployed, or rolled back since)."""
    for move in reversed(registry.history(model)):
        if move.version == approved and move.alias in ("approved", "champion"):
            return move.alias == "approved"
    return approved is not None


def _measure_again(registry: Registry, model: str, version: str, judged: Judged) -> str:
    last = registry.history(model, "approved")[-1]
    theirs = registry.tags(model, last.version).get(LIFT, "lift unknown")
    return (
        f"{model}: version {last.version} was approved by {last.actor} at {last.at} and waits to be deployed: "
        f"{theirs}, version {version}: {lift_of(judged.decision.manifest)}, both over champion "
        f"{judged.report.manifest.parents.get('champion')}, so neither is known to be better than the other. "
        f"Deploy version {last.version} and measure version {version} again, against it (`slipstream evaluate`); or "
        f"give it up with `slipstream promote --instead-of {last.version}`"
    )


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Judge the current report by the configured policy, which costs seconds, and promote the challenger by that."""
    with lease.kept(config.root, seconds=60 * config.retrain.lease_minutes):
        challenger = current(config.root, "challenger", DrafterCheckpoint)
        speed = speed_of(config, challenger)
        decision = gate.run(config, current(config.root, "report", AcceptanceReport), speed=speed)
        set_current(config.root, "decision", decision)
        version = run(config, decision, challenger, instead_of=arguments.instead_of)
    print(f"{config.model_name} version {version} is approved; `slipstream deploy` serves it")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An approved version to give up."""
    parser.add_argument("--instead-of", metavar="N", help="give up version N, which is approved and not deployed")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
