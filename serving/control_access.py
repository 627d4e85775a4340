"""Who may use the control endpoint, from where, how often, and which folders it may open.

| variable | what |
|---|---|
| ``SLIPSTREAM_CONTROL_TOKEN_FILE`` | a file with the bearer token, read at every call, so that it can be changed |
| ``SLIPSTREAM_CONTROL_TOKEN`` | the token itself, where no file is named; without either the endpoint is off |
| ``SLIPSTREAM_CONTROL_PEERS`` | networks that callers may come from, comma-separated; without it loopback alone |
| ``SLIPSTREAM_DRAFTER_ROOTS`` | folders, colon-separated, under which drafters may lie |
| ``SLIPSTREAM_AUDIT_LOG`` | a file that a line of JSON an order is appended to, beside the server's log |

vLLM's own ``--api-key`` does not guard middleware.
"""

import hmac
import ipaddress
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.errors import ServingError

logger = logging.getLogger("vllm.slipstream")

TOKEN_ENV, TOKEN_FILE_ENV = "SLIPSTREAM_CONTROL_TOKEN", "SLIPSTREAM_CONTROL_TOKEN_FILE"
PEERS_ENV, ROOTS_ENV, AUDIT_ENV = "SLIPSTREAM_CONTROL_PEERS", "SLIPSTREAM_DRAFTER_ROOTS", "SLIPSTREAM_AUDIT_LOG"
LOOPBACK = "127.0.0.0/8,::1/128"
CALLS, CALLS_PER_S = 60.0, 10.0
WRONG_TOKENS, WRONG_TOKENS_PER_S = 5.0, 0.2
MAX_PEERS = 1024


class Refusal(Exception):
    """An answer other than success: HTTP status, and what the caller is told."""

    def __init__(self, http_status: int, reason: str, **details: Any):
        super().__init__(reason)
        self.http_status = http_status
        self.body = {"status": "refused" if http_status < 500 else "failed", "reason": reason, **details}


class Rate:
    """So many at once, then so many a second, for each caller."""

    def __init__(self, at_once: float, per_s: float):
        self._at_once, self._per_s = at_once, per_s
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> bool:
        """Whether this one is within the rate."""
        now = time.monotonic()
        left, at = self._left.pop(caller, (self._at_once, now))
        left = min(self._at_once, left + (now - at) * self._per_s)
        self._left[caller] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > MAX_PEERS:
            self._left.popitem(last=False)
        return left >= 1


class Access:
    """The endpoint's rules, from the environment. Raises: ServingError for a network that cannot be read."""

    def __init__(self, environment: Mapping[str, str]):
        self._token, self._token_file = environment.get(TOKEN_ENV, "").strip(), environment.get(TOKEN_FILE_ENV, "")
        self._audit_file = environment.get(AUDIT_ENV, "")
        self.roots = [Path(root).resolve() for root in environment.get(ROOTS_ENV, "").split(":") if root]
        peers = environment.get(PEERS_ENV) or LOOPBACK
        try:
            self._peers = [ipaddress.ip_network(one.strip(), strict=False) for one in peers.split(",") if one.strip()]
        except ValueError as error:
            raise ServingError(f"{PEERS_ENV}={peers}: {error}; expected networks such as 10.0.0.0/8, comma-separated")
        self._calls, self._wrong = Rate(CALLS, CALLS_PER_S), Rate(WRONG_TOKENS, WRONG_TOKENS_PER_S)

    def admit(self, scope: Mapping[str, Any]) -> str:
        """The caller's address. Raises: Refusal when it may not call: not from there, not so often, not without token.

        Callers with a wrong token have a rate of their own, so that they cannot keep the right one out.
        """
        peer = (scope.get("client") or ("local", 0))[0]
        if not self._is_allowed(peer):
            if self._wrong.take(peer):  # on record, but no faster than that
                self.audit(peer, action="admit", outcome="refused", http_status=403)
            raise Refusal(403, f"not allowed from this address; {PEERS_ENV} lists the networks")
        token = self._current_token()
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], f"Bearer {token}".encode()):
            if not self._wrong.take(peer):
                raise Refusal(429, "too many calls without the right token; wait")
            self.audit(peer, action="admit", outcome="refused", http_status=401)
            raise Refusal(401, "the bearer token is missing or wrong")
        if not self._calls.take(peer):
            raise Refusal(429, f"more than {CALLS_PER_S:g} calls a second; wait")
        return peer

    def folder(self, text: str) -> Path:
        """The drafter's folder with every link resolved, nothing in it opened. Raises: Refusal outside the roots."""
        refused = Refusal(403, f"the folder is not under an allowed folder; {ROOTS_ENV} lists them", code="root")
        try:
            named = Path(text)
            folder = named.resolve()
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
            raise refused
        if not named.is_absolute() or not any(folder.is_relative_to(root) for root in self.roots):
            raise refused
        return folder

    def audit(self, peer: str, **what: Any) -> None:
        """Put an order and its outcome on record: names, hashes and reasons, never a token or anyone's text."""
        line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "peer": peer, **what})
        logger.log(logging.ERROR if what.get("http_status", 0) >= 500 else logging.INFO, "control: %s", line)
        if self._audit_file:
            try:
                file = os.open(self._audit_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    os.write(file, line.encode() + b"\n")
                finally:
                    os.close(file)
            except OSError as error:
                logger.error("control: the audit log cannot be written: %s", error)

    def _is_allowed(self, peer: str) -> bool:
        if peer == "local":  # a socket of this machine's file system
            return True
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._peers)

    def _current_token(self) -> str:
        token = self._token
        if self._token_file:
            try:
                token = Path(self._token_file).read_text().strip()
            except (OSError, ValueError):
                raise Refusal(503, f"not configured: the file that {TOKEN_FILE_ENV} names cannot be read")
        if not token:
            raise Refusal(503, f"not configured: start the server with {TOKEN_ENV} or {TOKEN_FILE_ENV} set")
        return token
