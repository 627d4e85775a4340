"""Swap one replica through its control endpoint, prove the new drafter there, or put the old one back.

Many replicas: serving/fleet/controller.py.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.errors import DeployError, LookAgainError, NoAnswerError
from serving.replica import Probe, call, engine, reset_prefix_cache, run_probe, status

__all__ = ["Probe", "SwapOutcome", "engine", "reset_prefix_cache", "run_probe", "status", "swap_replica"]

logger = logging.getLogger("slipstream")

_LOOK_AGAIN = ("busy", "epoch", "paused", "shut", "version")


@dataclass(frozen=True)
class SwapOutcome:
    """A swap that took, and what it changed."""

    url: str
    version: str
    previous: str
    previous_folder: str
    previous_sha256: str
    pause_s: float
    live_fingerprint: str
    previous_live_fingerprint: str
    prefix_cache_reset: bool
    changed_outputs: int
    """Probe prompts whose greedy tokens differ before and after; float32 must have none."""
    before: Probe
    after: Probe
    how: str = "in_place"
    """in_place, or restart: then ``pause_s`` is the time until the replica was up again."""
    closed_s: float = 0.0
    """How long new requests waited in front of the engine, until the drafter had proved itself there."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the probes' tokens."""
        plain = asdict(self)
        for name, probe in (("before", self.before), ("after", self.after)):
            plain[name] = {
                "num_steps": probe.num_steps,
                "num_accepted_tokens": probe.num_accepted_tokens,
                "acceptance_length": probe.acceptance_length,
            }
        return plain


def swap_replica(
    url: str,
    token: str,
    *,
    folder: Path,
    version: str,
    sha256: str,
    expected_version: str,
    expected_epoch: str | None = None,
    probe: Sequence[dict[str, Any]],
    allow_changed_outputs: bool = False,
    timeout_s: float = 600.0,
    how: str = "auto",
    pause: str = "keep",
    prefix_cache: str = "keep",
) -> SwapOutcome:
    """The outcome of a swap that was verified on this replica; ``how``, ``pause``, ``prefix_cache``: see SwapOrder.

    The replica itself runs the probe prompts behind its closed door. Before and after they run here too, as any client
    would, greedily, one at a time; the live fingerprint must have changed and be the same on every worker, drafting
    must be live, and the replies must be the same tokens. In bf16, where batch shapes move near-ties,
    ``allow_changed_outputs`` counts them without failing. A replica that cannot swap in place is started again.
    ``expected_epoch``: what its status said when this was decided; None, what it says now.

    Raises: DeployError when the swap was refused, or did not prove itself and the old drafter is back; LookAgainError
    when something else serves there than was expected, or another swap runs.
    """
    before_status = status(url, token, timeout_s=timeout_s)
    before = run_probe(url, probe, timeout_s=timeout_s)
    order = {"folder": str(folder), "version": version, "sha256": sha256, "expected_version": expected_version}
    asked = {"allow_changed_outputs": allow_changed_outputs, "probe": list(probe), "how": how, "pause": pause}
    epoch = before_status.get("epoch", "") if expected_epoch is None else expected_epoch
    asked |= {"prefix_cache": prefix_cache, "expected_epoch": epoch}
    answer = _order(url, token, order | asked, before_status, timeout_s)
    try:
        after_status = status(url, token, timeout_s=timeout_s)
        after = run_probe(url, probe, timeout_s=timeout_s)
        changed = sum(a != b for a, b in zip(before.token_ids, after.token_ids, strict=True))
        problem = _problem(before_status, after_status, order, after, changed if not allow_changed_outputs else 0)
    except DeployError as error:
        problem = str(error)
    if problem is not None:
        raise DeployError(f"{url}: {problem}; {_put_back(url, token, before_status, version, timeout_s)}")
    return SwapOutcome(
        url=url,
        version=version,
        previous=before_status["version"],
        previous_folder=before_status["folder"],
        previous_sha256=before_status["sha256"],
        pause_s=answer["pause_s"],
        live_fingerprint=after_status["live_fingerprint"][0],
        previous_live_fingerprint=before_status["live_fingerprint"][0],
        prefix_cache_reset=answer.get("prefix_cache_reset", False),
        changed_outputs=changed,
        before=before,
        after=after,
        how=answer.get("how", "in_place"),
        closed_s=answer.get("closed_s", 0.0),
    )


def _problem(
    before: dict[str, Any], after: dict[str, Any], order: dict[str, str], probe: Probe, num_changed: int
) -> str | None:
    if after["version"] != order["version"] or after["sha256"] != order["sha256"]:
        return f"says it serves {after['version']} ({after['sha256']}) after a swap to {order['version']}"
    if len(set(after["live_fingerprint"])) != 1 and are_whole(after):
        return f"workers have different live weights: {after['live_fingerprint']}"
    new_weights = before["sha256"] != after["sha256"]
    if new_weights and after["live_fingerprint"][0] in before["live_fingerprint"]:
        return f"the live weights did not change ({after['live_fingerprint'][0]})"
    if after["paused"]:
        return "the engine is still paused"
    if probe.token_ids and not probe.num_steps:
        return "the probe prompts ran without one draft"
    if num_changed:
        return f"{num_changed} of {len(probe.token_ids)} probe prompts got other greedy tokens than before"
    return None


def are_whole(status: dict[str, Any]) -> bool:
    """Whether each worker has all of the drafter, and so the same live weights: shards have their own."""
    return "swap" not in status or status["swap"]["how"] is not None


def _order(url: str, token: str, order: dict[str, Any], before: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The replica's answer once the drafter serves there. Raises: DeployError."""
    started = time.monotonic()
    try:
        answer = call(url, token, "swap", order, timeout_s)
    except NoAnswerError as error:
        answer = _found_out(url, token, order, error, timeout_s)
    if answer["status"] == "restarting":
        _wait_for_start(url, token, order, before, timeout_s)
        return {**answer, "pause_s": round(time.monotonic() - started, 2)}
    if answer["status"] != "ok":
        kind = LookAgainError if answer.get("code") in _LOOK_AGAIN else DeployError
        raise kind(f"{url}: {answer.get('reason')}")
    return {"pause_s": round(time.monotonic() - started, 2), **answer}


def _found_out(url: str, token: str, order: dict[str, Any], error: DeployError, timeout_s: float) -> dict[str, Any]:
    """What became of an order whose answer was lost. Raises: DeployError where it was not carried out."""
    deadline = time.monotonic() + timeout_s
    while (now := status(url, token)).get("swapping"):
        if time.monotonic() > deadline:
            raise DeployError(f"{error}; its swap does not end")
        time.sleep(0.2)
    if now.get("door") == "shut":
        return {"status": "restarting", "how": "restart"}
    if (now["version"], now["sha256"]) != (order["version"], order["sha256"]):
        raise DeployError(f"{error}; version {now['version']} serves there")
    logger.warning("%s; it serves drafter %s all the same", error, order["version"])
    return {"status": "ok", "how": "in_place"}


def _wait_for_start(url: str, token: str, order: dict[str, Any], before: dict[str, Any], timeout_s: float) -> None:
    """Return once the replica is up with the new drafter. Raises: DeployError, also when the old one came up."""
    deadline, now = time.monotonic() + timeout_s, before
    while now.get("epoch") == before.get("epoch"):  # until it is gone and up again
        if time.monotonic() > deadline:
            raise DeployError(
                f"{url}: not up again {timeout_s:g} s after a restart with {order['version']} was ordered"
            )
        time.sleep(0.5)
        try:
            now = status(url, token, timeout_s=10.0)
        except DeployError:
            continue
    if (now["version"], now["sha256"]) != (order["version"], order["sha256"]):
        raise DeployError(
            f"{url}: did not come up with version {order['version']}; version {now['version']} serves there, its log "
            "says why"
        )


def _put_back(url: str, token: str, old: dict[str, Any], version: str, timeout_s: float) -> str:
    order: dict[str, Any] = {key: old[key] for key in ("folder", "version", "sha256")}
    # It served before: nothing that the other one did to the probes is to stand in its way.
    order |= {"expected_version": version, "probe": [], "allow_changed_outputs": True}
    try:
        epoch = status(url, token, timeout_s=timeout_s).get("epoch")
        _order(url, token, order | {"expected_epoch": epoch or ""}, {"epoch": epoch}, timeout_s)
    except DeployError as error:
        return f"and the old drafter could not be put back ({error}): take this replica out and restart it"
    return f"version {old['version']} serves there again"
