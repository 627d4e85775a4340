"""What a caller asks of the control endpoint: one swap, and how it is to go."""

import json
import re
from dataclasses import dataclass
from typing import Any

from serving.control_access import Refusal

PAUSES = ("keep", "drain")
PREFIX_CACHE = ("keep", "clear", "salt")
HOW = ("auto", "in_place", "restart")
MAX_PROBES, MAX_PROBE_TOKENS = 16, 256
# Versions reach environments, logs and metrics.
_FORMS = {
    "version": (re.compile(r"[!-~]{1,200}"), "1 to 200 printable ASCII characters without spaces"),
    "sha256": (re.compile(r"[0-9a-f]{64}"), "64 hex digits in lower case"),
}
_TEXTS = ("folder", "version", "sha256", "expected_version")


@dataclass(frozen=True)
class SwapOrder:
    """A drafter for a replica, if it serves what the caller thinks."""

    folder: str
    version: str
    sha256: str
    expected_version: str
    expected_epoch: str = ""
    """The replica's ``epoch`` as the caller saw it: an order that is repeated later, or too late, is refused."""
    pause: str = "keep"
    """keep: requests in flight freeze and go on; drain: they end first, with the drafter they began with."""
    prefix_cache: str = "keep"
    """keep: stale drafter keys cost acceptance alone; clear: empty it; salt: later requests share none of it."""
    how: str = "auto"
    """auto: in place where that is proven, else a restart."""
    probe: tuple[dict[str, Any], ...] | None = None
    """Requests that prove the new drafter before others reach it; None: the endpoint's own, (): none."""
    allow_changed_outputs: bool | None = None
    """Whether probes may get other greedy tokens than before; None: in half precision, where near-ties move."""


def parse_order(body: bytes) -> SwapOrder:
    """The order in a request's body. Raises: Refusal (400) for anything but one whole order."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON")
    known = set(SwapOrder.__dataclass_fields__)
    if not isinstance(data, dict) or not set(_TEXTS) <= set(data) <= known:
        optional = ", ".join(sorted(known - set(_TEXTS)))
        raise Refusal(400, f"expected a JSON object with {', '.join(_TEXTS)} and at most {optional}")
    if not all(isinstance(data[key], str) and data[key] for key in _TEXTS):
        raise Refusal(400, f"{', '.join(_TEXTS)} must be texts that are not empty")
    for key, (form, words) in _FORMS.items():
        if not form.fullmatch(data[key]):
            raise Refusal(400, f"{key} must be {words}")
    if not isinstance(data.get("expected_epoch", ""), str):
        raise Refusal(400, "expected_epoch must be a text, a status' epoch")
    for key, allowed in (("pause", PAUSES), ("prefix_cache", PREFIX_CACHE), ("how", HOW)):
        if data.get(key, allowed[0]) not in allowed:
            raise Refusal(400, f"{key} must be one of {', '.join(allowed)}")
    if data.get("allow_changed_outputs") not in (None, True, False):
        raise Refusal(400, "allow_changed_outputs must be true, false or null")
    if data.get("probe") is not None:
        data["probe"] = _probes(data["probe"])
    return SwapOrder(**data)


def _probes(probes: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(probes, list) or len(probes) > MAX_PROBES or not all(isinstance(one, dict) for one in probes):
        raise Refusal(400, f"probe must be a list of at most {MAX_PROBES} requests")
    for one in probes:
        if isinstance(one.get("messages"), list) == isinstance(one.get("prompt"), str | list):
            raise Refusal(400, "every probe needs messages or a prompt, a text or token ids")
        max_tokens = one.get("max_tokens", 1)
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or not 1 <= max_tokens <= MAX_PROBE_TOKENS:
            raise Refusal(400, f"a probe's max_tokens must be 1 to {MAX_PROBE_TOKENS}")
    return tuple(probes)
