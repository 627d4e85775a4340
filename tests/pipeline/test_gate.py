"""The gate as a stage: what it leaves behind."""

import json
import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measurements import BETTER, FAST, SETTINGS, measured_of, rows_of

from pipeline import gate
from pipeline.artifacts import AcceptanceReport, GateDecision, SpeedReport, commit, describe_file, load, verify
from pipeline.config import Config, GateConfig
from pipeline.errors import SchemaError
from pipeline.schemas import ACCEPTANCE
from pipeline.stages import Artifact


@pytest.fixture
def report(tmp_path):
    return report_of(tmp_path, rows_of(BETTER))


def report_of(root, rows, **more):
    folder = root / "reports" / "r1"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ACCEPTANCE), folder / "acceptance.parquet")
    manifest = AcceptanceReport(
        derivation_id="r1",
        parents={"champion": "a", "challenger": "b", "responses": "c"},
        shards=(describe_file(folder / "acceptance.parquet", rows=len(rows)),),
        measured=measured_of(rows),
        settings=SETTINGS,
        **more,
    )
    commit(folder, manifest)
    return Artifact(folder, manifest)


def config_of(root, policy=FAST):
    return Config(root=root, target={"model": root / "model"}, gate=policy)


def test_a_decision_is_written_with_its_page_and_its_policy_and_found_again(tmp_path, report):
    config = config_of(tmp_path)
    decision = gate.run(config, report)
    assert decision.manifest.decision == "promote"
    verify(decision.folder, decision.manifest)
    assert {shard.path for shard in decision.manifest.shards} == {"decision.json", "policy.toml", "report.html"}
    assert load(decision.folder, GateDecision) == decision.manifest
    body = json.loads((decision.folder / "decision.json").read_text())
    assert body["decision"] == "promote"
    assert set(body["reasons"][0]) >= {"code", "message", "value", "limit", "passed", "low", "high", "n"}
    assert body["lift"] == pytest.approx(decision.manifest.lift)
    before = (decision.folder / "decision.json").stat().st_mtime_ns
    assert gate.run(config, report).id == decision.id
    assert (decision.folder / "decision.json").stat().st_mtime_ns == before


def test_the_policy_beside_a_decision_is_the_gate_table_that_made_it_and_is_named_in_it(tmp_path, report):
    policy = FAST.model_copy(update={"min_lift": 1.07, "require_walk": False})
    folder = gate.run(config_of(tmp_path, policy), report).folder
    text = (folder / "policy.toml").read_text()
    assert GateConfig.model_validate(tomllib.loads(text)["gate"]) == policy
    named = json.loads((folder / "decision.json").read_text())["policy_id"]
    assert f"policy {named}" in text
    other = gate.run(config_of(tmp_path), report).folder
    assert json.loads((other / "decision.json").read_text())["policy_id"] != named


def test_the_looks_of_the_evaluation_set_the_level_of_its_verdict(tmp_path):
    looks = [{"fraction": f, "settled": None} for f in (0.5, 0.75)]
    folder = gate.run(config_of(tmp_path), report_of(tmp_path, rows_of(BETTER), looks=looks)).folder
    body = json.loads((folder / "decision.json").read_text())
    assert body["looks"] == [0.5, 0.75]
    assert body["level"] < FAST.error_rate


def test_a_speed_report_is_judged_and_becomes_a_parent(tmp_path, report):
    points = [{"concurrency": 8, "num_speculative_tokens": k, "tokens_per_s": 150.0 - k} for k in (0, 4)]
    for point in points:
        point |= {"num_requests": 32, "ttft_p50_s": None, "ttft_p99_s": None, "itl_p50_s": None, "itl_p99_s": None}
    speed = SpeedReport(derivation_id="s1", parents={}, points=points, recommended={"8": 0}, settings=SETTINGS)
    decision = gate.run(config_of(tmp_path), report, speed=Artifact(tmp_path, speed))
    assert decision.manifest.decision == "dont_speculate"
    assert decision.manifest.parents == {"report": "r1", "speed": "s1"}
    assert json.loads((decision.folder / "decision.json").read_text())["speculate_up_to"] == 0


def test_a_report_whose_counts_were_changed_after_it_was_written_is_refused(tmp_path, report):
    rows = [row | {"num_drafts": row["num_drafts"] - (row["role"] == "challenger")} for row in rows_of(BETTER)]
    pq.write_table(pa.Table.from_pylist(rows, schema=ACCEPTANCE), report.folder / "acceptance.parquet")
    with pytest.raises(SchemaError, match=r"acceptance.parquet: (sha256|\d+ bytes)"):
        gate.run(config_of(tmp_path), report)
