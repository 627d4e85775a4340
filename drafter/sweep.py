"""Learning rates compared: the same short run from the same drafter, each on its own whole schedule."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts import DrafterCheckpoint, SweepReport, describe_file, write_durably
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.stages import Artifact, complete

STAGE_VERSION = 1
TABLE = "sweep.md"


def trials(config: Config) -> dict[float, Config]:
    """Learning rate → the configuration of its run, by rising rate."""
    steps = config.sweep.steps
    found = {}
    for rate in sorted(set(config.sweep.learning_rates)):
        update = {"learning_rate": rate, "steps": steps, "checkpoint_every": min(steps, config.train.checkpoint_every)}
        found[rate] = config.model_copy(update={"train": config.train.model_copy(update=update)})
    return found


def run(config: Config, runs: Mapping[float, Artifact[DrafterCheckpoint] | None]) -> Artifact[SweepReport]:
    """The report on runs: learning rate → its drafter, or None where it diverged.

    Raises: StageError when all of them did.
    """
    finished = {rate: one.manifest for rate, one in sorted(runs.items()) if one is not None}
    if not finished:
        raise StageError(
            f"sweep: training diverged at every rate ({', '.join(f'{rate:g}' for rate in sorted(runs))}); lower "
            "sweep.learning_rates"
        )
    points = [_point(rate, finished.get(rate)) for rate in sorted(runs)]
    first = next(iter(finished.values()))
    start = first.curve[0]["walk_acceptance_length"] - 1
    parents = {f"run_{n + 1}": one.derivation_id for n, one in enumerate(finished.values())}
    best = max((one for one in points if not one["diverged"]), key=lambda one: one["accepted_per_step"])

    def build(folder: Path, derivation: str) -> SweepReport:
        write_durably(folder / TABLE, ("\n".join(table(points, start)) + "\n").encode())
        return SweepReport(
            derivation_id=derivation,
            parents=parents,
            fingerprint=first.fingerprint,
            shards=(describe_file(folder / TABLE),),
            config=config.sweep.model_dump(mode="json"),
            points=points,
            start_accepted_per_step=start,
            best_learning_rate=best["learning_rate"] if best["accepted_per_step"] > start else None,
        )

    return complete(
        config.root,
        SweepReport,
        stage="sweep",
        version=STAGE_VERSION,
        parents=parents,
        meaning={"diverged": sorted(runs.keys() - finished.keys())},
        build=build,
    )


def table(points: Sequence[Mapping[str, Any]], start: float) -> list[str]:
    """Markdown lines, a rate a line."""
    lines = [
        "| learning rate | loss at the end | accepted drafts a step | against the start | at step |",
        "|---|---|---|---|---|",
        f"| (start) | | {start:.3f} | | 0 |",
    ]
    for point in points:
        if point["diverged"]:
            lines.append(f"| {point['learning_rate']:g} | diverged | | | |")
            continue
        accepted = point["accepted_per_step"]
        gain = f"{accepted / start:.3f} ×" if start else "-"
        loss = "-" if point["loss"] is None else f"{point['loss']:.3f}"
        lines.append(f"| {point['learning_rate']:g} | {loss} | {accepted:.3f} | {gain} | {point['best_step']} |")
    return lines


def advice(report: SweepReport) -> list[str]:
    """What to set, and how sure that is."""
    rates = [point["learning_rate"] for point in report.points]
    best = report.best_learning_rate
    if best is None:
        return ["No rate came above the drafter that all runs start from: more steps, or lower rates, may."]
    lines = [f"Set it in [train]:  learning_rate = {best:g}"]
    if len(rates) > 1 and best in (rates[0], rates[-1]):
        side, further = ("lowest", best / 2) if best == rates[0] else ("highest", best * 2)
        lines.append(
            f"It is the {side} rate of the sweep: the best one may lie beyond. Sweep again with {further:g} among "
            "sweep.learning_rates."
        )
    return lines


def _point(rate: float, run: DrafterCheckpoint | None) -> dict[str, Any]:
    if run is None:
        return {"learning_rate": rate, "diverged": True}
    losses = [point["loss"] for point in run.curve if "loss" in point]
    return {
        "learning_rate": rate,
        "diverged": False,
        "drafter": run.derivation_id,
        "loss": losses[-1] if losses else None,
        "accepted_per_step": run.walk["acceptance_length"] - 1,  # as of the start: equal walks are equal to the bit
        "best_step": run.walk["step"],
        "steps": run.counts["steps"],
    }
