"""A record as what the watch counts: when, by which drafter, for whom, in which cell, how many drafts were accepted.

What is asked is kept as a sketch: how often pieces of five characters fall into each of so many buckets, by a keyed
hash. Nobody can read a request out of that, and two kinds of requests still differ in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline import slices
from pipeline.canonical import named_subject
from pipeline.collect_config import CollectConfig
from pipeline.collected import require_allowed
from pipeline.config import Config
from pipeline.errors import Rejected
from pipeline.on_record import inclusion_probability
from pipeline.shingles import shingles
from pipeline.sketches import shingle_seed
from pipeline.sources import Record
from pipeline.split import SplitKey
from pipeline.tombstones import read_tombstones
from pipeline.watch.hours import Cell

BUCKETS = 64
UNKNOWN_VERSION = "unknown"
OTHER = "other"
"""A value of a dimension that is no name."""
_MAX_NAME = 64  # characters: what is longer is a text, and belongs on no page and in no label
_MAX_CHARS = 4000


@dataclass(frozen=True)
class Served:
    """One served request."""

    ts: float
    version: str
    conversation: str
    """Keyed hash of the subject, or of how the conversation began."""
    cell: Cell
    weight: float
    """How many requests the record stands for."""
    num_drafts: int
    num_accepted_tokens: int
    sketch: np.ndarray  # [BUCKETS] uint8


@dataclass(frozen=True)
class Reader:
    """How records are read: by the same policy as for collecting."""

    dimensions: tuple[str, ...]
    key: SplitKey
    policy: CollectConfig
    erased: frozenset[str] = frozenset()
    expires_before: float | None = None
    """Records from before this time are not counted, nor are those without one."""

    @classmethod
    def of(cls, config: Config, key: SplitKey, *, now: float) -> "Reader":
        """By the configuration, without erased subjects and what has expired."""
        erased = frozenset(one.subject for one in read_tombstones(config.root))
        ttl_days = config.retention.ttl_days
        oldest = None if ttl_days is None else now - 86400 * ttl_days
        return cls(config.watch.dimensions, key, config.collect, erased, oldest)

    def served(self, record: Record) -> Served:
        """What a record says. Raises: Rejected with the reason."""
        body = record.body
        require_allowed(record, self.policy, expires_before=self.expires_before)
        ts, (drafts, accepted) = record.time(), _counts(body)
        try:
            messages = _messages(body)
            words = "\n".join(slices.text_of(one) for one in messages if one["role"] == "user")
            conversation = self.key.hash("conversation", named_subject(body) or f"opening:{_opening(messages)}")
            if conversation in self.erased:
                raise Rejected("erased_subject")
            return Served(
                ts=ts,
                version=str(body.get("drafter_version") or UNKNOWN_VERSION),
                conversation=conversation,
                cell=self._cell(body, messages),
                weight=1 / inclusion_probability(body),
                num_drafts=drafts,
                num_accepted_tokens=accepted,
                sketch=sketch(words, seed=shingle_seed(self.key)),
            )
        except Rejected:
            raise
        except Exception as error:  # a record that nobody thought of must not end the watch; its text is not told
            raise Rejected(f"unexpected_{type(error).__name__}")

    def _cell(self, body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Cell:
        params = body["params"] if isinstance(body.get("params"), dict) else body
        arguments = params.get("chat_template_kwargs")
        route = str(body.get("slice") or body.get("route") or "default")
        found = slices.collected_slices(
            body, route=route, messages=messages, template_args=arguments if isinstance(arguments, dict) else {}
        )
        tokens, temperature = _num_prompt_tokens(body), params.get("temperature")
        warmth = temperature if isinstance(temperature, int | float) else None
        derived = json.loads(slices.served_slices(None, num_prompt_tokens=tokens or 0, temperature=warmth))
        found = {**found, **derived, **({"length": slices.UNKNOWN} if tokens is None else {})}
        return tuple(_name(found.get(name, slices.UNKNOWN)) for name in self.dimensions)


def _name(value: str) -> str:
    return value if len(value) <= _MAX_NAME and value.isprintable() else OTHER


def sketch(words: str, *, seed: int) -> np.ndarray:  # [BUCKETS] uint8
    """How often pieces of a text fall into each bucket; at most 255 times."""
    pieces = shingles(words[:_MAX_CHARS], seed=seed)
    return np.minimum(np.bincount(pieces % BUCKETS, minlength=BUCKETS), 255).astype(np.uint8)


def _counts(body: Mapping[str, Any]) -> tuple[int, int]:
    """Drafts and accepted drafts of all the request's choices, by the engine's own count."""
    counts = body.get("acceptance")
    if not isinstance(counts, Mapping):
        raise Rejected("no_acceptance")
    drafts, accepted = counts.get("num_drafts"), counts.get("num_accepted_tokens")
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in (drafts, accepted)):
        raise Rejected("malformed_acceptance")
    if drafts == 0:
        raise Rejected("no_step")
    return drafts, accepted


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = body.get("messages")
    if isinstance(found, list):
        return [one for one in found if isinstance(one, dict) and isinstance(one.get("role"), str)]
    prompt = body.get("prompt")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    return next((slices.text_of(one) for one in messages if one["role"] == "user"), "")


def _num_prompt_tokens(body: Mapping[str, Any]) -> int | None:
    reply = body.get("response")
    if not isinstance(reply, Mapping):
        return None
    ids, usage = reply.get("prompt_token_ids"), reply.get("usage")
    if isinstance(ids, list) and ids:
        return len(ids)
    tokens = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None
