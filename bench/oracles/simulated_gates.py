"""Gates whose truth is known: whole conversations of real records drawn again, one drafter's steps rescaled.

Records are rows of schemas.ACCEPTANCE of two real drafters. A gate draws conversations from them with replacement,
both drafters' replies together, so that replies, conversations and drafters keep their real spread and correlation.
The true lift is set by scaling the steps of the drafter that needs more of them, reply by reply, rounded up or down
at random so that the expectation is exact; the replies themselves stay as they are. Sittings take a time a step.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import acceptance, sequential
from pipeline.bootstrap import Interval, cluster_sums, resample
from pipeline.config import EvaluateConfig, GateConfig
from pipeline.decide import decide, settled
from pipeline.power import evidence
from pipeline.schemas import ACCEPTANCE

ROLES = ("champion", "challenger")
SETTINGS = {"dtype": "bfloat16", "concurrency": 8, "thinking": {"default": 1}}
NUM_BLOCKS = EvaluateConfig().blocks
_STEP_S = 0.01
_CHUNK = 10  # gates that a process simulates at a time
_SITTING_NOISE = 0.02  # standard deviation of the log of a sitting's time
POLICY = GateConfig(resamples=1000)  # enough for a level of 5%; beyond, the tail is continued


@dataclass(frozen=True)
class Records:
    """Conversations, each the paired rows of its requests."""

    conversations: list[list[dict[str, dict[str, Any]]]]  # request → role → row
    name: str

    @cached_property
    def lift(self) -> float:
        """The lift of the records as they are: what a gate of all the conversations in the world would find."""
        sums = {role: [0, 0] for role in ROLES}
        for conversation in self.conversations:
            for request in conversation:
                for role, row in request.items():
                    sums[role][0] += row["weight"] * (row["num_tokens"] - 1)
                    sums[role][1] += row["weight"] * row["num_drafts"]
        (a, b), (c, d) = sums["challenger"], sums["champion"]
        return (a / b) / (c / d)

    @property
    def num_requests(self) -> int:
        """Requests of all conversations."""
        return sum(map(len, self.conversations))


def read(path: Path) -> Records:
    """The records in a file of schemas.ACCEPTANCE: the gate set's requests that neither drafter was flagged for."""
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(path).cast(ACCEPTANCE).to_pylist() if row["prompt_set"] == "gate"]
    rows = [row for row in acceptance.unflagged_everywhere(rows) if row["role"] in ROLES]
    paired: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        paired.setdefault(row["conversation"], {}).setdefault(row["row_id"], {})[row["role"]] = row
    conversations = [list(requests.values()) for requests in paired.values()]
    return Records(conversations, f"{path.name}, {len(rows) // 2} requests")


@dataclass(frozen=True)
class Gate:
    """One simulated gate."""

    rows: list[dict[str, Any]]
    rng: random.Random = field(repr=False)
    speed_ratio: float = 1.0
    """Of the time a step takes, champion over challenger, on top of what the lift gives."""

    def measured(self, rows: Sequence[Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
        """What an evaluation writes beside these rows, the walk in agreement."""
        rows, noise = self.rows if rows is None else rows, random.Random(repr(self.rng.getstate()[1][:3]))
        found = {}
        for role in ROLES:
            own = [row for row in rows if row["role"] == role]
            total = acceptance.total(own).as_dict()
            step_s = _STEP_S / (self.speed_ratio if role == "challenger" else 1)
            sittings = []
            for block in range(NUM_BLOCKS):
                tokens = sum(row["num_tokens"] for row in own if row["block"] == block)
                wall_s = sum(row["num_drafts"] for row in own if row["block"] == block) * step_s
                wall_s *= math.exp(noise.gauss(0, _SITTING_NOISE))
                sittings.append({"block": block, "num_tokens": tokens, "wall_s": wall_s, "itl_p99_s": None})
            sittings = [one for one in sittings if one["num_tokens"]]
            walk = {name: total[name] for name in ("num_drafts", "num_accepted_tokens_per_pos")}
            found[role] = total | {
                "tokens_per_s": sum(s["num_tokens"] for s in sittings) / sum(s["wall_s"] for s in sittings),
                "sittings": sittings,
                "walk": walk | {"num_accepted_tokens": total["num_accepted_and_emitted"]},
                "settings": SETTINGS,
            }
        return found


def gate(records: Records, *, num_prompts: int, lift: float, seed: int, speed_ratio: float | None = None) -> Gate:
    """A gate of about ``num_prompts`` requests, in whole conversations, with this true lift.

    ``speed_ratio``: the true ratio of tokens/s, if it isn't the lift.
    """
    rng = random.Random(seed)
    factor = lift / records.lift
    scaled, scale = ("champion", factor) if factor <= 1 else ("challenger", 1 / factor)
    rows, count, number = [], 0, 0
    while count < num_prompts:
        number += 1
        for i, request in enumerate(rng.choice(records.conversations)):
            for role, row in request.items():
                names = {"row_id": f"{number}-{i}", "conversation": f"c{number}", "block": count % NUM_BLOCKS}
                rows.append((_rescaled(row, scale, rng) if role == scaled else dict(row)) | names)
            count += 1
    return Gate(rows, rng, 1.0 if speed_ratio is None else speed_ratio / lift)


def _rescaled(row: Mapping[str, Any], scale: float, rng: random.Random) -> dict[str, Any]:
    """The same reply in ``scale`` times the steps, on average exactly: fewer steps, as many more accepted drafts."""
    exact = row["num_drafts"] * scale
    steps = max(1, math.floor(exact) + (rng.random() < exact % 1))
    accepted = row["num_accepted_tokens"] + row["num_drafts"] - steps
    return dict(row) | {
        "num_drafts": steps,
        "num_accepted_tokens": accepted,
        "accepted_per_pos": _spread(accepted, steps, len(row["accepted_per_pos"])),
    }


def _spread(accepted: int, steps: int, width: int) -> list[int]:
    """Counts by position that add up, each position accepting about the same share of what gets there."""
    low, high = 0.0, 1.0
    for _ in range(16):
        rate = (low + high) / 2
        low, high = (rate, high) if steps * sum(rate**k for k in range(1, width + 1)) < accepted else (low, rate)
    counts = [math.floor(steps * high**k) for k in range(1, width + 1)]
    for k in range(width):
        counts[k] += max(0, min(accepted - sum(counts), (counts[k - 1] if k else steps) - counts[k]))
    return counts


def passes(records: Records, *, num_prompts: int, lift: float, seed: int) -> tuple[bool, bool, int | None]:
    """(the lift was shown, the gate promoted, conversations that the power calculation asks for): one full sample."""
    one = gate(records, num_prompts=num_prompts, lift=lift, seed=seed)
    sums = cluster_sums(one.rows, "challenger", "champion")
    needs = {"gain": POLICY.worthwhile_lift, "level": POLICY.error_rate, "power": POLICY.power}
    needed = evidence(sums, num_prompts=num_prompts, **needs).needed_clusters
    # Without a lift that is shown nothing is promoted, whatever else holds.
    shown = _interval(one.rows, POLICY.error_rate).low > POLICY.min_lift
    return shown, shown and decide(POLICY, one.rows, one.measured()).decision == "promote", needed


def shows(records: Records, *, num_prompts: int, lift: float, seed: int) -> tuple[bool, int]:
    """(whether the lift was shown, conversations drawn): the lift alone, for counting how many it takes."""
    one = gate(records, num_prompts=num_prompts, lift=lift, seed=seed)
    interval = _interval(one.rows, POLICY.error_rate)
    return interval.low > POLICY.min_lift, interval.num_clusters


def stops(records: Records, *, num_prompts: int, lift: float, seed: int) -> tuple[str | None, float, bool]:
    """(what was settled, share of the prompts used, whether a look showed the lift): looks after every sitting."""
    one = gate(records, num_prompts=num_prompts, lift=lift, seed=seed)
    fractions: list[float] = []
    shown = False
    for block in range(NUM_BLOCKS):
        rows = [row for row in one.rows if row["block"] <= block]
        fractions.append(len(rows) / len(one.rows))
        found = _interval(rows, sequential.levels(POLICY.error_rate, tuple(fractions))[-1])
        shown = shown or found.low > POLICY.min_lift
        # Else nothing is settled: the product looks at this interval first as well.
        if not (found.low > POLICY.min_lift or found.high < POLICY.min_lift):
            continue
        if ended := settled(POLICY, rows, one.measured(rows), fractions=fractions):
            return ended, fractions[-1], shown
    return None, 1.0, shown


def _interval(rows: Sequence[Mapping[str, Any]], level: float) -> Interval:
    sums = cluster_sums(rows, "challenger", "champion")
    return resample(sums, resamples=POLICY.resamples, seed=POLICY.seed).interval(level)


def needed_by_simulation(
    records: Records, *, lift: float, guess: int, gates: int, power: float, workers: int
) -> tuple[float, list[tuple[int, float]]]:
    """The conversations at which the lift is shown with this power, and (conversations, share shown) on the way.

    Probit regression of the share on the root of the number: for a normal estimate it is a line.
    """
    from scipy import stats

    per_conversation = records.num_requests / len(records.conversations)
    seen = []
    for share in (0.6, 0.8, 1.0, 1.25, 1.5):
        prompts = round(guess * share * per_conversation)
        outcomes = many(shows, records, gates, workers, num_prompts=prompts, lift=lift)
        shown = sum(one for one, _ in outcomes) / gates
        seen.append((round(float(np.mean([n for _, n in outcomes]))), shown))
    usable = [(math.sqrt(n), stats.norm.ppf(share)) for n, share in seen if 0.02 < share < 0.98]
    slope, intercept = np.polyfit(*zip(*usable, strict=True), 1)
    return float(((stats.norm.ppf(power) - intercept) / slope) ** 2), seen


def many(simulate: Callable[..., Any], records: Records, gates: int, workers: int, **settings: Any) -> list[Any]:
    """The outcomes of so many gates, each with a seed of its own, in the order of the seeds."""
    if workers == 1:
        return [simulate(records, seed=seed, **settings) for seed in range(gates)]
    chunks = [range(start, min(start + _CHUNK, gates)) for start in range(0, gates, _CHUNK)]
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(_some, simulate, records, chunk, settings) for chunk in chunks]
        return [outcome for future in futures for outcome in future.result()]


def _some(
    simulate: Callable[..., Any], records: Records, seeds: Iterator[int], settings: Mapping[str, Any]
) -> list[Any]:
    return [simulate(records, seed=seed, **settings) for seed in seeds]
