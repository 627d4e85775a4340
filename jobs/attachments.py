"""What is kept in the registry beside a version's checkpoint, so that MLflow alone answers where it comes from.

The model card, the decision with its page and its policy, and the manifests of everything behind both: the acceptance
report, the states, the responses, the prompts, and the drafter that it was trained from.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import model_card
from jobs.registry import Dataset, metric_name
from pipeline.artifacts import MANIFEST, AcceptanceReport, DrafterCheckpoint, GateDecision
from pipeline.config import Config
from pipeline.stages import Artifact

CARD, FINGERPRINTS = "README.md", "fingerprints.json"
DATA = ("prompts", "responses", "states")
REPLAY = "replay_"
"""Parents of a drafter that are replayed states begin with it."""
_MANIFESTS = "manifests"
_MAX_NAME = 250  # characters in a metric's name


@dataclass(frozen=True)
class Judged:
    """A decision and the report that it rests on."""

    decision: Artifact[GateDecision]
    report: Artifact[AcceptanceReport]


def gather(
    config: Config, version: str, challenger: Artifact[DrafterCheckpoint], judged: Judged | None = None
) -> dict[str, bytes]:
    """Name → body of the files to keep; the same inputs give the same bytes."""
    behind = manifests_behind(config.root, challenger.manifest.parents)
    decision, report = (judged.decision, judged.report) if judged else (None, None)
    card = model_card.render(
        config,
        version,
        challenger,
        behind=behind,
        decision=decision and decision.manifest,
        report=report and report.manifest,
    )
    fingerprint = challenger.manifest.fingerprint
    fingerprints = {
        "target": fingerprint and fingerprint.model_dump(mode="json"),
        "drafter_content": challenger.manifest.content_id,
        "measured_with": report.manifest.settings if report else None,
    }
    files = {CARD: card.encode(), FINGERPRINTS: _json(fingerprints)}
    if decision and report:
        files |= {shard.path: (decision.folder / shard.path).read_bytes() for shard in decision.manifest.shards}
        own = {"kind": decision.manifest.kind, **decision.manifest.model_dump(mode="json")}
        behind |= manifests_behind(config.root, decision.manifest.parents) | {decision.id: own}
    for manifest in behind.values():
        files[f"{_MANIFESTS}/{manifest['kind']}-{manifest['derivation_id']}.json"] = _json(manifest)
    return files


def manifests_behind(root: Path, parents: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Derivation id → manifest of what something was made from, as far as it lies under the root.

    Data is followed to its own parents; the drafter that training started from is not: its version has its own.
    """
    found: dict[str, dict[str, Any]] = {}
    todo = list(parents.values())
    while todo:
        derivation = todo.pop(0)
        for path in sorted(Path(root).glob(f"*/{derivation}/{MANIFEST}")):
            found[derivation] = json.loads(path.read_text())
            if found[derivation]["kind"] != DrafterCheckpoint.kind:
                todo += [parent for parent in found[derivation]["parents"].values() if parent not in found]
    return found


def data_behind(root: Path, parents: Mapping[str, str]) -> dict[str, str]:
    """Kind → derivation id of the prompts, responses and states that a drafter learned from.

    Those of replayed states are named ``replay_1.states`` and so on.
    """
    own = {role: parent for role, parent in parents.items() if not role.startswith(REPLAY)}
    kinds = {manifest["kind"]: derivation for derivation, manifest in manifests_behind(root, own).items()}
    found = {kind: kinds[kind] for kind in DATA if kind in kinds} | {k: v for k, v in own.items() if k in DATA}
    for role in sorted(parents.keys() - own.keys()):
        found |= {f"{role}.{kind}": one for kind, one in data_behind(root, {"states": parents[role]}).items()}
    return found


def datasets_behind(root: Path, parents: Mapping[str, str]) -> list[Dataset]:
    """The data that a drafter learned from, as MLflow shows it beside a run."""
    behind = manifests_behind(root, {role: parent for role, parent in parents.items() if role != "start"})
    datasets = []
    for name, derivation in data_behind(root, parents).items():
        manifest, kind = behind.get(derivation, {}), name.rpartition(".")[2]
        source = str(Path(root) / kind / derivation)
        context = "replay" if name.startswith(REPLAY) else "training"
        datasets.append(Dataset(name, derivation, source, counts=manifest.get("counts", {}), context=context))
    return datasets


def manifests_in(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Derivation id → manifest among files that were kept."""
    kept = [json.loads(body) for name, body in files.items() if name.startswith(f"{_MANIFESTS}/")]
    return {manifest["derivation_id"]: manifest for manifest in kept}


def figures(judged: Judged) -> dict[str, float]:
    """Metric name → figure: every number of decision.json and of what was measured of each role."""
    decision = json.loads((judged.decision.folder / "decision.json").read_text())
    decision |= {name: getattr(judged.decision.manifest, name) for name in ("lift", "ci_low", "ci_high")}
    decision.pop("reasons", None)
    return _numbers({"gate": decision, **judged.report.manifest.measured})


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Finite numbers, under names that MLflow takes: the levels joined by a slash."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{metric_name(str(key))}"[:_MAX_NAME]
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = float(value)
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
