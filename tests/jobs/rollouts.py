"""A rollout over scripted replicas, without a registry: what jobs/rollout.py does, less the alias."""

import hashlib
import time
from dataclasses import replace

from bench.oracles.scripted_replica import TOKEN, Script, ScriptedReplica
from jobs.in_charge import in_charge
from jobs.ledger import Ledger, last_release, next_id
from pipeline.artifacts import Release
from serving.fleet.change import ByEndpoint
from serving.fleet.controller import Controller, Fleet
from serving.fleet.replicas import Drafter, static
from serving.fleet.rollout import ENDED, Policy, Rollout

PROBE = ({"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 3},)
POLICY = Policy(tick_s=0.01, dead_after_s=5.0)


def folders(root, *versions):
    """Version → a folder with weights of its own."""
    made = {}
    for version in versions:
        made[version] = root / "versions" / version
        made[version].mkdir(parents=True)
        (made[version] / "model.safetensors").write_bytes(f"weights of {version}".encode())
    return made


def start(count, folder, version="1", **script):
    """Replicas that serve this version."""
    return [ScriptedReplica(folder, version, Script(**script)) for _ in range(count)]


def drafter(folder, version):
    """The version that lies there."""
    return Drafter(version, str(folder), hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())


def fleet(replicas, discover=None):
    way = ByEndpoint(TOKEN, PROBE, timeout_s=20)
    return Fleet(discover or static([r.url for r in replicas]), TOKEN, PROBE, in_place=way, restart=way)


def roll(root, made, replicas, *, policy=POLICY, name=lambda: None, **more):
    """The release of version 2, begun or gone on with; ended already, it stays as it is."""
    with in_charge(root, "deploy") as term:
        last = last_release(root)
        if last is not None and last.phase in ENDED:
            return last
        rollout = Rollout(drafter(made["2"], "2"), drafter(made["1"], "1"), promise=more.pop("promise", None))
        release = last or Release(
            derivation_id=next_id(root, "2"),
            parents={},
            version="2",
            previous="1",
            reason="deploy",
            at="2026-01-01T00:00:00+00:00",
            phase="canary",
            target=rollout.target.as_dict(),
        )
        ledger = Ledger(root, release, term)
        fleet_ = more.pop("fleet", None) or fleet(replicas)
        Controller(fleet_, ledger, policy=policy, name=name, **more).run(ledger.rollout if last else rollout)
        return ledger.release


def with_policy(**changed):
    return replace(POLICY, **changed)


def wait_until(holds, timeout_s=20.0):
    """Return once it holds. Raises: AssertionError."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.005)
