"""Sittings → what was measured: one row a request and role, and of every role the sums, the speed and the tails."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline import acceptance, slices
from pipeline.acceptance import RequestAcceptance, count_plain, count_reply
from pipeline.sittings import Reply, Sitting, Sittings

Walks = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Role → row id → counts of the walk over that row's reply."""

_SETS = ("gate", "general")


def rows_of(sittings: Sittings, *, plain: Sequence[str] = (), max_repeat_share: float) -> list[dict[str, Any]]:
    """Rows of schemas.ACCEPTANCE; ``plain`` roles are the target alone, where every token is a step."""
    rows = []
    for (block, role), sitting in sittings.items():
        answered = zip(
            _SETS, (sitting.prompts, sitting.general), (sitting.replies, sitting.general_replies), strict=True
        )
        for prompt_set, prompts, replies in answered:
            for prompt, reply in zip(prompts, replies, strict=True):
                counted = _count(reply, plain=role in plain, max_repeat_share=max_repeat_share)
                rows.append(
                    {
                        "role": role,
                        "prompt_set": prompt_set,
                        **{name: prompt[name] for name in ("row_id", "conversation", "slices", "weight")},
                        "block": block,
                        **counted.__dict__,
                        "latency_s": reply.latency_s,
                        "ttft_s": reply.ttft_s,
                        "itl_s": list(reply.itl_s),
                        "finish_reason": reply.finish_reason,
                    }
                )
    return rows


def _count(reply: Reply, *, plain: bool, max_repeat_share: float) -> RequestAcceptance:
    if reply.error:
        return RequestAcceptance(0, 0, 0, (), acceptance.FAILED)
    if plain:
        return count_plain(reply.token_ids, max_repeat_share=max_repeat_share)
    return count_reply(reply.spec, reply.token_ids, max_repeat_share=max_repeat_share)


def measured_of(
    rows: Sequence[Mapping[str, Any]],
    sittings: Sittings,
    *,
    walks: Walks,
    settings: Mapping[str, Any],
    recorded: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Role → sums over the requests that no role was flagged for, speed, tails, slices and walk."""
    gate = [row for row in rows if row["prompt_set"] == "gate"]
    general = acceptance.unflagged_everywhere([row for row in rows if row["prompt_set"] == "general"])
    usable = acceptance.unflagged_everywhere(gate)
    measured = {}
    for role in dict.fromkeys(row["role"] for row in rows):
        own = [row for row in usable if row["role"] == role]
        everything = [row for row in gate if row["role"] == role]
        parts = [_sitting(block, sitting) for (block, r), sitting in sittings.items() if r == role]
        wall_s = sum(part["wall_s"] for part in parts)
        others = [row for row in general if row["role"] == role]
        measured[role] = {
            **acceptance.total(own).as_dict(),
            "traffic": acceptance.traffic(own),
            "tokens_per_s": sum(part["num_tokens"] for part in parts) / wall_s,
            "wall_s": round(wall_s, 3),
            "latency": latency([r for (_, one), s in sittings.items() if one == role for r in s.replies]),
            "sittings": parts,
            "walk": _walk(own, walks.get(role)),
            "flagged": acceptance.flagged(everything),
            "slices": {name: part.as_dict() for name, part in acceptance.by_slice(own).items()},
            "general": acceptance.total(others).as_dict() if others else None,
            "num_replies_different": _different(sittings, role),
            "settings": dict(settings),
        }
    if recorded is not None:
        measured["champion"]["recorded_acceptance_length"] = recorded
    return measured


def latency(replies: Sequence[Reply]) -> dict[str, float | None]:
    """Seconds to the first token and between a client's arrivals; None where replies came whole."""
    first = [reply.ttft_s for reply in replies if reply.ttft_s is not None]
    gaps = [gap for reply in replies for gap in reply.itl_s]
    return {
        f"{name}_p{percent}_s": float(np.percentile(values, percent)) if values else None
        for name, values in (("ttft", first), ("itl", gaps))
        for percent in (50, 99)
    }


def _sitting(block: int, sitting: Sitting) -> dict[str, Any]:
    num_tokens = sum(len(reply.token_ids or ()) for reply in sitting.replies)
    tails = latency(sitting.replies)
    return {
        "block": block,
        "num_tokens": num_tokens,
        "wall_s": sitting.wall_s,
        **{name: tails[name] for name in ("ttft_p99_s", "itl_p99_s")},
    }


def _walk(rows: Sequence[Mapping[str, Any]], by_row: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """The walk's sums over exactly the requests that were served and counted, where all of them were walked."""
    walked = [(row, by_row[row["row_id"]]) for row in rows if row["row_id"] in by_row] if by_row else []
    if not walked:
        return None
    found: dict[str, Any] = {**_walk_sums([counts for _, counts in walked]), "slices": {}, "served": {}}
    found["served"] = acceptance.total([row for row, _ in walked]).as_dict()
    for name in sorted({name for row, _ in walked for name in slices.names(row["slices"])}):
        found["slices"][name] = _walk_sums([counts for row, counts in walked if name in slices.names(row["slices"])])
    return found


def _walk_sums(walks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(w[name] for w in walks) for name in ("num_replies", "num_tokens", "num_drafts")}
    sums["num_accepted_tokens"] = sum(w["num_accepted_tokens"] for w in walks)
    positions = zip(*(w["num_accepted_tokens_per_pos"] for w in walks), strict=True)
    sums["num_accepted_tokens_per_pos"] = [sum(counts) for counts in positions]
    sums["acceptance_length"] = acceptance.acceptance_length(sums["num_drafts"], sums["num_accepted_tokens"])
    counts = (sums[name] for name in ("num_tokens", "num_drafts", "num_replies"))
    sums["emitted_tokens_per_step"] = acceptance.emitted_tokens_per_step(*counts)
    return sums


def _different(sittings: Sittings, role: str) -> int:
    """Replies of this role whose tokens are not the champion's; a request that failed for either is no evidence."""
    different = 0
    for (block, one), sitting in sittings.items():
        if one == role:
            pairs = zip(sitting.replies, sittings[block, "champion"].replies, strict=True)
            different += sum(list(a.token_ids) != list(b.token_ids) for a, b in pairs if not (a.error or b.error))
    return different
