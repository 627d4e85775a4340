"""Measurements made up so that the right verdict is known beforehand."""

import json

from pipeline.config import GateConfig

FAST = GateConfig(resamples=1000)
SETTINGS = {"dtype": "bfloat16", "concurrency": 8, "chat_template": "a"}
BLOCKS = 6


def rows_of(lengths, *, conversations=40, route="mail", steps=20, prompt_set="gate", weight=1):
    """Each conversation: one reply a role, of exactly ``lengths[role] * steps`` tokens after the prefill's.

    A little, balanced difference between conversations keeps the intervals from being points.
    """
    rows = []
    for i in range(conversations):
        for role, length in lengths.items():
            tokens = round(length * steps) + (i % 3 - 1) * (role == "challenger")
            accepted = tokens - steps
            rows.append(
                {
                    "role": role,
                    "prompt_set": prompt_set,
                    "row_id": f"{route}-{i}",
                    "conversation": f"{route}-{i}",
                    "slices": json.dumps({"route": route}),
                    "weight": weight,
                    "block": i % BLOCKS,
                    "num_tokens": tokens + 1,
                    "num_drafts": steps,
                    "num_accepted_tokens": accepted,
                    "accepted_per_pos": per_position(accepted, steps),
                    "latency_s": 1.0,
                    "ttft_s": None,
                    "itl_s": [],
                    "finish_reason": "stop",
                    "flag": None,
                }
            )
    return rows


def per_position(accepted, steps):
    """Counts that add up to ``accepted``, each position accepting the same share of what gets there."""
    rate = min((n / 1000 for n in range(1000)), key=lambda r: abs(r + r**2 + r**3 + r**4 - accepted / steps))
    later = [round(steps * rate**k) for k in (2, 3, 4)]
    return [accepted - sum(later), *later]


def sittings_of(speed, *, noise=0.01, itl_p99_s=None):
    """``speed`` tokens/s in every sitting, but for a little that balances out."""
    return [
        {
            "block": block,
            "num_tokens": 1000,
            "wall_s": 1000 / speed * (1 + noise * (block % 3 - 1)),
            "itl_p99_s": itl_p99_s and itl_p99_s * (1 + noise * (block % 2)),
            "ttft_p99_s": None,
        }
        for block in range(BLOCKS)
    ]


def measured_of(rows, *, walk=1.0, **of_role):
    """What an evaluation would have written beside the rows; ``of_role`` changes single roles."""
    measured = {}
    for role in dict.fromkeys(row["role"] for row in rows):
        own = [row for row in rows if row["role"] == role and row["prompt_set"] == "gate"]
        drafts, accepted = (sum(row[name] for row in own) for name in ("num_drafts", "num_accepted_tokens"))
        per_pos = [sum(counts) for counts in zip(*(row["accepted_per_pos"] for row in own), strict=True)]
        measured[role] = {
            "num_requests": len(own),
            "num_tokens": sum(row["num_tokens"] for row in own),
            "num_drafts": drafts,
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": per_pos,
            "num_accepted_and_emitted": accepted,
            "served_acceptance_length": 1 + accepted / drafts if drafts else None,
            "emitted_tokens_per_step": None,
            "tokens_per_s": 100.0,
            "sittings": sittings_of(100.0),
            "latency": {"ttft_p50_s": None, "ttft_p99_s": None, "itl_p50_s": None, "itl_p99_s": None},
            "walk": {
                "num_drafts": drafts * 1000,
                "num_accepted_tokens": round(accepted * 1000 * walk),
                "num_accepted_tokens_per_pos": [round(n * 1000 * walk) for n in per_pos],
            },
            "flagged": {},
            "slices": {},
            "general": None,
            "settings": SETTINGS,
            "num_replies_different": 0,
            **of_role.get(role, {}),
        }
    return measured


def reason(verdict, code):
    (found,) = [r for r in verdict.reasons if r.code == code]
    return found


def failed(verdict):
    return [r.code for r in verdict.reasons if r.passed is False]


BETTER = {"champion": 2.0, "challenger": 2.6, "control": 2.2}
