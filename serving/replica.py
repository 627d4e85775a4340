"""One replica as a client sees it: its control endpoint, and probe prompts through its routes."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from serving.errors import DeployError, UnansweredError

MAX_ANSWER_BYTES = 64 * 2**20


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
class Replica:
    """One server that deploy may swap."""

    url: str
    token: str


def status(url: str, token: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """What a replica serves: version, folder, sha256, live_fingerprint a worker, paused.

    Raises: DeployError when it cannot be reached or says that it is not well.
    """
    answer = call(url, token, "status", None, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer['reason']}")
    return answer


def engine(url: str, token: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """A replica's engine settings (serving/engine/settings.py). Raises: DeployError when it cannot be asked."""
    answer = call(url, token, "engine", None, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer.get('reason')}")
    return answer["engine"]


def reset_prefix_cache(url: str, token: str, *, timeout_s: float = 60.0) -> bool:
    """Whether the cache is empty now: it stays as it is while requests hold blocks. Raises: DeployError."""
    answer = call(url, token, "reset", {}, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer.get('reason')}")
    return answer["prefix_cache_reset"]


def run_probe(url: str, probe: Sequence[dict[str, Any]], *, timeout_s: float = 600.0) -> Probe:
    """Exact tokens and counts of the probe prompts, greedy, one request at a time.

    Raises: DeployError when one fails.
    """
    token_ids, steps, accepted = [], 0, 0
    for request in probe:
        body = {**request, "temperature": 0, "stream": False, "return_token_ids": True}
        route = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        key = os.environ.get("VLLM_API_KEY")  # where the servers ask for vLLM's own
        code, data = _post(url + route, body, {"Authorization": f"Bearer {key}"} if key else {}, timeout_s)
        if code != 200:
            raise DeployError(f"{url}: a probe prompt got HTTP {code}: {str(data)[:300]}")
        token_ids.append(tuple(data["choices"][0].get("token_ids") or ()))
        spec = (data.get("metrics") or {}).get("speculative_decoding") or {}
        steps += spec.get("num_spec_steps") or 0
        accepted += spec.get("num_accepted_draft_tokens") or 0
    return Probe(tuple(token_ids), steps, accepted)


def call(url: str, token: str, what: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """What /slipstream/``what`` answers; with a body it is a POST. Raises: DeployError when it is no answer of ours."""
    headers = {"Authorization": f"Bearer {token}"}
    code, data = _post(f"{url}/slipstream/{what}", body, headers, timeout_s)
    if not isinstance(data, dict) or "status" not in data:
        raise DeployError(f"{url}: /slipstream/{what} answered HTTP {code}: {str(data)[:300]}")
    return data


def _post(url: str, body: dict[str, Any] | None, headers: dict[str, str], timeout_s: float) -> tuple[int, Any]:
    payload = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=payload, headers={"Content-Type": "application/json", **headers})
    try:
        with _answer(request, timeout_s) as answer:
            read = answer.read(MAX_ANSWER_BYTES + 1)
            code, missing = answer.status, getattr(answer, "length", None)
    except (OSError, HTTPException) as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, HTTPException) else error
        raise UnansweredError(f"{url}: not reachable ({why}); is the server up, and is this its address?")
    if len(read) > MAX_ANSWER_BYTES:
        raise DeployError(f"{url}: its answer is over {MAX_ANSWER_BYTES} bytes; is this a server of ours?")
    if missing:
        raise UnansweredError(f"{url}: its answer breaks off, {missing} bytes before its end")
    return code, _parse(read)


def _answer(request: urllib.request.Request, timeout_s: float) -> Any:
    """The open answer, whatever its status."""
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
