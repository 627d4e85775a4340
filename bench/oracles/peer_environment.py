"""Environments of the peers, made from the package registry: each has one of its own, and ours stays as it is."""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pipeline.errors import StageError

ROOT = Path(__file__).resolve().parents[2]
_EMPTY = [str(ROOT / "packaging" / "empty" / name) for name in ("torchvision", "torchaudio")]


@dataclass(frozen=True)
class Peer:
    """A trainer that is compared with, and what its environment is made of."""

    name: str
    version: str
    script: str
    alone: bool
    """Installed without what it asks for: some of that runs on a GPU alone."""
    needs: tuple[str, ...] = ()
    """What its trainer imports then."""


SPECULATORS = Peer("speculators", "0.9.0", "speculators_trainer.py", alone=False)
SPECFORGE = Peer(
    "specforge",
    "0.2.0",
    "specforge_trainer.py",
    alone=True,  # sglang, which only its capture of states imports
    needs=("transformers==5.8.1", "numpy", "safetensors", "pydantic", "pyyaml", "psutil", "tqdm"),
)


def command_of(peer: Peer, work: Path) -> list[str]:
    """How its trainer is started; the environment is made under ``work`` unless it is there.

    Raises: StageError with pip's words when a package cannot be had.
    """
    folder = work / "environments" / f"{peer.name}-{peer.version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"bench: making {folder} (a minute or two, 1 GB)", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], peer)
        for arguments in _installs(peer):
            _run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments], peer)
        ready.write_text(f"{peer.name}=={peer.version}\n")
    return [str(python), str(ROOT / "bench" / "peers" / peer.script)]


def _installs(peer: Peer) -> list[list[str]]:
    """Arguments of pip, in order: first our torch, so that nothing brings another one, with what a GPU needs."""
    requirement = f"{peer.name}=={peer.version}"
    torch = [f"torch=={version('torch')}", f"setuptools=={version('setuptools')}"]
    first = [["--no-deps", *torch], ["--no-deps", "--no-build-isolation", *_EMPTY]]
    if peer.alone:
        return [*first, ["--no-deps", requirement], [*torch, *peer.needs]]
    return [*first, [requirement]]


def _run(command: list[str], peer: Peer) -> None:
    environment = dict(os.environ)
    if index := environment.get("TORCH_INDEX_URL"):
        known = environment.get("PIP_EXTRA_INDEX_URL")
        environment["PIP_EXTRA_INDEX_URL"] = f"{known} {index}" if known else index
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip() and "is ignored: it is neither" not in line]
        raise StageError(
            f"{' '.join(command[:8])}: exit status {done.returncode}: {' / '.join(said[-3:])[-600:]}. {peer.name} "
            "is installed from pip's index: check the network and pip's settings; TORCH_INDEX_URL names the index "
            "with torch's CPU wheels where pip's own has none"
        )
