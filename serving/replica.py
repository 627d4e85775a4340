"""One replica as a client sees it: its control endpoint, and probe prompts through its routes."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any

from serving.answers import read_bounded
from serving.errors import DeployError, NoAnswerError

MAX_ANSWER_BYTES = 16 << 20


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


def status(url: str, token: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """What a replica serves: version, folder, sha256, live_fingerprint a worker, paused.

    Raises: DeployError when it cannot be reached or says that it is not well.
    """
    answer = call(url, token, "status", None, timeout_s)
    if answer["status"] != "ok":
        raise DeployError(f"{url}: {answer.get('reason')}")
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
        try:
            ids, num_steps, num_accepted = _reply(data)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DeployError(f"{url}: a probe prompt got no completion ({type(error).__name__}: {error})")
        token_ids.append(ids)
        steps, accepted = steps + num_steps, accepted + num_accepted
    return Probe(tuple(token_ids), steps, accepted)


def _reply(data: Any) -> tuple[tuple[int, ...], int, int]:
    """Token ids, verification steps and accepted tokens of one completion."""
    spec = (data.get("metrics") or {}).get("speculative_decoding") or {}
    ids = data["choices"][0].get("token_ids") or ()
    counts = spec.get("num_spec_steps") or 0, spec.get("num_accepted_draft_tokens") or 0
    return (tuple(map(int, ids)), *map(int, counts))


def call(url: str, token: str, what: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """What /slipstream/``what`` answers; with a body it is a POST. Raises: NoAnswerError."""
    headers = {"Authorization": f"Bearer {token}"}
    code, data = _post(f"{url}/slipstream/{what}", body, headers, timeout_s)
    if not isinstance(data, dict) or "status" not in data:
        raise NoAnswerError(f"{url}: /slipstream/{what} answered HTTP {code}: {str(data)[:300]}")
    return data


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: another host must not get the token, nor a GET take the place of an order."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _post(url: str, body: dict[str, Any] | None, headers: dict[str, str], timeout_s: float) -> tuple[int, Any]:
    payload, deadline = None if body is None else json.dumps(body).encode(), time.monotonic() + timeout_s
    try:
        request = urllib.request.Request(url, data=payload, headers={"Content-Type": "application/json", **headers})
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return answer.status, _parse(_whole(answer, deadline))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parse(_whole(error.fp, deadline))
    except OSError as error:
        raise NoAnswerError(f"{url}: not reachable ({error}); is the server up, and is this its address?")
    except (HTTPException, ValueError) as error:  # killed amid its answer, no HTTP, or a URL that is none
        raise NoAnswerError(f"{url}: its answer cannot be used ({type(error).__name__}: {error})")


def _whole(answer: HTTPResponse, deadline: float) -> bytes:
    """The body. Raises: OSError when it takes too long or is too large; HTTPException when it breaks off."""
    try:
        body = read_bounded(answer, max_bytes=MAX_ANSWER_BYTES, deadline=deadline)
    except TimeoutError:
        raise TimeoutError("timed out amid its answer")
    if len(body) > MAX_ANSWER_BYTES:
        raise OSError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    if answer.length:
        raise IncompleteRead(body, answer.length)
    return body


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
