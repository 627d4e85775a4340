"""Lineage, both ways: what a drafter was made from and who promoted it why; which drafters learned from some data.

python jobs/lineage.py --config slipstream.toml 3             of a version, or of a drafter's derivation id
python jobs/lineage.py --config slipstream.toml 3 --prompts   with the row ids that it learned from
python jobs/lineage.py --config slipstream.toml ID            of prompts, responses, states, or one row's id
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import attachments, learned_rows
from jobs.history import nothing_registered, table
from jobs.model_card import counted, figure, lift_of
from jobs.registry import WHY, Registry, Version, chain_of
from jobs.session import job_main
from pipeline.artifacts import AcceptanceReport, GateDecision, TargetFingerprint
from pipeline.config import Config
from pipeline.errors import StageError

_ALIASES = ("champion", "approved", "challenger")
_MAX_VERSION_DIGITS = 9


def run(config: Config, what: str, *, prompts: bool = False) -> list[str]:
    """The lineage in lines. Answered from MLflow alone, but for row ids, which only the data itself holds.

    Raises: StageError when nothing is known under this name; SchemaError when MLflow does not hold what was attached.
    """
    if nothing_registered(config):
        raise StageError(f"{config.root}: nothing registered yet; slipstream init-drafter or adopt begins")
    registry = Registry(config.promote.tracking_uri, config.root)
    versions = {version.derivation: version for version in registry.versions(config.model_name)}
    by_number = {version.number: version for version in versions.values()}
    if (version := by_number.get(what) or versions.get(what)) is not None:
        return _of_version(config, registry, versions, version, prompts=prompts)
    if what.isdigit() and len(what) <= _MAX_VERSION_DIGITS:
        raise StageError(f"{config.model_name}: no version {what} (versions: {', '.join(by_number) or 'none'})")
    if _is_data(config, versions, what):
        learners = _learners(config, registry, versions, lambda one: what in _made_from(one))
        return [f"{what}: learned from by", *learners]
    return _of_row(config, registry, versions, what)


def _of_version(
    config: Config, registry: Registry, versions: Mapping[str, Version], version: Version, *, prompts: bool
) -> list[str]:
    manifests = attachments.manifests_behind(config.root, version.parents)
    files = registry.attached(config.model_name, version.number)
    manifests |= attachments.manifests_in(files)
    lines = [
        f"{config.model_name} version {version.number}",
        *_named(
            ("drafter", f"{version.derivation} ({version.tags.get('slipstream.role')})"),
            ("state", f"{version.state}: {version.tags.get(WHY, 'not judged yet')}"),
            ("aliases", ", ".join(_aliases(registry, config.model_name, version)) or "none"),
            ("target", _target(files, manifests)),
            ("parent", _parents(versions, version)),
        ),
        *_data(version, manifests),
        *_verdict(manifests),
        *_moves(registry, config.model_name, version),
    ]
    return lines + (_prompts(config, version) if prompts else [])


def _data(version: Version, manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for kind in reversed(attachments.DATA):
        if (derivation := version.data.get(kind)) is None:
            rows.append((kind, "none recorded"))
            continue
        manifest = manifests.get(derivation)
        rows.append((kind, f"{derivation}  {counted(manifest) if manifest else 'manifest neither here nor in MLflow'}"))
        for source in (manifest or {}).get("config", {}).get("sources", ()):
            rows.append(("", f"from {source['path'] if isinstance(source, dict) else source}"))
    for name, derivation in version.data.items():
        if name.endswith(".states"):
            manifest = manifests.get(derivation)
            rows.append(("replayed", f"states {derivation}  {counted(manifest) if manifest else ''}".rstrip()))
    return _named(*rows)


def _verdict(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    decisions = [manifest for manifest in manifests.values() if manifest["kind"] == GateDecision.kind]
    reports = [manifest for manifest in manifests.values() if manifest["kind"] == AcceptanceReport.kind]
    lines = []
    for report in reports:
        measured = report["measured"]
        roles = [role for role in ("champion", "challenger", "control") if role in measured]
        steps = [f"{role} {figure(measured[role].get('emitted_tokens_per_step'))}" for role in roles]
        lines += _named(("report", f"{report['derivation_id']}  emitted tokens a step: {', '.join(steps) or '-'}"))
    for body in decisions:
        decision = GateDecision.model_validate({name: value for name, value in body.items() if name != "kind"})
        lines += _named(("decision", f"{decision.derivation_id}  {decision.decision}, {lift_of(decision)}"))
        lines += _named(
            *(("", f"{'FAILED ' if r.get('passed') is False else ''}{r['message']}") for r in decision.reasons)
        )
    return lines or _named(("decision", "none: it was not measured before it served, or it was not promoted yet"))


def _moves(registry: Registry, model: str, version: Version) -> list[str]:
    moves = [move for move in registry.history(model) if version.number in (move.version, move.previous)]
    return _named(
        *(
            (
                "move" if not index else "",
                f"{move.at[:19].replace('T', ' ')}  {move.alias} {move.previous or '-'} → {move.version}, by "
                f"{move.actor}: {move.reason}{f' (decision {move.decision})' if move.decision else ''}",
            )
            for index, move in enumerate(moves)
        )
    )


def _prompts(config: Config, version: Version) -> list[str]:
    lines = []
    for rows in learned_rows.all_of(config.root, version.data):
        if rows is None:
            lines.append(
                f"row ids: some of {', '.join(f'{kind} {id_}' for kind, id_ in version.data.items()) or 'its data'} "
                f"does not lie under {config.root}, and MLflow holds no row ids; run this where the data is (--set "
                "root=...)"
            )
        else:
            lines += [f"learned from {len(rows.ids)} rows (train rows of {rows.kind} {rows.derivation}):", *rows.ids]
    return lines


def _of_row(config: Config, registry: Registry, versions: Mapping[str, Version], row_id: str) -> list[str]:
    found = learned_rows.holding(config.root, row_id)
    if not found:
        raise StageError(
            f"{row_id}: no version, drafter, prompts, responses or states of {config.model_name}, and no row of the "
            f"data under {config.root}. MLflow holds no row ids: look for a row where its data is (--set root=...)"
        )
    lines = [f"row {row_id}", *_named(*((row.kind, f"{row.derivation}  {row.split} set") for row in found))]
    rows = {version.derivation: learned_rows.all_of(config.root, version.data) for version in versions.values()}
    lines += ["learned from by"]
    lines += _learners(
        config, registry, versions, lambda one: any(of and row_id in of.ids for of in rows[one.derivation])
    )
    if absent := [one.number for one in versions.values() if one.data and None in rows[one.derivation]]:
        lines.append(f"not known for version {', '.join(absent)}: their data is not under {config.root}")
    return lines


def _learners(
    config: Config, registry: Registry, versions: Mapping[str, Version], learned: Callable[[Version], object]
) -> list[str]:
    """The versions that learned, themselves or through a drafter that they were trained from."""
    rows = []
    for version in versions.values():
        for steps, ancestor in enumerate(chain_of(versions, version)):
            if learned(ancestor):
                how = "itself" if steps == 0 else f"through version {ancestor.number}, which it was trained from"
                aliases = ", ".join(_aliases(registry, config.model_name, version))
                rows.append((f"  version {version.number}", version.derivation, version.state, how, aliases))
                break
    return table(rows) if rows else ["  no registered version"]


def _is_data(config: Config, versions: Mapping[str, Version], what: str) -> bool:
    known = any(what in _made_from(version) for version in versions.values())
    return known or any((config.root / kind / what).is_dir() for kind in attachments.DATA)


def _made_from(version: Version) -> tuple[str, ...]:
    return (*version.data.values(), *version.parents.values())


def _parents(versions: Mapping[str, Version], version: Version) -> str:
    chain = chain_of(versions, version)
    words = [f"version {one.number} ({one.derivation})" for one in chain[1:]]
    if (start := chain[-1].parents.get("start")) is not None:
        words.append(f"drafter {start}, not registered here")
    return " ← ".join(words) or "none: the first of its line"


def _aliases(registry: Registry, model: str, version: Version) -> list[str]:
    return [alias for alias in _ALIASES if registry.alias(model, alias) == version.number]


def _target(files: Mapping[str, bytes], manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """The drafter's own target, or that of the data that it learned from."""
    own = json.loads(files.get(attachments.FINGERPRINTS, b"{}")).get("target")
    data = (one.get("fingerprint") for one in manifests.values() if one["kind"] in attachments.DATA)
    fingerprint = own or next(filter(None, data), None)
    if fingerprint is None:
        return "not recorded"
    return ", ".join(f"{name} {fingerprint[name]}" for name in TargetFingerprint.model_fields if name in fingerprint)


def _named(*rows: tuple[str, str]) -> list[str]:
    return [f"  {name:<11}{text}" for name, text in rows]


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Print the lineage."""
    print("\n".join(run(config, arguments.what, prompts=arguments.prompts)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of what."""
    parser.add_argument("what", help="a version's number, a drafter's, data's or a row's id")
    parser.add_argument("--prompts", action="store_true", help="also the row ids that a version learned from")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
