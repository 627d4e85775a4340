"""Compare: two drafters (or one and none) and a file of prompts → a verdict, with a page; nothing else is needed.

python jobs/compare.py A B --target TARGET --prompts prompts.jsonl
slipstream compare drafter-v1 drafter-v2 --target TARGET --prompts prompts.jsonl
slipstream compare none drafter-v2 --target TARGET --prompts prompts.jsonl      does speculation pay at all?
"""

import argparse
import hashlib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.session import start_logging
from pipeline.artifacts import AcceptanceReport, DrafterCheckpoint, GateDecision, sha256_file
from pipeline.config import Config, resolve
from pipeline.errors import ConfigError, SlipstreamError
from pipeline.fingerprint import target_fingerprint
from pipeline.stages import Artifact

NONE = "none"
_MAX_MODEL_LEN = 4096
_DTYPES = ("bfloat16", "float16", "float32")


def run(
    config: Config, first: str, second: str, files: list[Path]
) -> tuple[Artifact[AcceptanceReport], Artifact[GateDecision]]:
    """The report and the verdict on ``second`` in place of ``first``: folders of drafters, or "none".

    Raises: ConfigError when a drafter cannot serve the target, or both are "none"; StageError when no prompt
    can be served; FingerprintError when something moved while it was measured.
    """
    from jobs.served import ServedDrafters
    from pipeline import evaluate, gate
    from pipeline.gate_prompts import from_files

    if first == second == NONE:
        raise ConfigError("compare: none against none; name at least one drafter's folder")
    candidates = {role: _drafter(config, name) for role, name in (("champion", first), ("challenger", second))}
    drafters = [one for one in candidates.values() if one]
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=())
    block_size = max(one.manifest.block_size for one in drafters)
    prompts = from_files(config, files, fingerprint=fingerprint, block_size=block_size)
    with ServedDrafters(config, folders=[one.folder for one in drafters]) as server:
        report = evaluate.run(config, candidates, prompts, server=server)
    names = dict(zip(("champion", "challenger"), display_names(first, second), strict=True))
    return report, gate.run(config, report, names=names)


def display_names(first: str, second: str) -> tuple[str, str]:
    """The folders' own names where they tell the two apart, else all that was given."""
    names = Path(first).name, Path(second).name
    return names if names[0] != names[1] else (first, second)


def _drafter(config: Config, name: str) -> Artifact[DrafterCheckpoint] | None:
    """The drafter in a folder, where it lies; its id is that of its files."""
    from jobs import preflight

    if name == NONE:
        return None
    folder = Path(name).resolve()
    info = preflight.check(config, folder)
    same = hashlib.sha256((sha256_file(folder / "config.json") + info.sha256).encode()).hexdigest()[:16]
    manifest = DrafterCheckpoint(
        derivation_id=same,
        parents={},
        role="champion",
        block_size=info.block_size,
        mask_token_id=info.mask_token_id,
    )
    return Artifact(folder, manifest)


def config_of(arguments: argparse.Namespace) -> Config:
    """The configuration behind the arguments: a policy file's table, then ``--set``."""
    shape = _target_config(arguments.target)
    policy: dict[str, Any] = {}
    if arguments.policy:
        try:
            policy = tomllib.loads(arguments.policy.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{arguments.policy}: not a readable policy ({error}); expected TOML with a [gate] table")
    table = policy.get("gate", policy)
    if not isinstance(table, dict):
        raise ConfigError(f"{arguments.policy}: gate is {table!r}; expected a [gate] table")
    dtype = str(shape.get("dtype") or shape.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    data = {
        "workload": "compare",
        "root": str(arguments.out.resolve()),
        "target": {
            "model": str(arguments.target.resolve()),
            "dtype": dtype if dtype in _DTYPES else "bfloat16",
            "max_model_len": min(_MAX_MODEL_LEN, shape.get("max_position_embeddings") or _MAX_MODEL_LEN),
        },
        "evaluate": {"server_url": arguments.server},
        # There are no cached states to walk.
        "gate": {**table, "require_walk": False},
    }
    return resolve(data, arguments.overrides, where="compare", base=Path.cwd())


def _target_config(target: Path) -> dict[str, Any]:
    path = target / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; --target is the folder of the served target, with its safetensors")


def verdict_text(report: Artifact[AcceptanceReport], decision: Artifact[GateDecision], names: tuple[str, str]) -> str:
    """The verdict for a terminal: one line, then what was measured, then every reason."""
    measured = report.manifest.measured
    lines = [f"{decision.manifest.decision}: {names[1]} in place of {names[0]}"]
    for name, role in zip(names, ("champion", "challenger"), strict=True):
        one = measured[role]
        length = one["served_acceptance_length"] or 1.0
        lines.append(f"  {name:<24} {length:6.3f} tokens a step {one['tokens_per_s']:9.1f} tokens/s")
    marks = {True: "+", False: "-", None: " "}
    lines += [f"  {marks[reason['passed']]} {reason['message']}" for reason in decision.manifest.reasons]
    return "\n".join([*lines, f"page: {decision.folder / 'report.html'}"])


def main(argv: list[str] | None = None) -> None:
    """Compare, and print the verdict."""
    parser = argparse.ArgumentParser(
        prog="slipstream compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", metavar="A", help="folder of what serves now (z-lab layout), or none")
    parser.add_argument("second", metavar="B", help="folder of what wants to, or none")
    parser.add_argument("--target", type=Path, required=True, help="folder of the served target")
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, help="JSON lines with messages or prompt; repeatable"
    )
    parser.add_argument("--policy", type=Path, help="TOML with a [gate] table, such as a decision's policy.toml")
    parser.add_argument("--server", metavar="URL", help="an idle replica with our control endpoint, instead of our own")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="where report and page go")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE", help="override one setting"
    )
    arguments = parser.parse_args(argv)
    start_logging()
    try:
        report, decision = run(config_of(arguments), arguments.first, arguments.second, arguments.prompts)
        print(verdict_text(report, decision, display_names(arguments.first, arguments.second)))
    except SlipstreamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
