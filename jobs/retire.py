"""Retire: every drafter version and every cache of states that was made for another target than the configured one.

python jobs/retire.py --config slipstream.toml --list         what would be retired
python jobs/retire.py --config slipstream.toml

A target's fingerprint (config.json, tokenizer, chat template, weights, dtype) tells: a new revision of a model is
another target, whatever its folder is called; where that changed, so has the model's name in MLflow, and versions of
all names that were served from this root are looked at. Retired versions can be deployed, and rolled back to, no more;
their files stay in MLflow. Prompts stay, and are answered again by the new target.
"""

import argparse
import logging
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.history import nothing_registered
from jobs.registry import RETIRED, Registry, Version
from jobs.session import job_main
from pipeline import artifacts, lease, stages
from pipeline.artifacts import MANIFEST, DrafterCheckpoint, HiddenStateCache, artifact_dir, find
from pipeline.config import Config
from pipeline.disk import QUEUE, remove_cache
from pipeline.errors import SchemaError, StageError
from pipeline.fingerprint import fingerprint_id, target_fingerprint

logger = logging.getLogger("slipstream")

_KINDS: dict[str, type[artifacts.Manifest]] = {
    "responses": artifacts.ResponseSet,
    "states": HiddenStateCache,
    "general-states": HiddenStateCache,
    "champion": DrafterCheckpoint,
    "challenger": DrafterCheckpoint,
    "control": DrafterCheckpoint,
}
# Verdicts and figures name no target of their own: they are about the drafters of these names.
_ABOUT = ("report", "decision", "speed")


@dataclass(frozen=True)
class Retired:
    """What was, or would be, retired."""

    target: str
    """Fingerprint id of the target that stays."""
    versions: tuple[str, ...]
    """Of the configured model their numbers, of others "MODEL N"."""
    caches: tuple[str, ...]
    in_use: tuple[str, ...]
    """Caches that another process reads: to be removed by the next call."""
    names: tuple[str, ...]
    """What current.json names no more."""

    def lines(self) -> list[str]:
        """For people."""
        told = {
            "versions": self.versions,
            "caches removed": self.caches,
            "caches in use": self.in_use,
            "no longer current": self.names,
        }
        lines = [f"target {self.target}", *(f"{what}: {', '.join(ids)}" for what, ids in told.items() if ids)]
        return lines if len(lines) > 1 else [*lines, "everything here was made for it"]


def run(config: Config, *, only_list: bool = False) -> Retired:
    """What was made for another target, retired. Killed at any line, the same call goes on.

    Raises: ConfigError when the target is not there; StageError while a run is under way.
    """
    present = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=())
    target = fingerprint_id(present)
    with nullcontext() if only_list else lease.turn(config.root):
        names, versions = _names(config.root, target), _versions(config, target)
        # Until a new champion is there, whatever was interrupted was begun with the old one.
        interrupted = _interrupted(config.root) if "champion" in names else []
        caches = _caches(config.root, target)
        removed = [folder.name for folder in (*interrupted, *caches)]
        if not only_list:  # in an order in which a call that is killed leaves what tells the next one
            removed = _removed(interrupted, target)
            _retire_versions(config, versions, target)
            stages.forget_current(config.root, names)
            removed += _removed(caches, target)
    in_use = tuple(folder.name for folder in (*interrupted, *caches) if folder.name not in removed)
    told = tuple(one.number if model == config.model_name else f"{model} {one.number}" for model, one in versions)
    return Retired(target, told, tuple(removed), in_use, tuple(names))


def _names(root: Path, target: str) -> list[str]:
    found = []
    for name, derivation in stages.current_names(root).items():
        if name in _KINDS and _is_of_another(artifact_dir(root, _KINDS[name], derivation), _KINDS[name], target):
            found.append(name)
    drafters = {"champion", "challenger", "control"}
    return found + [name for name in _ABOUT if drafters.intersection(found) and name in stages.current_names(root)]


def _caches(root: Path, target: str) -> list[Path]:
    folders = sorted(path.parent for path in (Path(root) / HiddenStateCache.kind).glob(f"*/{MANIFEST}"))
    return [folder for folder in folders if _is_of_another(folder, HiddenStateCache, target)]


def _interrupted(root: Path) -> list[Path]:
    """States that are half done, and the queues of streams: nobody can tell what they are of, nor goes on with them."""
    caches = [path for path in (Path(root) / HiddenStateCache.kind).glob("*") if not (path / MANIFEST).exists()]
    found = [*caches, *(Path(root) / QUEUE).glob("*")]
    return sorted(path for path in found if path.is_dir() and path.name[0] != ".")


def _removed(folders: list[Path], target: str) -> list[str]:
    return [folder.name for folder in folders if _remove(folder, f"of another target than {target}")]


def _remove(folder: Path, why: str) -> bool:
    if folder.parent.name == HiddenStateCache.kind:
        return remove_cache(folder, why)
    try:
        with stages.exclusive(folder, "retire"):
            shutil.rmtree(folder)
    except StageError:
        return False
    return True


def _is_of_another(folder: Path, kind: type[artifacts.Manifest], target: str) -> bool:
    try:
        manifest = find(folder, kind)
    except SchemaError as error:  # of another version of Slipstream: nobody can tell, and nobody can use it
        logger.warning("retire: %s", error)
        return False
    made_for = None if manifest is None else manifest.fingerprint
    return made_for is not None and fingerprint_id(made_for) != target


def _versions(config: Config, target: str) -> list[tuple[str, Version]]:
    """Model → version, of those of another target that are not retired yet."""
    if nothing_registered(config):
        return []
    registry = Registry(config.promote.tracking_uri, config.root)
    served = {path.name for path in (Path(config.root) / "versions").glob("*") if path.is_dir()}
    found = [(model, one) for model in sorted({config.model_name, *served}) for one in registry.versions(model)]
    return [
        (model, one) for model, one in found if one.state != RETIRED and one.target is not None and one.target != target
    ]


def _retire_versions(config: Config, versions: list[tuple[str, Version]], target: str) -> None:
    if not versions:
        return
    registry = Registry(config.promote.tracking_uri, config.root)
    for model, one in versions:
        reason = f"made for target {one.target}, and {target} is served now"
        registry.set_state(model, one.number, RETIRED, reason=reason)


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Retire, and say what."""
    print("\n".join(run(config, only_list=arguments.list).lines()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to do it."""
    parser.add_argument("--list", action="store_true", help="only say what would be retired")


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments, needs_ray=False)
