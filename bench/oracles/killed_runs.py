"""Runs of the jobs that answer and capture, killed with signal 9 at random moments and started again."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import stages
from pipeline.artifacts import HiddenStateCache, ResponseSet, verify
from pipeline.schemas import CACHE, RESPONSES
from pipeline.shards import read_part, read_tables

CHECKOUT = Path(__file__).resolve().parents[2]
JOBS = ("regenerate", "capture")

Files = dict[Path, tuple[int, bytes]]


def killed_runs(
    folder: Path, *, target: Path, layers: Sequence[int], mails: Path, kills: int, seed: int
) -> dict[str, int]:
    """What ``kills`` kills did, over as many whole rounds as it takes: rows missing and twice, finished files touched,
    and rounds that ended under other derivation ids than a run that nobody killed."""
    moments, found = random.Random(seed), Counter(kills=0, amid=0, rounds=0, missing=0, twice=0, touched=0, other_ids=0)
    config = _configuration(folder, target, layers, mails)
    _job("collect", config).wait()
    base = folder / "base"
    (folder / "root").rename(base)
    shutil.copytree(base, folder / "root")
    started = time.monotonic()
    _finish("regenerate", config)
    longest = time.monotonic() - started
    _finish("capture", config)
    expected, derivations = _contents(folder / "root"), _derivations(folder / "root")
    while found["kills"] < kills:
        shutil.rmtree(folder / "root")
        shutil.copytree(base, folder / "root")
        left = kills - found["kills"]
        found.update(_round(config, folder / "root", moments, longest=longest, kills=left))
        found["rounds"] += 1
        contents = _contents(folder / "root")
        for name, rows in expected.items():
            found["missing"] += len(rows - contents[name])
            found["twice"] += sum((contents[name] - rows).values())
        found["other_ids"] += _derivations(folder / "root") != derivations
    return dict(found)


def _round(config: Path, root: Path, moments: random.Random, *, longest: float, kills: int) -> dict[str, int]:
    """Run the jobs to their end, killed on the way; the kills, those amid the parts, and files changed afterwards."""
    kept: Files = {}
    done, amid, touched = 0, 0, set()
    for job in JOBS:
        while True:
            process, moment = _job(job, config), moments.uniform(0, longest) if done < kills else None
            try:
                if process.wait(timeout=moment) != 0:
                    raise RuntimeError(f"{job} failed: {(config.parent / 'jobs.log').read_text()[-2000:]}")
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                done += 1
            time.sleep(1)  # what was its child notices
            now = _committed(root)
            touched |= {path for path, file in kept.items() if now.get(path) != file}
            amid += process.returncode != 0 and len(now) > len(kept)
            kept |= now
            if process.returncode == 0:
                break
    return {"kills": done, "amid": amid, "touched": len(touched)}


def _job(name: str, config: Path) -> subprocess.Popen:
    with open(config.parent / "jobs.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, f"jobs/{name}.py", "--config", str(config)], cwd=CHECKOUT, stdout=log, stderr=log
        )


def _finish(name: str, config: Path) -> None:
    if _job(name, config).wait() != 0:
        raise RuntimeError(f"{name} failed: {(config.parent / 'jobs.log').read_text()[-2000:]}")


def _configuration(folder: Path, target: Path, layers: Sequence[int], mails: Path) -> Path:
    path = folder / "slipstream.toml"
    path.write_text(
        f'root = "{folder / "root"}"\n[target]\nmodel = "{target}"\ndtype = "float32"\nmax_model_len = 512\n'
        f'[collect]\nsources = ["{mails}"]\nconsent = "allow_all"\nredaction = "none"\n'
        f"[drafter]\ntarget_layer_ids = {list(layers)}\n"
        "[regenerate]\nrows_per_part = 4\nmax_tokens = 64\nkv_cache_gib = 0.25\nmax_reject_share = 0.2\n"
        "[capture]\ncheck_every = 4\n"
    )
    return path


def _committed(root: Path) -> Files:
    """Every file of every committed part: when it was written, and its bytes."""
    found: Files = {}
    for record in root.glob("*/*/part-*.json"):
        for path in (record, *(record.parent / shard.path for shard in read_part(record).shards)):
            found[path] = (path.stat().st_mtime_ns, path.read_bytes())
    return found


def _current(root: Path) -> list[tuple[stages.Artifact[Any], Any]]:
    return [
        (stages.current(root, "responses", ResponseSet), RESPONSES),
        (stages.current(root, "states", HiddenStateCache), CACHE),
    ]


def _contents(root: Path) -> dict[str, Counter[str]]:
    """Row ids of the responses and of the cache, whose files are what their manifests say."""
    found = {}
    for artifact, schema in _current(root):
        verify(artifact.folder, artifact.manifest)
        table = read_tables(artifact.folder, artifact.manifest.shards, schema)
        found[artifact.manifest.kind] = Counter(table.column("row_id").to_pylist())
    return found


def _derivations(root: Path) -> list[str]:
    return [artifact.id for artifact, _ in _current(root)]
