"""Promote: GateDecision → MLflow version, and the alias `approved` when the gate let it through.

python jobs/promote.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/promote.py --config slipstream.toml
"""

import argparse
import logging
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import preflight
from jobs.registry import Registry
from jobs.session import job_main
from pipeline.artifacts import AcceptanceReport, DrafterCheckpoint, GateDecision, verify
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.stages import Artifact, current, open_artifact

logger = logging.getLogger("slipstream")

PROMOTE = "promote"
_ATTACHED = ("decision.json", "report.html")


def run(config: Config, decision: Artifact[GateDecision], challenger: Artifact[DrafterCheckpoint]) -> str:
    """The challenger's version: registered with the verdict beside it and, on a pass, `approved`.

    Every challenger is kept, with the alias `challenger` while it is the newest; `approved` moves only when
    the files came back from the registry as they were sent.

    Raises: StageError with the gate's reasons when it did not let the challenger through, or when the
    verdict is about other drafters than this challenger and the present champion.
    """
    verify(decision.folder, decision.manifest)
    report = _report_on(config, decision, challenger)
    registry, model = Registry(config.promote.tracking_uri, config.root), config.model_name
    version = registry.register(model, challenger)
    registry.set_alias(model, "challenger", version, reason=f"decision {decision.id}")
    registry.attach(model, version, [decision.folder / name for name in _ATTACHED], folder=f"gate/{decision.id}")
    registry.tag(model, version, "slipstream.decision", f"{decision.manifest.decision} {decision.id}")
    if decision.manifest.decision != PROMOTE:
        raise StageError(
            f"{model} version {version} is not approved, the gate says {decision.manifest.decision}:\n"
            + "\n".join(f"  {r['message']}" for r in decision.manifest.reasons if r["passed"] is False)
            + f"\nSee {decision.folder / 'report.html'}"
        )
    _require_present_champion(registry, model, report, version)
    preflight.check(config, registry.download(model, version))
    registry.set_alias(model, "approved", version, reason=f"decision {decision.id}")
    return version


def _report_on(
    config: Config, decision: Artifact[GateDecision], challenger: Artifact[DrafterCheckpoint]
) -> AcceptanceReport:
    report = open_artifact(config.root, AcceptanceReport, decision.manifest.parents["report"]).manifest
    if (judged := report.parents.get("challenger")) != challenger.id:
        raise StageError(
            f"decision {decision.id} is about challenger {judged}, not {challenger.id}; "
            "run evaluate and the gate on this challenger first"
        )
    return report


def _require_present_champion(registry: Registry, model: str, report: AcceptanceReport, version: str) -> None:
    """A verdict holds against the champion it was measured with. Once deployed, the challenger is the champion."""
    champion = registry.alias(model, "champion")
    if champion is None:
        raise StageError(
            f"{model}: no champion in MLflow, so there is nothing that version {version} was better than; "
            "register what the fleet serves with `slipstream adopt FOLDER`, then promote again"
        )
    present = registry.derivation(model, champion)
    if champion != version and present != report.parents.get("champion"):
        raise StageError(
            f"{model}: the gate compared with champion {report.parents.get('champion')}, but version {champion} "
            f"({present}) is champion now; evaluate against it, then promote again"
        )


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Promote the current challenger by the current decision."""
    decision = current(config.root, "decision", GateDecision)
    version = run(config, decision, current(config.root, "challenger", DrafterCheckpoint))
    print(f"{config.model_name} version {version} is approved; `slipstream deploy` serves it")


if __name__ == "__main__":
    job_main(__doc__, main, needs_ray=False)
