"""The model card of a drafter version: what it is, what it learned from, what it was measured at, how to serve it.

For people who find a version in the registry. It names ids, counts and hashes, never a prompt's text.
"""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.artifacts import AcceptanceReport, DrafterCheckpoint, GateDecision
from pipeline.config import Config
from pipeline.stages import Artifact

Manifests = Mapping[str, Mapping[str, Any]]
"""Derivation id → manifest of the data behind a drafter, and of the drafter it was trained from."""


def render(
    config: Config,
    version: str,
    challenger: Artifact[DrafterCheckpoint],
    *,
    behind: Manifests,
    decision: GateDecision | None,
    report: AcceptanceReport | None,
) -> str:
    """The card as Markdown; the same inputs give the same text."""
    parts = [
        f"# {config.model_name}, version {version}",
        f"A DFlash drafter for `{config.target.model.name}`, tuned to the workload `{config.workload}`. It changes how "
        "fast the target answers, never what it answers.",
        _what(challenger.manifest),
        _learned_from(challenger.manifest, behind),
        *_trained(challenger.manifest),
        _measured(decision, report),
        _serving(config, version, challenger.manifest),
    ]
    return "\n\n".join(parts) + "\n"


def _what(drafter: DrafterCheckpoint) -> str:
    target = drafter.fingerprint
    layers = list(target.target_layer_ids) if target else "not recorded"
    rows = [
        ("drafter", f"`{drafter.derivation_id}`, trained as {drafter.role}"),
        ("content", f"`{drafter.content_id}`"),
        ("block size", f"{drafter.block_size} ({drafter.block_size - 1} drafted tokens a step)"),
        ("target layers", f"{layers} (0-based, outputs)"),
        ("mask token", str(drafter.mask_token_id)),
    ]
    if target:
        hashes = target.model_dump(exclude={"target_layer_ids", "dtype"})
        rows += [("target dtype", target.dtype), *((f"target {name}", f"`{value}`") for name, value in hashes.items())]
    return _table("What it is", ("", ""), rows)


def _learned_from(drafter: DrafterCheckpoint, behind: Manifests) -> str:
    start = drafter.parents.get("start")
    rows = [
        (str(manifest["kind"]), f"`{derivation}`", counted(manifest))
        for derivation, manifest in behind.items()
        if manifest["kind"] != DrafterCheckpoint.kind
    ]
    parent = f"Trained from drafter `{start}`." if start else "Not trained from another drafter."
    if not rows:
        known = ", ".join(f"{role} `{parent}`" for role, parent in drafter.parents.items()) or "none"
        return f"## Learned from\n\nNo data manifests were at hand (parents: {known}). {parent}"
    return f"{_table('Learned from', ('kind', 'id', 'counts'), rows)}\n\n{parent}"


def _trained(drafter: DrafterCheckpoint) -> list[str]:
    """How it was trained; nothing for one that was taken over."""
    if not drafter.walk:
        return []
    settings, counts, walk = drafter.config, drafter.counts, drafter.walk
    since = sum(point["step"] > walk["step"] for point in drafter.curve)
    has_stalled = settings["patience"] is not None and since >= settings["patience"]
    early = f" of {settings['steps']}, stopped early" if has_stalled and counts["steps"] < settings["steps"] else ""
    replayed = [parent for role, parent in drafter.parents.items() if role.startswith("replay_")]
    replay = f"{settings['replay_share']:.0%} of each step's rows, of {', '.join(replayed)}" if replayed else "none"
    rows = [
        ("steps", f"{counts['steps']}{early}, at most {settings['blocks_per_step']} blocks each"),
        ("learning rate", f"{settings['learning_rate']:g}, {settings['optimizer']}"),
        ("loss", settings["loss"]),
        ("anchors", settings["anchors"]),
        ("row weight", f"times served, at most {settings['max_row_weight']}"),
        ("replay", replay),
        ("computed in", settings["compute"]),
        ("parameters", str(counts["parameters"])),
        ("best step", f"{walk['step']}, walk acceptance {figure(walk['acceptance_length'])} on validation"),
        *(
            (f"walk on `{cache}`", f"{figure(one['acceptance_length'])} over {one['num_drafts']} steps, as on disk")
            for cache, one in drafter.walks.items()
        ),
    ]
    return [_table("Trained", ("", ""), rows)]


def _measured(decision: GateDecision | None, report: AcceptanceReport | None) -> str:
    if decision is None or report is None:
        return "## Measured\n\nTaken over without a measurement: nothing served before it."
    rows = [
        (
            role,
            *(
                figure(one.get(name))
                for name in ("emitted_tokens_per_step", "served_acceptance_length", "tokens_per_s")
            ),
        )
        for role, one in report.measured.items()
    ]
    columns = ("drafter", "emitted tokens a step", "acceptance length", "tokens/s")
    reasons = "\n".join(
        f"- {'failed: ' if reason.get('passed') is False else ''}{reason['message']}" for reason in decision.reasons
    )
    return (
        f"{_table('Measured', columns, rows)}\n\n"
        f"Decision `{decision.derivation_id}` on report `{report.derivation_id}`: **{decision.decision}**, "
        f"{lift_of(decision)} over the champion `{report.parents.get('champion')}`.\n\n{reasons}"
    )


def _serving(config: Config, version: str, drafter: DrafterCheckpoint) -> str:
    speculative = {"method": "dflash", "model": "FOLDER", "num_speculative_tokens": drafter.block_size - 1}
    return (
        "## Serve and roll back\n\n"
        f"`slipstream deploy {version}` swaps it into every replica once the gate let it through; a new server takes\n"
        f"`vllm serve {config.target.model.name} --speculative-config '{json.dumps(speculative)}'`.\n"
        "`slipstream rollback` serves the champion before it again. "
        f"`slipstream lineage {version}` tells where it comes from."
    )


def lift_of(decision: GateDecision) -> str:
    """The lift with its interval, in words."""
    if decision.lift is None:
        return "a lift that could not be measured"
    return f"lift {figure(decision.lift)} (interval {figure(decision.ci_low)} to {figure(decision.ci_high)})"


def counted(manifest: Mapping[str, Any]) -> str:
    """The counts of a manifest in words, rejects by reason among them."""
    counts = [f"{name} {count}" for name, count in manifest.get("counts", {}).items()]
    counts += [f"rejected as {reason} {count}" for reason, count in manifest.get("rejects", {}).items()]
    return ", ".join(counts) or "no counts"


def figure(value: Any) -> str:
    """A figure for people."""
    return "-" if value is None else f"{value:.3f}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows)]
    return f"## {title}\n\n" + "\n".join(lines)
