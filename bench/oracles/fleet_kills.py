"""Rollouts over three replicas under load: the controller killed with -9 at random moments, a replica, one refusing.

The controller is the real command with a real registry. The replicas are scripted servers, each a process of its own:
what is shown is the controller. Whether an engine keeps its requests in a swap is another figure (swap_under_load.py).
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.oracles.balancer import Balancer
from bench.oracles.fleet_clients import Watchers
from bench.oracles.scripted_replica import TOKEN

ROOT = Path(__file__).resolve().parents[2]
SWAP_S, REPLY_S, RESTART_S = 0.4, 0.05, 0.8
TROUBLES = ("none", "a replica is killed", "a replica refuses")
_RUN_S = 300.0
_DEPLOY = """
[deploy]
tick_s = 0.1
dead_after_s = 30
soak_min_steps = 50
soak_min_s = 1
soak_max_s = 4
soak_tick_s = 0.1
soak_min_ratio = 0.5
soak_undecided = "go_on"
"""


class Replicas:
    """Scripted replicas as processes; one that dies is started again, with the drafter of its first start."""

    def __init__(self, workdir: Path, folder: Path, ports: Sequence[int]):
        self.ports, self._workdir, self._folder = list(ports), workdir, folder
        self._processes = [self._start(i) for i in range(len(ports))]
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def kill(self, i: int) -> None:
        """Kill one with -9."""
        self._processes[i].send_signal(signal.SIGKILL)

    def refuse(self, i: int, version: str | None) -> None:
        """Have one refuse a version, or none."""
        path = self._workdir / f"refuses-{i}"
        path.write_text(version) if version else path.unlink(missing_ok=True)

    def close(self) -> None:
        """End all."""
        self._closed.set()
        self._keeper.join()
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        script = ROOT / "bench" / "oracles" / "scripted_replica.py"
        command = [sys.executable, str(script), str(self.ports[i]), str(self._folder), "1"]
        command += ["--swap-s", str(SWAP_S), "--reply-s", str(REPLY_S)]
        return subprocess.Popen([*command, "--refuses-file", str(self._workdir / f"refuses-{i}")])

    def _keep(self) -> None:
        while not self._closed.wait(0.05):
            for i, process in enumerate(self._processes):
                if process.poll() is not None:
                    time.sleep(RESTART_S)
                    self._processes[i] = self._start(i)


def fleet_kills(
    workdir: Path, *, kills: int = 10, seed: int = 0, clients: int = 6, port: int = 18310
) -> dict[str, Any]:
    """What became of as many rollouts as it takes for so many kills of the controller.

    ``kills``, ``rounds``, ``replica_kills``, ``refusals``; ``not_converged`` (rounds that ended with several versions,
    with another one than they should, or with an alias that names another), ``min_serving`` of 3 replicas,
    ``num_requests``, ``lost_requests`` (what the library's own retries did not cover) and ``errors``.
    """
    workdir, moments = Path(workdir), random.Random(seed)
    config, model, folder = _fleet(workdir, [port, port + 1, port + 2])
    replicas = Replicas(workdir, folder, [port, port + 1, port + 2])
    found: Counter[str] = Counter(kills=0, rounds=0, replica_kills=0, refusals=0, not_converged=0, reconciled=0)
    try:
        _wait_for(lambda: all(_version(one) == "1" for one in replicas.ports))
        with Balancer(replicas.ports) as url:
            watchers = Watchers(url, replicas.ports, clients)
            while found["kills"] < kills:
                trouble = TROUBLES[found["rounds"] % len(TROUBLES)]
                found.update(_round(config, model, replicas, moments, trouble=trouble))
            watchers.stop()
    finally:
        replicas.close()
    told = {"min_serving": watchers.min_serving(), "num_requests": watchers.num_requests}
    return {**found, **told, "lost_requests": len(watchers.lost), "errors": watchers.lost[:3]}


def _round(config: Path, model: str, replicas: Replicas, moments: random.Random, *, trouble: str) -> dict[str, int]:
    """One rollout to what doesn't serve, by as many controllers as it takes; the first one is killed."""
    served = _version(replicas.ports[0])
    wanted, victim = ("2" if served == "1" else "1"), moments.randrange(3)
    if trouble == "a replica refuses":
        replicas.refuse(victim, wanted)
    root = config.parent / "root"
    terms = _terms(root)
    controller = _deploy(config, wanted)
    _wait_for(lambda: _terms(root) != terms or controller.poll() is not None)
    if trouble == "a replica is killed":
        threading.Timer(moments.uniform(0, 3), replicas.kill, (victim,)).start()
    time.sleep(moments.uniform(0, 5))
    killed = controller.poll() is None
    controller.kill()
    controller.wait()
    refused = trouble == "a replica refuses"
    status = _deploy(config, wanted).wait(timeout=_RUN_S)
    replicas.refuse(victim, None)
    _wait_for(lambda: all(map(_version, replicas.ports)))
    before = [_version(one) for one in replicas.ports]
    # What `slipstream watch --reconcile` does by itself: the replica may have come back after the last look.
    reconciled = _deploy(config, "--reconcile").wait(timeout=_RUN_S) if trouble == "a replica is killed" else 0
    expected = served if refused else wanted
    versions = [_version(one) for one in replicas.ports]
    well = versions == [expected] * 3 and (status == 0) is not refused and reconciled == 0
    well = well and _champion(config, model) == expected
    return {
        "kills": int(killed),
        "rounds": 1,
        "replica_kills": int(trouble == "a replica is killed"),
        "refusals": int(refused),
        "not_converged": int(not well),
        "reconciled": int(before != versions),
    }


def _fleet(workdir: Path, ports: Sequence[int]) -> tuple[Path, str, Path]:
    """A configuration, the model's name, and the folder of version 1, the champion; version 2 has passed the gate."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny

    from jobs.adopt import first_champion
    from jobs.registry import PASSED, Registry
    from pipeline.config import load_config
    from tests.jobs.checkpoints import as_checkpoint

    target = tiny.tiny_target(workdir / "target")
    path = workdir / "slipstream.toml"
    urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in ports)
    path.write_text(
        f'root = "{workdir / "root"}"\n[target]\nmodel = "{target}"\ndtype = "float32"\n'
        f"[serving]\nreplicas = [{urls}]\n{_DEPLOY}"
    )
    config = load_config(path)
    made = [tiny.tiny_drafter(workdir / f"d{seed}", target, seed=seed) for seed in (1, 2)]
    first, second = (as_checkpoint(config.root, folder) for folder in made)
    first_champion(config, first)
    registry, model = Registry(None, config.root), config.model_name
    registry.set_state(model, registry.register(model, second), PASSED, reason="measured elsewhere")
    registry.set_alias(model, "approved", "2")
    return path, model, registry.download(model, "1")


def _deploy(config: Path, what: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "jobs" / "deploy.py"), what, "--config", str(config)]
    environment = {**os.environ, "SLIPSTREAM_CONTROL_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    with open(config.parent / "deploy.log", "a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def _terms(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "in_charge").glob("0*.json"))


def _version(port: int) -> str | None:
    from serving.deploy import status
    from serving.errors import DeployError

    try:
        return status(f"http://127.0.0.1:{port}", TOKEN, timeout_s=5)["version"]
    except DeployError:
        return None


def _champion(config: Path, model: str) -> str | None:
    from jobs.registry import Registry

    return Registry(None, config.parent / "root").alias(model, "champion")


def _wait_for(holds: Callable[[], Any], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.02)
