"""Verdicts, and data to learn from, as the stages leave them behind."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.artifacts import (
    AcceptanceReport,
    GateDecision,
    HiddenStateCache,
    PromptSet,
    ResponseSet,
    TargetFingerprint,
    commit,
    describe_file,
)
from pipeline.stages import Artifact

FINGERPRINT = TargetFingerprint(
    config="c1", tokenizer="t1", chat_template="j1", weights="w1", dtype="float32", target_layer_ids=(1, 3, 4)
)
SECRET = "what a customer wrote"


def make_decision(
    root: Path, verdict: str = "promote", *, champion: str = "c0", challenger: str = "d1", lift: float = 1.2
) -> Artifact[GateDecision]:
    """A decision about a challenger, and the report behind it, under a run root."""
    report = AcceptanceReport(
        derivation_id=f"r-{challenger}-{champion}",
        parents={"champion": champion, "challenger": challenger},
        measured={
            "champion": {"emitted_tokens_per_step": 2.0, "served_acceptance_length": 2.1, "tokens_per_s": 50.0},
            "challenger": {
                "emitted_tokens_per_step": 2.0 * lift,
                "served_acceptance_length": 2.1 * lift,
                "tokens_per_s": 55.0,
            },
        },
        settings={"concurrency": 8},
    )
    commit(root / "reports" / report.derivation_id, report)
    folder = root / "decisions" / f"g-{challenger}-{champion}-{verdict}"
    folder.mkdir(parents=True)
    reasons = [
        {"message": "2 conversations, 30 are needed", "passed": verdict == "promote"},
        {"message": "speed is fine", "passed": True},
    ]
    body = {
        "decision": verdict,
        "reasons": reasons,
        "comparisons": {"challenger/champion": {"ratio": lift, "low": 1.1}},
    }
    (folder / "decision.json").write_text(json.dumps(body))
    (folder / "policy.toml").write_text("min_lift = 1.0\n")
    (folder / "report.html").write_text("<html></html>")
    manifest = GateDecision(
        derivation_id=folder.name,
        parents={"report": report.derivation_id},
        shards=tuple(describe_file(folder / name) for name in ("decision.json", "policy.toml", "report.html")),
        decision=verdict,
        reasons=reasons,
        lift=lift,
        ci_low=lift - 0.1,
        ci_high=lift + 0.1,
    )
    commit(folder, manifest)
    return Artifact(folder, manifest)


def make_data(root: Path, name: str, splits: dict[str, str]) -> dict[str, str]:
    """Prompts, responses and states with these rows (row id → split) under a run root; kind → derivation id.

    The last row in the order of the ids is lost on the way to the states.
    """
    data = {"prompts": f"{name}-prompts", "responses": f"{name}-responses", "states": f"{name}-states"}
    kept = sorted(splits)[:-1]
    for kind, row_ids in (("prompts", sorted(splits)), ("responses", sorted(splits)), ("states", kept)):
        folder = root / kind / data[kind]
        folder.mkdir(parents=True)
        text = {"messages": [SECRET] * len(row_ids)} if kind == "prompts" else {}
        table = pa.table({"row_id": row_ids, "split": [splits[row_id] for row_id in row_ids], **text})
        pq.write_table(table, folder / f"{kind}-00000.parquet")
    shard = {kind: (describe_file(next((root / kind / data[kind]).glob("*.parquet"))),) for kind in data}
    common = {"counts": {"rows": len(splits)}, "config": {"sources": ["/logs/traffic"]}}
    commit(
        root / "prompts" / data["prompts"],
        PromptSet(derivation_id=data["prompts"], parents={}, shards=shard["prompts"], **common),
    )
    commit(
        root / "responses" / data["responses"],
        ResponseSet(derivation_id=data["responses"], parents={"prompts": data["prompts"]}, shards=shard["responses"]),
    )
    commit(
        root / "states" / data["states"],
        HiddenStateCache(
            derivation_id=data["states"],
            parents={"responses": data["responses"]},
            shards=shard["states"],
            fingerprint=FINGERPRINT,
            counts={"rows": len(kept), "states": 7},
            rejects={"norm": 1},
            hidden_size=8,
            num_states=7,
        ),
    )
    return data
