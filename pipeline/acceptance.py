"""Acceptance, counted: from one reply's metrics to totals. The only place where lengths are derived.

Two lengths, never compared with each other. ``acceptance_length`` is the engine's own: it is taken before
a reply is trimmed at its end or its limit, so the last step over-counts. ``emitted_tokens_per_step`` counts
what the client got; the gate decides on it. Both are ratios of sums: averages are never averaged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline import slices

# Why a reply's counts are not used.
FAILED = "failed"
NO_METRICS = "no_metrics"
NO_STEP = "no_step"
COUNTS_DISAGREE = "counts_disagree"
OVERCOUNT = "overcount"
UNDERCOUNT = "undercount"
LOOP = "loop"

MAX_REPEAT_SHARE = 0.5
_NGRAM = 4
_MIN_NGRAMS = 8


@dataclass(frozen=True)
class RequestAcceptance:
    """The counts of one reply, and why they are not used where they cannot be."""

    num_tokens: int
    """Emitted, the prefill's own token included."""
    num_drafts: int
    """Verification steps; the prefill is none."""
    num_accepted_tokens: int
    """The engine's own count, before the reply was trimmed."""
    accepted_per_pos: tuple[int, ...]
    """Entry k: drafts whose position k was accepted."""
    flag: str | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over replies, from which lengths are derived."""

    num_requests: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_accepted_and_emitted: int = 0
    """Accepted drafts that reached the clients: what a walk, which knows no token past a reply's end, counts."""

    @property
    def acceptance_length(self) -> float:
        """The engine's own length of these replies."""
        return acceptance_length(self.num_drafts, self.num_accepted_tokens)

    @property
    def emitted_tokens_per_step(self) -> float:
        """The trimmed length of these replies."""
        return emitted_tokens_per_step(self.num_tokens, self.num_drafts, self.num_requests)

    def as_dict(self) -> dict[str, Any]:
        """The counts and both lengths, as a report stores them; None where there was no draft."""
        return {
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
            "num_drafts": self.num_drafts,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "num_accepted_and_emitted": self.num_accepted_and_emitted,
            "served_acceptance_length": self.acceptance_length if self.num_drafts else None,
            "emitted_tokens_per_step": self.emitted_tokens_per_step if self.num_drafts else None,
        }


def acceptance_length(num_drafts: int, num_accepted: int) -> float:
    """Mean acceptance length, the bonus token counted; NaN without a draft.

    Source: vllm/v1/spec_decode/metrics.py (mean acceptance length = 1 + accepted / drafts).
    """
    return 1 + accepted_drafts_per_step(num_drafts, num_accepted)


def accepted_drafts_per_step(num_drafts: int, num_accepted: int) -> float:
    """Accepted draft tokens a verification step; NaN without a draft. Walk and serving are compared on this."""
    return num_accepted / num_drafts if num_drafts else math.nan


def emitted_tokens_per_step(num_tokens: int, num_drafts: int, num_requests: int) -> float:
    """Tokens that clients got a verification step; NaN without a draft.

    Each reply's first token came from its prefill, so a reply of N tokens contributes N - 1.
    """
    return (num_tokens - num_requests) / num_drafts if num_drafts else math.nan


def count_reply(
    metrics: Mapping[str, Any] | None, token_ids: Sequence[int], *, max_repeat_share: float = MAX_REPEAT_SHARE
) -> RequestAcceptance:
    """The counts of one reply from its ``metrics.speculative_decoding`` and its exact ids.

    A reply whose counts contradict themselves, cannot have come from its length, or come from a loop is
    flagged with the reason; its counts are kept for the record.
    """
    if metrics is None:
        return RequestAcceptance(len(token_ids), 0, 0, (), NO_METRICS)
    histogram = [int(count) for count in metrics["acceptance_histogram"]]
    counted = RequestAcceptance(
        num_tokens=len(token_ids),
        num_drafts=int(metrics["num_spec_steps"]),
        num_accepted_tokens=int(metrics["num_accepted_draft_tokens"]),
        accepted_per_pos=tuple(sum(histogram[k + 1 :]) for k in range(len(histogram) - 1)),
    )
    flag = _contradiction(counted, metrics.get("per_step_accepted"))
    if flag is None and is_loop(token_ids, max_repeat_share=max_repeat_share):
        flag = LOOP
    return replace(counted, flag=flag)


def _contradiction(counted: RequestAcceptance, per_step: Sequence[int] | None) -> str | None:
    if counted.num_drafts == 0:
        return NO_STEP
    if sum(counted.accepted_per_pos) != counted.num_accepted_tokens:
        return COUNTS_DISAGREE
    if per_step is not None and (len(per_step), sum(per_step)) != (counted.num_drafts, counted.num_accepted_tokens):
        return COUNTS_DISAGREE
    # Every step gives its accepted drafts and one more token; all but the trimmed ones reach the client.
    trimmed = counted.num_drafts + counted.num_accepted_tokens - (counted.num_tokens - 1)
    if trimmed < 0:
        return UNDERCOUNT
    return OVERCOUNT if trimmed > len(counted.accepted_per_pos) else None


def is_loop(token_ids: Sequence[int], *, max_repeat_share: float = MAX_REPEAT_SHARE) -> bool:
    """Whether a larger share of a reply's 4-grams repeat earlier ones: drafting a loop is easy and says nothing."""
    ngrams = [tuple(token_ids[i : i + _NGRAM]) for i in range(len(token_ids) - _NGRAM + 1)]
    if len(ngrams) < _MIN_NGRAMS:
        return False
    return 1 - len(set(ngrams)) / len(ngrams) > max_repeat_share


def total(rows: Iterable[Mapping[str, Any]]) -> Totals:
    """The sums over rows of schemas.ACCEPTANCE, whatever their flags: the caller chooses the rows."""
    num_requests = num_tokens = num_drafts = num_accepted = num_emitted = 0
    per_pos: Counter[int] = Counter()
    width = 0
    for row in rows:
        num_requests += 1
        num_tokens += row["num_tokens"]
        num_drafts += row["num_drafts"]
        num_accepted += row["num_accepted_tokens"]
        num_emitted += row["num_accepted_tokens"] - max(0, _trimmed(row) - 1)
        width = max(width, len(row["accepted_per_pos"]))
        per_pos.update(dict(enumerate(row["accepted_per_pos"])))
    positions = tuple(per_pos[k] for k in range(width))
    return Totals(num_requests, num_tokens, num_drafts, num_accepted, positions, num_emitted)


def _trimmed(row: Mapping[str, Any]) -> int:
    """Tokens of the last step that the client didn't get: the target's own one first, then accepted drafts."""
    return row["num_drafts"] + row["num_accepted_tokens"] - (row["num_tokens"] - 1)


def traffic(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The two lengths weighted back to the traffic: a prompt that was served nine times counts nine times."""
    num_requests = num_tokens = num_drafts = num_accepted = 0
    for row in rows:
        num_requests += row["weight"]
        num_tokens += row["weight"] * row["num_tokens"]
        num_drafts += row["weight"] * row["num_drafts"]
        num_accepted += row["weight"] * row["num_accepted_tokens"]
    return {
        "num_requests": num_requests,
        "served_acceptance_length": acceptance_length(num_drafts, num_accepted) if num_drafts else None,
        "emitted_tokens_per_step": emitted_tokens_per_step(num_tokens, num_drafts, num_requests)
        if num_drafts
        else None,
    }


def by_slice(rows: Iterable[Mapping[str, Any]]) -> dict[str, Totals]:
    """``dimension=value`` → sums of that slice; a request is in one slice of every dimension."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in slices.names(row["slices"]):
            groups.setdefault(name, []).append(row)
    return {name: total(groups[name]) for name in sorted(groups)}


def count_plain(token_ids: Sequence[int], *, max_repeat_share: float = MAX_REPEAT_SHARE) -> RequestAcceptance:
    """The counts of a reply of the target alone: every token after the prefill's was a step of its own."""
    counted = RequestAcceptance(len(token_ids), max(0, len(token_ids) - 1), 0, ())
    if counted.num_drafts == 0:
        return replace(counted, flag=NO_STEP)
    return replace(counted, flag=LOOP) if is_loop(token_ids, max_repeat_share=max_repeat_share) else counted


def flagged(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Flag → replies whose counts are not used for it."""
    return dict(sorted(Counter(row["flag"] for row in rows if row["flag"] is not None).items()))


def unflagged_everywhere(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of requests that no role's reply was flagged for: what a paired comparison may use."""
    unusable = {row["row_id"] for row in rows if row["flag"] is not None}
    return [row for row in rows if row["row_id"] not in unusable]
