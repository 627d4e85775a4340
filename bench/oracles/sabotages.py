"""Twelve ways in which a gate was fooled elsewhere, each through the product's own code: what stops it, in its words.

Each sabotage gives the reason, or None where nothing stopped it. What needs records takes real ones.
"""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.oracles.simulated_gates import POLICY, SETTINGS, Gate, Records, gate
from pipeline import evaluate
from pipeline.acceptance import count_reply
from pipeline.artifacts import AcceptanceReport, DrafterCheckpoint, TargetFingerprint, commit, describe_file
from pipeline.config import Config
from pipeline.errors import SlipstreamError
from pipeline.gate import run
from pipeline.gate_prompts import GatePrompts
from pipeline.schemas import ACCEPTANCE
from pipeline.stages import Artifact

_PROMPTS = 300


@dataclass(frozen=True)
class Scene:
    """Records to gate on, a good drafter and its target, and a folder for what is made."""

    records: Records
    target: Path
    drafter: Path
    workdir: Path

    def gate(self, **settings: Any) -> Gate:
        """A simulated gate of a challenger that is really better, before anything is done to it."""
        return gate(self.records, num_prompts=_PROMPTS, seed=0, **({"lift": 1.15} | settings))

    def judged(self, name: str, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> str | None:
        """The reasons of the gate's verdict, run as the stage; None where it promotes."""
        report = self.report(name, rows, measured)
        decision = run(self.config(name), report).manifest
        if decision.decision == "promote":
            return None
        failed = [r["message"] for r in decision.reasons if r["passed"] is False and r["verdict"] == decision.decision]
        return f"{decision.decision}: {failed[0]}"

    def config(self, name: str) -> Config:
        """A run root of its own."""
        return Config(root=self.workdir / name, target={"model": self.target}, gate=POLICY)

    def report(
        self, name: str, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]
    ) -> Artifact[AcceptanceReport]:
        """These rows as an evaluation leaves them."""
        folder = self.workdir / name / "reports" / "made"
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(list(rows), schema=ACCEPTANCE), folder / "acceptance.parquet")
        more = {"num_replies_different": 0, "slices": {}, "flagged": {}, "general": None, "latency": {}}
        manifest = AcceptanceReport(
            derivation_id="made",
            parents={"champion": "a", "challenger": "b"},
            shards=(describe_file(folder / "acceptance.parquet", rows=len(rows)),),
            measured={role: more | one for role, one in measured.items()},
            settings=SETTINGS,
        )
        commit(folder, manifest)
        return Artifact(folder, manifest)

    def changed(self, name: str, *, dflash: Mapping[str, Any] | None = None, **settings: Any) -> Path:
        """A copy of the drafter with other settings in its config.json."""
        folder = shutil.copytree(self.drafter, self.workdir / name / "drafter")
        config = json.loads((folder / "config.json").read_text()) | settings
        config["dflash_config"] = config["dflash_config"] | dict(dflash or {})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def preflight(self, folder: Path) -> str | None:
        """Why the champion's engine would not take this drafter."""
        from serving.errors import ServingError
        from serving.preflight import check_drafter, read_config

        target = json.loads((self.target / "config.json").read_text())
        try:
            check_drafter(folder, target_config=target, serving_config=read_config(self.drafter))
        except ServingError as error:
            return f"preflight: {error}"
        return None


def _refused(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except SlipstreamError as error:
        return f"{type(error).__name__}: {error}"
    return None


def one_layer_id_off(scene: Scene) -> str | None:
    """Layer ids moved by one: in the config, and silently, in the states that it was trained on."""
    ids = json.loads((scene.drafter / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    if scene.preflight(scene.changed("layers", dflash={"target_layer_ids": [i + 1 for i in ids]})) is None:
        return None
    # The walk over its own, shifted states is as good as ever; served, next to nothing is accepted.
    one = scene.gate()
    measured = one.measured()
    rows = [_collapsed(row) if row["role"] == "challenger" else row for row in one.rows]
    served = Gate(rows, one.rng).measured()["challenger"]
    return scene.judged("layers", rows, measured | {"challenger": served | {"walk": measured["challenger"]["walk"]}})


def _collapsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The reply with a draft accepted in every fiftieth step alone."""
    accepted = row["num_tokens"] // 50
    positions = [accepted] + [0] * (len(row["accepted_per_pos"]) - 1)
    steps = row["num_tokens"] - 1 - accepted
    return dict(row) | {"num_drafts": steps, "num_accepted_tokens": accepted, "accepted_per_pos": positions}


def wrong_mask_token(scene: Scene) -> str | None:
    """Another token in the slots to predict."""
    mask = json.loads((scene.drafter / "config.json").read_text())["dflash_config"]["mask_token_id"]
    return scene.preflight(scene.changed("mask", dflash={"mask_token_id": mask + 1}))


def wrong_rope_base(scene: Scene) -> str | None:
    """A tenfold rope base."""
    theta = json.loads((scene.drafter / "config.json").read_text())["rope_theta"]
    return scene.preflight(scene.changed("rope", rope_theta=10 * theta))


def stale_hash(scene: Scene) -> str | None:
    """Counts that were changed after the report was written."""
    one = scene.gate(lift=1.0)
    report = scene.report("stale", one.rows, one.measured())
    pq.write_table(
        pa.Table.from_pylist(scene.gate(lift=1.3).rows, schema=ACCEPTANCE), report.folder / "acceptance.parquet"
    )
    return _refused(lambda: run(scene.config("stale"), report))


def zeroed_norm(scene: Scene) -> str | None:
    """A norm that was lost on the way."""
    from safetensors.torch import load_file, save_file

    folder = scene.changed("norm")
    tensors = load_file(folder / "model.safetensors")
    tensors["hidden_norm.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return scene.preflight(folder)


def trained_on_another_template(scene: Scene) -> str | None:
    """A challenger whose training prompts were rendered by another chat template."""
    shared = {"config": "c", "tokenizer": "t", "weights": "w", "dtype": "bfloat16", "target_layer_ids": (1, 3)}
    ours, other = (TargetFingerprint(chat_template=name, **shared) for name in ("served", "trained"))
    candidates = {
        role: Artifact(
            scene.drafter,
            DrafterCheckpoint(
                derivation_id=role, parents={}, fingerprint=one, role=role, block_size=4, mask_token_id=2
            ),
        )
        for role, one in (("champion", ours), ("challenger", other))
    }
    prompts = GatePrompts(gate=[], general=[], warm_up=[], parents={}, fingerprint=ours)
    return _refused(lambda: evaluate.run(scene.config("template"), candidates, prompts, server=None))


def good_at_position_0_only(scene: Scene) -> str | None:
    """The first draft of nearly every step is accepted, and hardly any behind it."""
    one = scene.gate()
    rows = [_first_only(row) if row["role"] == "challenger" else row for row in one.rows]
    return scene.judged("positions", rows, Gate(rows, one.rng).measured())


def _first_only(row: Mapping[str, Any]) -> dict[str, Any]:
    emitted = row["num_tokens"] - 1
    steps = max(1, -(-emitted * 100 // 190))  # 0.9 accepted drafts a step
    accepted = emitted - steps
    second = accepted // 50
    positions = [accepted - second, second, *[0] * (len(row["accepted_per_pos"]) - 2)]
    return dict(row) | {"num_drafts": steps, "num_accepted_tokens": accepted, "accepted_per_pos": positions}


def faster_on_one_slice_and_worse_on_another(scene: Scene) -> str | None:
    """60% of the traffic gains 30%, 40% loses 20%."""
    gains, loses = scene.gate(lift=1.3), scene.gate(lift=0.8)
    rows = []
    for language, part, share in (("a", gains, 0.6), ("b", loses, 0.4)):
        kept = set(sorted({row["conversation"] for row in part.rows})[: round(share * _PROMPTS)])
        names = [(row, f"{language}-{row['row_id']}", f"{language}-{row['conversation']}") for row in part.rows]
        rows += [
            row | {"row_id": row_id, "conversation": conversation, "slices": json.dumps({"language": language})}
            for row, row_id, conversation in names
            if row["conversation"] in kept
        ]
    return scene.judged("slices", rows, Gate(rows, gains.rng, 1.0).measured())


def acceptance_up_and_tokens_per_second_down(scene: Scene) -> str | None:
    """10% longer and 8% slower."""
    one = scene.gate(lift=1.1, speed_ratio=0.92)
    return scene.judged("slower", one.rows, one.measured())


def measured_in_another_thinking_mode(scene: Scene) -> str | None:
    """The champion's figures are of thinking off, the challenger's of thinking on."""
    one = scene.gate()
    measured = one.measured()
    for role, mode in (("champion", "off"), ("challenger", "on")):
        measured[role]["settings"] = SETTINGS | {"thinking": {mode: _PROMPTS}}
    report = scene.report("thinking", one.rows, measured)
    return _refused(lambda: run(scene.config("thinking"), report))


def gate_set_of_looping_replies(scene: Scene) -> str | None:
    """Three of five replies say the same few words again and again."""
    one, rng, looping = scene.gate(), random.Random(0), {}
    rows = []
    for row in one.rows:
        if looping.setdefault(row["row_id"], rng.random() < 0.6):
            ids = [7, 8, 9] * (row["num_tokens"] // 3 + 1)
            spec = _as_the_engine_says(row)
            row = row | {"flag": count_reply(spec, ids[: row["num_tokens"]]).flag}
        rows.append(row)
    return scene.judged("loops", rows, one.measured())


def _as_the_engine_says(row: Mapping[str, Any]) -> dict[str, Any]:
    reached = [row["num_drafts"], *row["accepted_per_pos"], 0]
    return {
        "num_spec_steps": row["num_drafts"],
        "num_accepted_draft_tokens": row["num_accepted_tokens"],
        "acceptance_histogram": [a - b for a, b in pairwise(reached)],
    }


def not_a_number(scene: Scene) -> str | None:
    """NaN in the weights, and NaN among the figures."""
    from safetensors.torch import load_file, save_file

    folder = scene.changed("nan-weights")
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if scene.preflight(folder) is None:
        return None
    one = scene.gate()
    measured = one.measured()
    measured["challenger"]["sittings"][1]["wall_s"] = float("nan")
    return scene.judged("nan", one.rows, measured)


ALL: dict[str, Callable[[Scene], str | None]] = {
    f.__name__: f
    for f in (
        one_layer_id_off,
        wrong_mask_token,
        wrong_rope_base,
        stale_hash,
        zeroed_norm,
        trained_on_another_template,
        good_at_position_0_only,
        faster_on_one_slice_and_worse_on_another,
        acceptance_up_and_tokens_per_second_down,
        measured_in_another_thinking_mode,
        gate_set_of_looping_replies,
        not_a_number,
    )
}
# What each reason must name for the sabotage to count as stopped: the fault, or its symptom.
NAMES = {
    "one_layer_id_off": "training and serving disagree",
    "wrong_mask_token": "mask_token_id",
    "wrong_rope_base": "rope_theta",
    "stale_hash": "the manifest says",
    "zeroed_norm": "hidden_norm.weight is all zeros",
    "trained_on_another_template": "chat_template",
    "good_at_position_0_only": "good at the first position",
    "faster_on_one_slice_and_worse_on_another": "slice language=b",
    "acceptance_up_and_tokens_per_second_down": "tokens/s",
    "measured_in_another_thinking_mode": "thinking",
    "gate_set_of_looping_replies": "loop",
    "not_a_number": "not a number",
}


def control(scene: Scene) -> str | None:
    """The same challenger with nothing done to it: None, or every sabotage was stopped for the wrong reason."""
    one = scene.gate()
    return scene.preflight(scene.drafter) or scene.judged("control", one.rows, one.measured())
