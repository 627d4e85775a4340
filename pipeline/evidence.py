"""Whether a measurement can carry a verdict at all, before anyone reads a lift off it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.acceptance import FAILED, accepted_drafts_per_step
from pipeline.config import GateConfig
from pipeline.criteria import Reason

_COUNTS = ("num_tokens", "num_drafts", "num_accepted_tokens", "weight")
_NAMED = 4  # so many are named, the others counted
MAX_FAILED_SHARE = 0.05


def sound(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of requests whose counts are numbers: what can be computed with, whatever ``measurement`` says of it."""
    wrong = {row["row_id"] for row in rows if any(map(_is_wrong, (row[name] for name in _COUNTS)))}
    return [row for row in rows if row["row_id"] not in wrong]


def measurement(
    policy: GateConfig, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any], *, num_clusters: int
) -> list[Reason]:
    """Every condition of a verdict; one that fails leaves none. Rows are of both prompt sets."""
    gate_rows = [row for row in rows if row["prompt_set"] == "gate"]
    return [
        _numbers(rows, measured),
        _paired(rows, measured),
        _clusters(policy, num_clusters),
        _flagged(policy, gate_rows),
        *_failed(policy, rows),
        _accepted_anything(measured),
        *_environment(policy, measured["champion"]),
    ]


def _numbers(rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> Reason:
    wrong = [*_not_finite(measured, "")]
    wrong += [
        f"row {row['row_id']} of the {row['role']}: {name}" for row in rows for name in _COUNTS if _is_wrong(row[name])
    ]
    message = "every figure is a number"
    if wrong:
        named = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
        message = f"not a number, or negative: {named}; measure again, and see the server's log"
    return Reason("numbers", message, len(wrong), 0, not wrong, "cannot_say")


def _is_wrong(count: float | None) -> bool:
    return count is None or not math.isfinite(count) or count < 0


def _not_finite(value: Any, name: str) -> Iterator[str]:
    """The names of all floats in nested figures that are NaN or infinite. None is "not measured", and allowed."""
    if isinstance(value, float) and not math.isfinite(value):
        yield name
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _not_finite(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _not_finite(one, f"{name}[{i}]")


def _paired(rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> Reason:
    roles = len(measured)
    seen: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        seen.setdefault((row["prompt_set"], row["row_id"]), set()).add(row["role"])
    single = [name for (_, name), found in seen.items() if len(found) != roles]
    message = "every request was answered with every drafter"
    if single:
        message = f"{len(single)} requests, such as {single[0]}, were not answered with every drafter; measure again"
    return Reason("paired", message, len(single), 0, not single, "cannot_say", n=len(seen))


def _clusters(policy: GateConfig, n: int) -> Reason:
    needed = policy.min_clusters
    message = f"{n} conversations, {needed} are needed"
    if n < needed:
        message += f": cannot say; collect about {needed - n} more"
    return Reason("clusters", message, n, needed, n >= needed, "cannot_say", n=n)


def _flagged(policy: GateConfig, rows: Sequence[Mapping[str, Any]]) -> Reason:
    unusable: dict[str, str] = {row["row_id"]: row["flag"] for row in rows if row["flag"] is not None}
    weights = {row["row_id"]: 0.0 if _is_wrong(row["weight"]) else row["weight"] for row in rows}
    num_requests, weight = len(weights), math.fsum(weights.values())
    share, limit = len(unusable) / max(1, num_requests), policy.max_flagged_share
    of_traffic = math.fsum(weights[name] for name in unusable) / weight if weight else 0.0
    kinds = ", ".join(
        f"{flag} {sum(one == flag for one in unusable.values())}" for flag in sorted({*unusable.values()})
    )
    message = f"{share:.0%} of requests left out ({kinds or 'none'}), at most {limit:.0%} may be"
    if of_traffic > share:
        message = f"{of_traffic:.0%} of the traffic, " + message
    share = max(share, of_traffic)
    if share > limit:
        message += ": what is left is a selection"
    return Reason("flagged", message, share, limit, share <= limit, "cannot_say", n=num_requests)


def _failed(policy: GateConfig, rows: Sequence[Mapping[str, Any]]) -> list[Reason]:
    """Requests without a reply, by role: too many leave no verdict, more than the champion's are the challenger's."""
    sent: dict[str, int] = {}
    failed: dict[str, dict[tuple[str, str], int]] = {}  # role → request → its sitting
    for row in rows:
        sent[row["role"]] = sent.get(row["role"], 0) + 1
        own = failed.setdefault(row["role"], {})
        if row["flag"] == FAILED:
            own[row["prompt_set"], row["row_id"]] = row["block"]
    reasons = []
    for role, own in failed.items():
        share = len(own) / sent[role]
        message = f"{role}: {len(own)} of {sent[role]} requests failed, at most {MAX_FAILED_SHARE:.0%} may"
        passed, verdict = share <= MAX_FAILED_SHARE, "cannot_say"
        if role == "challenger" and (p := _p_fails_more(own, failed.get("champion", {}))) <= policy.error_rate:
            passed, verdict = False, "reject"
            message += f"; shown to be more than the champion's (p = {p:.2g})"
        if not passed:
            message += "; see the server's log"
        reasons.append(Reason(f"failed:{role}", message, share, MAX_FAILED_SHARE, passed, verdict, n=sent[role]))
    return reasons


def _p_fails_more(own: Mapping[tuple[str, str], int], champions: Mapping[tuple[str, str], int]) -> float:
    """One-sided p-value of McNemar's exact test over the requests that one of the two failed; 1 for a single sitting.

    A server that was down for a moment fails many requests of one sitting, whichever drafter it has.
    """
    from scipy import stats

    only, others = own.keys() - champions.keys(), champions.keys() - own.keys()
    if len({own[name] for name in only}) < 2:
        return 1.0
    return float(stats.binomtest(len(only), len(only) + len(others), alternative="greater").pvalue)


def _accepted_anything(measured: Mapping[str, Any]) -> Reason:
    accepted = sum(one["num_accepted_tokens"] for one in measured.values())
    nothing = "" if accepted > 0 else ": suspect the environment, not the drafters"
    message = f"{accepted} draft tokens accepted by all drafters together{nothing}"
    return Reason("accepted_anything", message, accepted, 1, accepted > 0, "cannot_say")


def _environment(policy: GateConfig, champion: Mapping[str, Any]) -> list[Reason]:
    """The incumbent against its own record: far below it, the server is to blame and no verdict is given."""
    recorded = champion.get("recorded_acceptance_length")
    if recorded is None:
        return []
    served = accepted_drafts_per_step(champion["num_drafts"], champion["num_accepted_tokens"])
    limit = policy.min_recorded_share * (recorded - 1)
    passed = served >= limit
    message = f"champion accepts {served:.3f} drafts a step here, {recorded - 1:.3f} when it was last measured"
    if not passed:
        message += ": environment suspect; check engine version, flags and drafter folder before anything else"
    return [Reason("environment", message, served, limit, passed, "cannot_say", n=champion["num_drafts"])]
