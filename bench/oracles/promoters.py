"""Promoters at once, some of them killed: is there one winner, is no version lost, is the history whole?

Real processes, each with a run root and a challenger of its own, all measured against one champion, promote and then
deploy as far as the registry is concerned, on one MLflow on SQLite. Some are killed with -9 before or after a call of
MLflow's client, drawn at random; afterwards each of those promotes again. alias_audit.py judges what is left.
"""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CALLS = (
    *("create_run", "log_batch", "log_artifact", "list_artifacts", "download_artifacts", "set_tag", "set_terminated"),
    *("create_registered_model", "create_model_version", "search_model_versions", "set_model_version_tag"),
    *("set_registered_model_alias", "get_model_version_by_alias"),
)
_IMPORTED = (
    *("mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store"),
    *("jobs.promote", "jobs.adopt", "serving.preflight"),
)
_MOST_CALLS = 60  # a promotion alone makes about so many of them


def concurrent_promoters(
    *, promoters: int = 8, kills: int = 3, rounds: int = 3, seed: int = 0, limit_s: float = 80
) -> dict[str, Any]:
    """What ``rounds`` rounds left behind; no round begins that could end after ``limit_s``.

    ``champions`` and ``approved`` are the largest numbers of versions that won in a round (1 is right), ``lost`` the
    checkpoints without a version, ``duplicates`` those with two, ``history_complete`` whether every move and every
    alias is explained by the log; ``faults`` says in words what was wrong. ``killed`` counts the processes that died.
    """
    command = [sys.executable, __file__, *map(str, (promoters, kills, rounds, seed, limit_s))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=4 * limit_s)
    if done.returncode:
        raise RuntimeError(f"promoters: exit status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _rounds(folder: Path, *, promoters: int, kills: int, rounds: int, seed: int, limit_s: float) -> dict[str, Any]:
    started, longest, results = time.monotonic(), 0.0, []
    for module in _IMPORTED:  # once, before the forks; nothing is connected here
        importlib.import_module(module)
    _in_child(lambda: _prepare(folder, promoters))
    for number in range(rounds):
        began = time.monotonic()
        if results and began - started + longest > limit_s:
            break
        results.append(_round(folder, number, promoters=promoters, kills=kills, seed=seed))
        longest = max(longest, time.monotonic() - began)
    return {
        "rounds": len(results),
        "promoters": promoters,
        "killed": sum(one["killed"] for one in results),
        "champions": max(one["champions"] for one in results),
        "approved": max(one["approved"] for one in results),
        "versions_expected": sum(one["versions_expected"] for one in results),
        "lost": sum(one["lost"] for one in results),
        "duplicates": sum(one["duplicates"] for one in results),
        "history_complete": all(one["history_complete"] for one in results),
        "refused_moves": sum(one["refused_moves"] for one in results),
        "winners": [one["winner"] for one in results],
        "told": [message for one in results for message in one["told"]],
        "faults": [fault for one in results for fault in one["faults"]],
        "seconds": round(time.monotonic() - started, 1),
    }


def _prepare(folder: Path, promoters: int) -> None:
    """A target, a drafter, an MLflow with the champion, and a root with a verdict for every promoter."""
    from checkpoints import as_checkpoint
    from tiny import tiny_drafter, tiny_target
    from verdicts import make_decision

    from jobs.adopt import first_champion

    target = tiny_target(folder / "target")
    drafter = tiny_drafter(folder / "drafter", target)
    first_champion(_config(folder, folder), as_checkpoint(folder, drafter, name="c0", role="champion"))
    for i in range(promoters):
        root = folder / f"promoter-{i}"
        as_checkpoint(root, drafter, name=f"d{i}")
        make_decision(root, challenger=f"d{i}", lift=1.1 + i / 100)
    shutil.copy(folder / "mlflow.db", folder / "before.db")


def _round(folder: Path, number: int, *, promoters: int, kills: int, seed: int) -> dict[str, Any]:
    from bench.oracles.alias_audit import audit_of

    (folder / "mlflow.db-journal").unlink(missing_ok=True)  # of a writer that was killed in the round before
    shutil.copy(folder / "before.db", folder / "mlflow.db")
    draw = random.Random(f"{seed} {number}")
    doomed = {i: (draw.randint(1, _MOST_CALLS), draw.random() < 0.5) for i in draw.sample(range(promoters), kills)}
    outcomes = [folder / f"promoter-{i}" / f"outcome-{number}.json" for i in range(promoters)]
    gate, opened = os.pipe()
    children = []
    for i, outcome in enumerate(outcomes):
        if (child := os.fork()) == 0:
            os.close(opened)
            os.read(gate, 1)  # until all are there
            _exit(lambda i=i, outcome=outcome: _promote(folder, i, outcome, doom=doomed.get(i)))
        children.append(child)
    os.close(gate)
    os.close(opened)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for i, outcome in enumerate(outcomes):
        if not outcome.exists():
            _in_child(lambda i=i, outcome=outcome: _promote(folder, i, outcome, doom=None))
    audit = folder / f"audit-{number}.json"
    _in_child(lambda: audit.write_text(json.dumps(audit_of(folder, _config(folder, folder).model_name, outcomes))))
    result = json.loads(audit.read_text())
    result["faults"] += [
        f"promoter-{i} ended with {s}" for i, s in enumerate(statuses) if s not in (0, -signal.SIGKILL)
    ]
    return {"killed": statuses.count(-signal.SIGKILL), **result}


def _promote(folder: Path, i: int, outcome: Path, *, doom: tuple[int, bool] | None) -> None:
    from jobs import promote
    from jobs.registry import AliasMoved, Registry
    from pipeline.artifacts import DrafterCheckpoint, GateDecision, load
    from pipeline.stages import Artifact

    os.environ["SLIPSTREAM_ACTOR"] = f"promoter-{i}"
    if doom:
        _die_at(*doom)
    root = folder / f"promoter-{i}"
    config = _config(folder, root)
    decision = next((root / "decisions").iterdir())
    challenger = root / "drafters" / f"d{i}"
    try:
        version = promote.run(
            config,
            Artifact(decision, load(decision, GateDecision)),
            Artifact(challenger, load(challenger, DrafterCheckpoint)),
        )
        registry = Registry(config.promote.tracking_uri, root)
        registry.set_alias(config.model_name, "champion", version, expected="1", reason="deploy")
        result = {"approved": version}
    except AliasMoved as error:
        result = {"told": str(error)}
    outcome.write_text(json.dumps(result))


def _die_at(call: int, before: bool) -> None:
    """Kill this process with -9 at its n-th call of MLflow's client, before or after it."""
    from mlflow import MlflowClient

    made = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made[0] += 1
            mine = made[0] == call
            if mine and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in CALLS:
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))


def _config(folder: Path, root: Path) -> Any:
    from pipeline.config import Config

    return Config.model_validate(
        {
            "workload": "bench",
            "root": root,
            "target": {"model": folder / "target"},
            "promote": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        }
    )


def _in_child(work: Callable[[], Any]) -> None:
    """Run in a process of its own: connections that were open at a fork must not be used after it."""
    if (child := os.fork()) == 0:
        _exit(work)
    if (status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != 0:
        raise RuntimeError(f"a child ended with {status}")


def _exit(work: Callable[[], Any]) -> None:
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "jobs")]  # toys, checkpoints and verdicts
    _promoters, _kills, _num, _seed = map(int, sys.argv[1:5])
    with tempfile.TemporaryDirectory(prefix="promoters-") as _folder:
        _result = _rounds(
            Path(_folder), promoters=_promoters, kills=_kills, rounds=_num, seed=_seed, limit_s=float(sys.argv[5])
        )
    print(json.dumps(_result))
