"""Two ways to get a drafter onto one replica: by its control endpoint, or by a command that restarts it."""

import hashlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serving.deploy import Probe, run_probe, swap_replica
from serving.errors import DeployError
from serving.fleet.replicas import Address, Drafter, Seen, look

_TAIL = 300  # characters of a command's output that a message quotes
_RESTART_TICK_S = 1.0


class Way(Protocol):
    """How one replica takes a drafter."""

    def __call__(self, url: str, goal: Drafter, seen: Seen, reference: str | None) -> dict[str, Any]:
        """What it cost, by name: pause_s, changed_outputs, live_fingerprint, and more where it is known.

        ``seen`` is the replica as it was when this was decided; it was up. ``reference`` is the hash of its probe
        tokens before the change; None accepts other tokens. Raises: DeployError when the replica did not take it,
        LookAgainError when it is not as it was seen.
        """
        ...


@dataclass(frozen=True)
class ByEndpoint:
    """The control endpoint's swap: in place, or by a restart where the replica's own supervisor does that."""

    token: str
    probe: Sequence[dict[str, Any]]
    timeout_s: float = 600.0

    def __call__(self, url: str, goal: Drafter, seen: Seen, reference: str | None) -> dict[str, Any]:
        """See Way."""
        outcome = swap_replica(
            url,
            self.token,
            folder=Path(goal.folder),
            version=goal.version,
            sha256=goal.sha256,
            expected_version=seen.drafter.version,
            expected_epoch=seen.epoch,
            probe=self.probe,
            allow_changed_outputs=reference is None,
            timeout_s=self.timeout_s,
        )
        known = ("url", "version", "previous", "previous_folder", "previous_sha256", "previous_live_fingerprint")
        return {name: value for name, value in outcome.as_dict().items() if name not in known}


@dataclass(frozen=True)
class ByCommand:
    """A command that restarts a replica with a drafter, and a wait until it serves it."""

    command: Sequence[str]
    """Arguments in which {url}, {version}, {folder} and {sha256} are replaced; no shell reads them."""
    token: str
    probe: Sequence[dict[str, Any]]
    timeout_s: float = 900.0

    def __call__(self, url: str, goal: Drafter, seen: Seen, reference: str | None) -> dict[str, Any]:
        """See Way."""
        began = time.monotonic()
        self._restart(url, goal)
        seen = look(Address(url, url), self.token)
        while not goal.same_as(seen.drafter):
            if time.monotonic() - began > self.timeout_s:
                now = seen.why or f"serves version {seen.drafter.version if seen.drafter else '-'}"
                raise DeployError(f"{url}: {self.timeout_s:g} s after its restart: {now}, expected {goal.version}")
            time.sleep(_RESTART_TICK_S)
            seen = look(Address(url, url), self.token)
        down_s = round(time.monotonic() - began, 3)
        proof = verify(url, seen, self.probe, reference=reference, timeout_s=self.timeout_s)
        return {**proof, "pause_s": down_s, "restarted": True}

    def _restart(self, url: str, goal: Drafter) -> None:
        words = {"url": url, **goal.as_dict()}
        command = [_filled(argument, words) for argument in self.command]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeployError(f"{url}: its restart command could not be run ({error})")
        if done.returncode != 0:
            told = (done.stderr or done.stdout).strip()[-_TAIL:]
            raise DeployError(f"{url}: its restart command ended with status {done.returncode}: {told}")


def verify(
    url: str,
    seen: Seen,
    probe: Sequence[dict[str, Any]],
    *,
    reference: str | None,
    stale: str | None = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """What a replica that serves its goal already shows: it drafts, and its greedy tokens are those from before.

    ``stale``: the live fingerprint that it must not have any more. Raises: DeployError when it doesn't show it.
    """
    if stale is not None and seen.live == stale:
        raise DeployError(f"{url}: the live weights did not change ({stale})")
    found = run_probe(url, probe, timeout_s=timeout_s)
    if probe and not found.num_steps:
        raise DeployError(f"{url}: the probe prompts ran without one draft")
    if reference is not None and tokens_hash(found) != reference:
        raise DeployError(f"{url}: the probe prompts got other greedy tokens than before the change")
    return {"pause_s": 0.0, "changed_outputs": 0, "live_fingerprint": seen.live}


def tokens_hash(probe: Probe) -> str:
    """SHA-256 of exact greedy tokens."""
    return hashlib.sha256(json.dumps(probe.token_ids).encode()).hexdigest()


def _filled(argument: str, words: Mapping[str, str]) -> str:
    for name, word in words.items():
        argument = argument.replace(f"{{{name}}}", word)
    return argument
