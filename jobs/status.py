"""Status: what is complete under the run root, which versions carry which alias, and what every replica serves."""

import argparse
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import replicas
from jobs.history import table
from jobs.in_charge import who_is_in_charge
from jobs.ledger import unfinished
from jobs.registry import UNLEARN_BY, Registry
from jobs.session import job_main
from pipeline import artifacts, stages
from pipeline.config import Config
from pipeline.errors import ConfigError, SwapError
from pipeline.fingerprint import fingerprint_id, target_fingerprint

ALIASES = ("champion", "approved", "challenger")
_KINDS: dict[str, type[artifacts.Manifest]] = {
    "prompts": artifacts.PromptSet,
    "responses": artifacts.ResponseSet,
    "states": artifacts.HiddenStateCache,
    "champion": artifacts.DrafterCheckpoint,
    "challenger": artifacts.DrafterCheckpoint,
    "control": artifacts.DrafterCheckpoint,
    "report": artifacts.AcceptanceReport,
    "speed": artifacts.SpeedReport,
    "decision": artifacts.GateDecision,
}


def run(config: Config) -> list[str]:
    """One line an artifact, an alias and a replica. Nothing is made: a root without a registry has no versions."""
    return [*_of_root(config), *_fleet_lines(config)]


def _of_root(config: Config) -> list[str]:
    lines = [f"root {config.root}", _target_line(config), *_artifact_lines(config)]
    if config.promote.tracking_uri is None and not (config.root / "mlflow.db").exists():
        return [*lines, f"model {config.model_name}: nothing registered yet; slipstream init-drafter or adopt begins"]
    registry = Registry(config.promote.tracking_uri, config.root)
    versions = {alias: registry.alias(config.model_name, alias) for alias in ALIASES}
    lines.append(f"model {config.model_name}")
    for alias, version in versions.items():
        state = _of_version(registry, config.model_name, version) if version else "-"
        lines.append(f"  {alias:<11}{state}")
    return lines + [f"! {line}" for line in registry.log.disagreements(config.model_name)]


def _fleet_lines(config: Config) -> list[str]:
    """What every replica serves, and the deploy under way, as far as replicas are named and can be asked."""
    if not replicas.are_named(config):
        return []
    lines = []
    if (release := replicas.under_way(config)) is not None:
        lines.append(f"{release} ({who_is_in_charge(config.root) or 'nobody is in charge: slipstream deploy goes on'})")
    try:
        return [*lines, *table(replicas.table(config))]
    except (ConfigError, SwapError) as error:
        return [*lines, f"replicas: {error}"]


def _of_version(registry: Registry, model: str, version: str) -> str:
    due = registry.tags(model, version).get(UNLEARN_BY)
    late = "" if due is None else f", learned from what was erased: out of service by {due}"
    return f"version {version}, {registry.state(model, version)}{late}"


def _target_line(config: Config) -> str:
    """The target and its fingerprint id, by which a tap marks what it serves (SLIPSTREAM_TAP_TARGET)."""
    model, dtype = config.target.model, config.target.dtype
    if not (model / "config.json").exists():
        return f"target {model}: not on this machine"
    return f"target {model}, {dtype}: {fingerprint_id(target_fingerprint(model, dtype=dtype, target_layer_ids=()))}"


def _artifact_lines(config: Config) -> list[str]:
    names = stages.current_names(config.root)
    lines = []
    for name, kind in _KINDS.items():
        if name not in names:
            lines.append(f"  {name:<11}-")
            continue
        manifest = stages.open_artifact(config.root, kind, names[name]).manifest
        rows = sum(shard.rows for shard in manifest.shards if shard.path.endswith(".parquet"))
        lost = f", {sum(manifest.rejects.values())} rejected" if manifest.rejects else ""
        what = f"{rows} rows{lost}, " if rows else ""
        lines.append(f"  {name:<11}{names[name]}  {what}{manifest.seconds:.0f} s")
    return lines


def follow(config: Config) -> None:
    """Print the fleet's lines whenever they change, until no deploy is under way."""
    told: list[str] = []
    while True:
        is_last = unfinished(config.root) is None
        lines = _fleet_lines(config)
        if lines != told:
            print("\n".join(lines), end="\n\n", flush=True)
            told = lines
        if is_last:
            return
        time.sleep(config.deploy.tick_s)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Print the status."""
    print("\n".join(run(config)), flush=True)
    if arguments.follow and unfinished(config.root) is not None:
        print()
        follow(config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Once, or as long as a deploy is under way."""
    about = "while a deploy is under way: what every replica serves, again whenever it changes"
    parser.add_argument("--follow", action="store_true", help=about)


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
