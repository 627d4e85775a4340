"""Champion, challenger and control → AcceptanceReport: the same gate prompts, one engine, drafters swapped in turn.

Token ids go in exactly as they were; nothing is rendered again. The champion is always measured here, never
taken from an old file. What is stored are counts and row ids, never text.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import acceptance, gate
from pipeline.artifacts import AcceptanceReport, HiddenStateCache, package_versions, verify
from pipeline.config import Config
from pipeline.errors import FingerprintError, StageError
from pipeline.evidence import MAX_FAILED_SHARE
from pipeline.fingerprint import require_same_settings
from pipeline.gate_prompts import GatePrompts
from pipeline.kept_sittings import KeptSittings
from pipeline.measured import Walks, measured_of, rows_of
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import PartWriter, write_table
from pipeline.sittings import ROLES, Candidates, Course, Server, Sittings, alternate, with_restarts
from pipeline.stages import Artifact, complete

logger = logging.getLogger("slipstream")

STAGE_VERSION = 3
# What a drafter brings along: where drafters of several shapes are compared, these are no settings of the measurement.
_DRAFTERS_OWN = ("speculation",)
_PLAIN = "none"


class TooManyFailed(StageError):
    """What was measured is a selection: too many requests got no answer."""


def run(
    config: Config,
    candidates: Candidates,
    prompts: GatePrompts,
    *,
    server: Server,
    walk: Callable[[], Walks] = dict,
    states: Artifact[HiddenStateCache] | None = None,
    recorded: float | None = None,
) -> Artifact[AcceptanceReport]:
    """The served acceptance and speed of every candidate on the gate prompts, block by block, until it is settled.

    ``walk()`` gives, by role and row, the counts of the offline walk in ``states``; ``recorded`` is the champion's
    acceptance length as it was last measured. Both are kept for the gate. A candidate that is None is the target
    alone. Whatever happens, the server is left with the champion.

    Raises: FingerprintError when candidates or settings cannot be compared; StageError when too many requests fail.
    """
    _require_comparable(candidates, prompts)
    parents = {role: one.id if one else _PLAIN for role, one in candidates.items()} | prompts.parents
    parents |= {"states": states.id} if states else {}

    def build(folder: Path, derivation: str) -> AcceptanceReport:
        comparison = _Comparison(config, candidates, prompts, recorded=recorded, walks=walk())
        kept = KeptSittings(folder / "sittings")
        try:
            comparison.serve(server, kept)
            report = comparison.report(folder, derivation, parents)
        except (FingerprintError, TooManyFailed):
            kept.remove()  # what was kept is not to be built on: the next try measures anew
            raise
        kept.remove()
        return report

    return complete(
        config.root,
        AcceptanceReport,
        stage="evaluate",
        version=STAGE_VERSION,
        parents=parents,
        meaning={
            **config.evaluate.model_dump(mode="json", exclude={"server_url", "general_sources"}),
            # Where a look may end it, the policy is part of what is measured.
            "policy": config.gate.model_dump(mode="json") if config.evaluate.early_stop else None,
            "prompts": {**prompts.settings(), **prompts.identity()},
            "server": dict(server.planned()),
            "dtype": config.target.dtype,
            "max_model_len": config.target.max_model_len,
        },
        build=build,
    )


@dataclass
class _Comparison:
    """One evaluation in the making."""

    config: Config
    candidates: Candidates
    prompts: GatePrompts
    recorded: float | None
    walks: Walks
    sittings: Sittings = field(default_factory=dict)
    looks: list[dict[str, Any]] = field(default_factory=list)
    drift: dict[str, float] | None = None
    restarted: bool = False

    def serve(self, server: Server, kept: KeptSittings) -> None:
        """Every sitting, in turns where the server can swap, else in one visit each (A B A)."""
        settings = self.config.evaluate
        course = Course(
            self.prompts.gate,
            self.prompts.general,
            self.prompts.warm_up,
            num_blocks=min(settings.blocks, len(self.prompts.gate)),
            concurrency=settings.concurrency,
        )
        if server.swaps(self.candidates):
            self.sittings = alternate(self.candidates, course, server=server, kept=kept, settled=self._settled)
            if settings.early_stop and not (self.looks and self.looks[-1]["settled"]):
                self._look(self.sittings)  # the last, on all of the prompts
            return
        logger.info("evaluate: these cannot be swapped into one engine: one visit each, the champion again at the end")
        self.restarted = True
        self.sittings, again = with_restarts(self.candidates, course, server=server, kept=kept)
        self.drift = self._drift(again)

    def _settled(self, sittings: Sittings, blocks_done: int) -> bool:
        return self.config.evaluate.early_stop and self._look(sittings) is not None

    def _look(self, sittings: Sittings) -> str | None:
        """What the policy says so far, remembered with the share of the prompts that it was seen on."""
        served = sum(len(one.prompts) for (_, role), one in sittings.items() if role == "champion")
        fraction = served / len(self.prompts.gate)
        rows = self._rows(sittings)
        fractions = [*(look["fraction"] for look in self.looks), fraction]
        verdict = gate.settled(self.config.gate, rows, self._measured(rows, sittings), fractions=fractions)
        self.looks.append({"fraction": fraction, "prompts": served, "settled": verdict})
        return verdict

    def _rows(self, sittings: Sittings) -> list[dict[str, Any]]:
        plain = [role for role, one in self.candidates.items() if one is None]
        return rows_of(sittings, plain=plain, max_repeat_share=self.config.evaluate.max_repeat_share)

    def _measured(self, rows: Sequence[Mapping[str, Any]], sittings: Sittings) -> dict[str, dict[str, Any]]:
        settings = self._settings(sittings)
        return measured_of(rows, sittings, walks=self.walks, settings=settings, recorded=self.recorded)

    def _settings(self, sittings: Sittings) -> dict[str, Any]:
        """The fingerprint of the measurement. Raises: FingerprintError when the engine's settings moved in between."""
        own = _DRAFTERS_OWN if self.restarted else ()
        found = {key: {k: v for k, v in one.settings.items() if k not in own} for key, one in sittings.items()}
        (first_key, first), *others = found.items()
        for key, settings in others:
            require_same_settings(first, settings, where=f"sittings {first_key} and {key}")
        target, evaluate = self.prompts.fingerprint, self.config.evaluate
        block_sizes = {one.manifest.block_size for one in self.candidates.values() if one}
        return {
            **first,
            **self.prompts.settings(),
            "target": target.model_dump(mode="json", exclude={"target_layer_ids"}) if target else None,
            "sampling": {"temperature": 0.0}
            if evaluate.sampling == "greedy"
            else {"traffic": True, "seed": evaluate.seed},
            "max_tokens": evaluate.max_tokens,
            "max_model_len": self.config.target.max_model_len,
            "dtype": self.config.target.dtype,
            "concurrency": evaluate.concurrency,
            "block_size": block_sizes.pop() if len(block_sizes) == 1 else sorted(block_sizes),
        }

    def _failed(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Requests without an answer. Raises: TooManyFailed where a role has many, with their errors."""
        for role in self.candidates:
            own = [row for row in rows if row["role"] == role]
            failed = sum(row["flag"] == acceptance.FAILED for row in own)
            if failed > MAX_FAILED_SHARE * len(own):
                replies = [r for s in self.sittings.values() for r in (*s.replies, *s.general_replies)]
                errors = sorted({reply.error for reply in replies if reply.error})
                raise TooManyFailed(
                    f"evaluate: {failed} of the {role}'s {len(own)} requests failed ({errors[:3]}), at most "
                    f"{MAX_FAILED_SHARE:.0%} may; see the server's log, then evaluate again"
                )
        return sum(row["flag"] == acceptance.FAILED for row in rows)

    def _drift(self, again: Sittings) -> dict[str, float]:
        """The champion's second visit over its first: tokens/s and emitted tokens a step."""
        first = {key: one for key, one in self.sittings.items() if key[1] == "champion"}
        before, after = (self._measured(self._rows(s), s)["champion"] for s in (first, again))
        names = ("tokens_per_s", "emitted_tokens_per_step")
        return {name: after[name] / before[name] for name in names if before[name] and after[name]}

    def report(self, folder: Path, derivation: str, parents: dict[str, str]) -> AcceptanceReport:
        """The manifest, its table written: counts and ids of rows, never text or tokens."""
        rows = self._rows(self.sittings)
        failed = self._failed(rows)
        measured = self._measured(rows, self.sittings)
        writer = PartWriter(folder)
        table = pa.Table.from_pylist(rows, schema=ACCEPTANCE)
        writer.commit(0, {"acceptance.parquet": (table.num_rows, write_table(table))})
        shards, _, _ = writer.finish(1)
        served = sum(len(one.prompts) for (_, role), one in self.sittings.items() if role == "champion")
        return AcceptanceReport(
            derivation_id=derivation,
            parents=parents,
            shards=shards,
            config=self.config.evaluate.model_dump(mode="json"),
            versions=package_versions(),
            counts={"planned": len(self.prompts.gate), "prompts": served, "requests": len(rows), "failed": failed},
            rejects=self.prompts.rejects,
            measured=measured,
            settings=measured["champion"]["settings"],
            looks=self.looks,
            drift=self.drift,
        )


def _require_comparable(candidates: Candidates, prompts: GatePrompts) -> None:
    """Raises: StageError for missing or unknown roles; SchemaError for changed files; FingerprintError for drafters of
    other targets.
    """
    if missing := {"champion", "challenger"} - set(candidates):
        raise StageError(f"evaluate: no {' and no '.join(sorted(missing))}; the champion is measured again every time")
    if unknown := set(candidates) - set(ROLES):
        raise StageError(f"evaluate: unknown roles {sorted(unknown)}, expected some of {list(ROLES)}")
    for role, artifact in candidates.items():
        if artifact:
            verify(artifact.folder, artifact.manifest)  # what is served is what was registered
        if artifact and artifact.manifest.fingerprint and prompts.fingerprint:
            # Prompts depend on the target alone; which of its layers a drafter reads says nothing about them.
            layers = {"target_layer_ids": artifact.manifest.fingerprint.target_layer_ids}
            artifact.manifest.fingerprint.require_same(
                prompts.fingerprint.model_copy(update=layers), where=f"{role} and the gate's prompts"
            )


def require_one_engine(candidates: Candidates) -> None:
    """Raises: FingerprintError when these drafters differ in what an engine fixes when it starts.

    What a fleet serves is replaced by a swap, so a challenger of another shape cannot be promoted.
    """
    champion, *others = [(role, one.manifest) for role, one in candidates.items() if one]
    for role, drafter in others:
        first, second = (
            {
                "block_size": one.block_size,
                "mask_token_id": one.mask_token_id,
                "target_layer_ids": list(one.fingerprint.target_layer_ids) if one.fingerprint else None,
            }
            for one in (champion[1], drafter)
        )
        require_same_settings(first, second, where=f"{champion[0]} and {role}")
