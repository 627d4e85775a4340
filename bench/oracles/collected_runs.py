"""Runs of jobs/collect.py over made-up logs: their cost, and what they give when killed, cut or reordered."""

import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from bench.oracles.traffic_records import Traffic, write_traffic
from pipeline import stages
from pipeline.artifacts import PromptSet, verify
from pipeline.schemas import PROMPTS
from pipeline.shards import read_tables

CHECKOUT = Path(__file__).resolve().parents[2]
_EVERY_S = 0.25


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    seconds: float
    """Of the stage, Ray's start left out."""
    peak_bytes: int
    """Memory of the job and of all that it started, Ray included, shared pages counted once."""
    counts: dict[str, int]


def configured(folder: Path, traffic: Traffic, **settings: Any) -> Path:
    """A configuration of these logs, its root beside it."""
    told = {"redaction": {"names": "not_redacted"}, "max_reject_share": 0.2, "max_subject_share": 1.0, **settings}
    lines = [f"{name} = {_toml(value)}" for name, value in {"sources": list(traffic.sources), **told}.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "slipstream.toml"
    path.write_text('root = "root"\n[target]\nmodel = "none"\n[collect]\n' + "\n".join(lines) + "\n")
    return path


def cost(folder: Path, records: int, *, seed: int) -> Cost:
    """One run over so many records."""
    traffic = write_traffic(folder / "logs", records, seed=seed)
    config = configured(folder / "run", traffic)
    process, peak = _start(config), 0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(_EVERY_S)
    _require_done(process, config)
    prompts = collected(config)
    return Cost(prompts.manifest.seconds, peak, prompts.manifest.counts)


def killed(folder: Path, records: int, *, kills: int, seed: int) -> dict[str, int]:
    """Rows missing, twice or other than an undisturbed run's, over as many runs as so many kills take."""
    traffic, moments = write_traffic(folder / "logs", records, seed=seed), random.Random(seed)
    settings = {"piece_bytes": 1 << 20}
    straight = configured(folder / "straight", traffic, **settings)
    began = time.monotonic()
    _require_done(_ended(_start(straight)), straight)
    longest = time.monotonic() - began
    expected = rows_of(straight)
    found = {"kills": 0, "runs": 0, "missing": 0, "twice": 0, "different": 0, "other_contents": 0}
    while found["kills"] < kills:
        config = configured(folder / f"killed-{found['runs']}", traffic, **settings)
        while (process := _killed_after(config, moments.uniform(0, longest) if found["kills"] < kills else None)) != 0:
            found["kills"] += process is None
        rows = rows_of(config)
        found["runs"] += 1
        found["missing"] += len({row["row_id"] for row in expected} - {row["row_id"] for row in rows})
        found["twice"] += len(rows) - len({row["row_id"] for row in rows})
        found["different"] += sum(one != other for one, other in zip(expected, rows, strict=False))
        found["other_contents"] += collected(config).manifest.content_id != collected(straight).manifest.content_id
        shutil.rmtree(config.parent)
    return found


def cut_and_reordered(folder: Path, records: int, *, seed: int) -> dict[str, Any]:
    """Contents of runs over the same records with files in other orders, other pieces and other numbers of workers."""
    traffic = write_traffic(folder / "logs", records, seed=seed)
    turned = Traffic(tuple(reversed(traffic.sources)))
    dealt = Traffic(tuple(_dealt_anew(source, folder / "dealt", seed=seed) for source in traffic.sources))
    runs = {
        "as it is": configured(folder / "straight", traffic),
        "reversed sources": configured(folder / "reversed", turned),
        "lines dealt to other files": configured(folder / "dealt-run", dealt),
        "small pieces": configured(folder / "small", traffic, piece_bytes=1 << 18),
        "one large piece": configured(folder / "large", traffic, piece_bytes=1 << 40),
    }
    found = {}
    for name, config in runs.items():
        _require_done(_ended(_start(config)), config)
        found[name] = collected(config).manifest.content_id
    rows = [rows_of(config) for config in runs.values()]
    return {
        "contents": found,
        "different_contents": len(set(found.values())) - 1,
        "different_rows": sum(one != rows[0] for one in rows),
        "rows": len(rows[0]),
    }


def _dealt_anew(source: dict[str, str], folder: Path, *, seed: int) -> dict[str, str]:
    """The same lines of a source, shuffled, in plain files of other names."""
    unpacked = {".gz": gzip.open, ".zst": lambda path: pa.input_stream(str(path), compression="zstd")}
    lines = []
    for path in sorted(Path(source["path"]).iterdir()):
        with unpacked.get(path.suffix, lambda path: open(path, "rb"))(path) as file:
            lines += [line for line in file.read().split(b"\n") if line]
    random.Random(seed).shuffle(lines)
    own = folder / source["format"]
    own.mkdir(parents=True)
    for number in range(5):
        (own / f"part-{number}.jsonl").write_bytes(b"\n".join(lines[number::5]) + b"\n")
    return {**source, "path": str(own)}


def collected(config: Path) -> stages.Artifact[PromptSet]:
    """What the run of this configuration has made; its files are what its manifest says."""
    artifact = stages.current(config.parent / "root", "prompts", PromptSet)
    verify(artifact.folder, artifact.manifest)
    return artifact


def rows_of(config: Path) -> list[dict[str, Any]]:
    """All rows, in order."""
    artifact = collected(config)
    return read_tables(artifact.folder, artifact.manifest.shards, PROMPTS).to_pylist()


def _start(config: Path) -> subprocess.Popen[bytes]:
    with open(config.parent / "job.log", "ab") as log:
        command = [sys.executable, "jobs/collect.py", "--config", str(config)]
        return subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)


def _ended(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    process.wait()
    return process


def _killed_after(config: Path, moment: float | None) -> int | None:
    """Exit status of a run, None where it was killed at this moment."""
    process = _start(config)
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1)  # what was its child notices
        return None
    _require_done(process, config)
    return 0


def _require_done(process: subprocess.Popen[bytes], config: Path) -> None:
    if process.returncode != 0:
        raise RuntimeError(f"collect failed: {(config.parent / 'job.log').read_text()[-2000:]}")


def _memory(pid: int) -> int:
    """Proportional set sizes of a process and of all that it started."""
    total = 0
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for one in tree:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def erased(folder: Path, *, subjects: int, seed: int) -> dict[str, int]:
    """What is left of one subject of so many after `slipstream erase`, and what changed of the others' rows.

    The tap's log lies under the root, too. Raw bytes of every file there are searched, and what compressed ones hold.
    """
    rng = random.Random(seed)
    marks = {f"person-{n:04d}": f"mark{rng.getrandbits(64):016x}" for n in range(subjects)}
    log = folder / "run" / "root" / "traffic" / "traffic-host-1-1700000000000.jsonl"
    log.parent.mkdir(parents=True)
    with open(log, "w") as file:
        for name, mark in marks.items():
            for turn in range(1 + rng.randrange(4)):
                text = f"{mark} asks for the {turn}. time about order {rng.randrange(10**6)}"
                record = {"id": f"{mark}-{turn}", "ts": 1.7e9 + turn, "subject": name, "consent": "recorded"}
                bad = {"temperature": "hot"} if rng.random() < 0.05 else {}
                file.write(json.dumps({**record, "prompt": text, **bad}) + "\n")
    source = {"path": str(log.parent), "format": "prompts"}
    config = configured(folder / "run", Traffic((source,)), near_similarity="off")
    _require_done(_ended(_start(config)), config)
    before, whom = rows_of(config), f"person-{rng.randrange(subjects):04d}"
    command = [sys.executable, "jobs/erase.py", "--config", str(config), "--subject", whom]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    after = {row["row_id"]: row for row in rows_of(config)}
    own = [row["row_id"] for row in before if marks[whom] in row["messages"]]
    return {
        "rows_of_the_subject": len(own),
        "files_that_hold_it": len(_holding(config.parent, (marks[whom], whom))),
        "rows_left": sum(row_id in after for row_id in own),
        "others": len(before) - len(own),
        "others_changed": sum(after.get(row["row_id"]) != row for row in before if row["row_id"] not in own),
    }


def _holding(folder: Path, texts: Sequence[str]) -> list[Path]:
    """Files under a folder with one of these texts in their bytes, or in what a Parquet table or an archive holds."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            body = path.read_bytes()
            if path.suffix == ".parquet":
                body += json.dumps(pq.read_table(path).to_pylist(), ensure_ascii=False).encode()
            if any(text.encode() in body for text in texts):
                found.append(path)
    return found
