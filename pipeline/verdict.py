"""What the gate found: the decision, why, and every figure that it rests on, for people and for machines."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from pipeline import slices
from pipeline.bootstrap import Interval
from pipeline.config import GateConfig
from pipeline.criteria import Reason
from pipeline.positions import Position
from pipeline.power import Evidence

_PROMPTS = 10  # that gained most, and that lost most


@dataclass(frozen=True)
class Verdict:
    """The decision, everything it rests on, and the intervals of all comparisons."""

    decision: str
    """promote, hold, dont_speculate, reject or cannot_say."""
    reasons: list[Reason]
    comparisons: dict[str, Interval]
    """"challenger/champion" and, with a control, "control/champion" and "challenger/control"."""
    slices: dict[str, Interval] = field(default_factory=dict)
    """``dimension=value`` → challenger over champion."""
    general: Interval | None = None
    speed: Interval | None = None
    """Tokens/s, challenger over champion; its clusters are sittings."""
    tail: Interval | None = None
    """99th percentile of the time between tokens, challenger over champion; likewise."""
    positions: list[Position] = field(default_factory=list)
    evidence: Evidence | None = None
    level: float | None = None
    """What every interval of a lift leaves on either side: the error rate, or this look's part of it."""
    speed_level: float | None = None
    looks: list[float] = field(default_factory=list)
    """Shares of the planned prompts at every look, this one last."""
    gained: list[dict[str, Any]] = field(default_factory=list)
    """Requests whose emitted tokens a step rose most: row_id, slices, champion, challenger."""
    lost: list[dict[str, Any]] = field(default_factory=list)
    """And fell most."""
    speculate_up_to: int | None = None
    """The highest measured concurrency where speculation pays, 0 for none; None: not measured."""
    recommended: dict[str, int] = field(default_factory=dict)
    """Concurrency → speculated tokens with the most tokens/s."""

    @property
    def lift(self) -> Interval:
        """Challenger over champion."""
        return self.comparisons["challenger/champion"]


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The body of decision.json: plain JSON, null where something could not be measured."""
    body = {name: _plain(value) for name, value in vars(verdict).items()}
    if verdict.evidence:
        body["evidence"] |= {"is_enough": verdict.evidence.is_enough, "more_prompts": verdict.evidence.more_prompts}
    ends = {"lift": verdict.lift.ratio, "ci_low": verdict.lift.low, "ci_high": verdict.lift.high}
    return {"decision": body.pop("decision"), **_plain(ends), **body}


def movers(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The requests that gained most in emitted tokens a step, and those that lost most; ids, never text."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["role"] in ("champion", "challenger") and row["num_drafts"] > 0:
            one = found.setdefault(row["row_id"], {"row_id": row["row_id"], "slices": row["slices"]})
            one[row["role"]] = (row["num_tokens"] - 1) / row["num_drafts"]
    moved = [one | {"change": one["challenger"] - one["champion"]} for one in found.values() if len(one) == 4]
    moved = [one for one in moved if math.isfinite(one["change"])]
    moved.sort(key=lambda one: (-one["change"], one["row_id"]))
    gained = [one for one in moved[:_PROMPTS] if one["change"] > 0]
    lost = [one for one in moved[: -_PROMPTS - 1 : -1] if one["change"] < 0]
    gained, lost = ([one | {"slices": slices.names(one["slices"])} for one in some] for some in (gained, lost))
    return gained, lost


def policy_id(policy: GateConfig) -> str:
    """12 hex digits that name a policy: equal exactly when every setting is."""
    return hashlib.sha256(json.dumps(policy.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:12]


def policy_toml(policy: GateConfig) -> str:
    """The resolved policy as a ``[gate]`` table that a configuration can hold again."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in policy.model_dump(mode="json").items()]
    return "\n".join([f"# policy {policy_id(policy)}", "[gate]", *lines]) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
