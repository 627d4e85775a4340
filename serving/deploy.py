"""Swap replicas through their control endpoints, prove the new drafter on each, or put the old one back."""

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.errors import DeployError

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Probe:
    """What the probe prompts got from one version."""

    token_ids: tuple[tuple[int, ...], ...]
    num_steps: int
    """Verification steps; none means that nothing was drafted."""
    num_accepted_tokens: int

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, the engine's own counts."""
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else None


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


@dataclass(frozen=True)
class Replica:
    """One server that deploy may swap."""

    url: str
    token: str


def status(url: str, token: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """What a replica serves: version, folder, sha256, live_fingerprint a worker, paused.

    Raises: DeployError when it cannot be reached or says that it is not well.
    """
    answer = _call(url, token, "status", None, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer['reason']}")
    return answer


def engine(url: str, token: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """A replica's engine settings (serving/engine/settings.py). Raises: DeployError when it cannot be asked."""
    answer = _call(url, token, "engine", None, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer.get('reason')}")
    return answer["engine"]


def reset_prefix_cache(url: str, token: str, *, timeout_s: float = 60.0) -> bool:
    """Whether the cache is empty now: it stays as it is while requests hold blocks. Raises: DeployError."""
    answer = _call(url, token, "reset", {}, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer.get('reason')}")
    return answer["prefix_cache_reset"]


def swap_replica(
    url: str,
    token: str,
    *,
    folder: Path,
    version: str,
    sha256: str,
    expected_version: str,
    probe: Sequence[dict[str, Any]],
    allow_changed_outputs: bool = False,
    timeout_s: float = 600.0,
) -> SwapOutcome:
    """The outcome of a swap that was verified on this replica.

    Before and after, the probe prompts run greedily, one at a time; the live fingerprint must have changed
    and be the same on every worker, drafting must be live, and the replies must be the same tokens.
    In bf16, where batch shapes move near-ties, ``allow_changed_outputs`` counts them without failing.

    Raises: DeployError when the swap was refused, or did not prove itself and the old drafter is back.
    """
    before_status = status(url, token, timeout_s=timeout_s)
    before = run_probe(url, probe, timeout_s=timeout_s)
    order = {"folder": str(folder), "version": version, "sha256": sha256, "expected_version": expected_version}
    answer = _call(url, token, "swap", order, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer['reason']}")
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
        prefix_cache_reset=answer["prefix_cache_reset"],
        changed_outputs=changed,
        before=before,
        after=after,
    )


def roll_out(
    replicas: Sequence[Replica],
    *,
    folder: Path,
    version: str,
    sha256: str,
    expected_version: str,
    probe: Sequence[dict[str, Any]],
    allow_changed_outputs: bool = False,
    timeout_s: float = 600.0,
) -> list[SwapOutcome]:
    """The outcomes of swapping one replica after the other, the canary replica first.

    Raises: DeployError at the first failure, after the replicas that had swapped were put back.
    """
    done: list[tuple[Replica, SwapOutcome]] = []
    for replica in replicas:
        try:
            outcome = swap_replica(
                replica.url,
                replica.token,
                folder=folder,
                version=version,
                sha256=sha256,
                expected_version=expected_version,
                probe=probe,
                allow_changed_outputs=allow_changed_outputs,
                timeout_s=timeout_s,
            )
        except DeployError as error:
            raise DeployError(f"{error}. {_put_all_back(done, timeout_s)}")
        logger.info("%s serves drafter %s, paused %.2f s", replica.url, version, outcome.pause_s)
        done.append((replica, outcome))
    return [outcome for _, outcome in done]


def run_probe(url: str, probe: Sequence[dict[str, Any]], *, timeout_s: float = 600.0) -> Probe:
    """Exact tokens and counts of the probe prompts, greedy, one request at a time.

    Raises: DeployError when one fails.
    """
    token_ids, steps, accepted = [], 0, 0
    for request in probe:
        body = {**request, "temperature": 0, "stream": False, "return_token_ids": True}
        route = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        code, data = _post(url + route, body, {}, timeout_s)
        if code != 200:
            raise DeployError(f"{url}: a probe prompt got HTTP {code}: {str(data)[:300]}")
        token_ids.append(tuple(data["choices"][0].get("token_ids") or ()))
        spec = (data.get("metrics") or {}).get("speculative_decoding") or {}
        steps += spec.get("num_spec_steps") or 0
        accepted += spec.get("num_accepted_draft_tokens") or 0
    return Probe(tuple(token_ids), steps, accepted)


def _problem(
    before: dict[str, Any], after: dict[str, Any], order: dict[str, str], probe: Probe, num_changed: int
) -> str | None:
    if after["version"] != order["version"] or after["sha256"] != order["sha256"]:
        return f"says it serves {after['version']} ({after['sha256']}) after a swap to {order['version']}"
    if len(set(after["live_fingerprint"])) != 1:
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


def _put_back(url: str, token: str, old: dict[str, Any], version: str, timeout_s: float) -> str:
    order = {"folder": old["folder"], "version": old["version"], "sha256": old["sha256"], "expected_version": version}
    try:
        answer = _call(url, token, "swap", order, timeout_s)
    except DeployError as error:
        return f"and the old drafter could not be put back ({error}): take this replica out and restart it"
    if answer["status"] != "ok":
        return f"and the old drafter could not be put back ({answer['reason']}): take this replica out and restart it"
    return f"version {old['version']} serves there again"


def _put_all_back(done: Sequence[tuple[Replica, SwapOutcome]], timeout_s: float) -> str:
    notes = []
    for replica, outcome in reversed(done):
        old = {
            "folder": outcome.previous_folder,
            "version": outcome.previous,
            "sha256": outcome.previous_sha256,
        }
        notes.append(f"{replica.url}: {_put_back(replica.url, replica.token, old, outcome.version, timeout_s)}")
    return "; ".join(notes) or "No other replica had been swapped"


def _call(url: str, token: str, what: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    code, data = _post(f"{url}/slipstream/{what}", body, headers, timeout_s)
    if not isinstance(data, dict) or "status" not in data:
        raise DeployError(f"{url}: /slipstream/{what} answered HTTP {code}: {str(data)[:300]}")
    return data


def _post(url: str, body: dict[str, Any] | None, headers: dict[str, str], timeout_s: float) -> tuple[int, Any]:
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=payload, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, _parse(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, _parse(error.read())
    except OSError as error:
        raise DeployError(f"{url}: not reachable ({error}); is the server up, and is this its address?")


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
