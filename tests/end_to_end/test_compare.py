"""`slipstream compare` as a stranger meets it: folders, a file of prompts, a real engine, a verdict and a page."""

import json
from pathlib import Path

import pytest
from tiny import tiny_drafter, tiny_target

from jobs import compare
from pipeline.artifacts import AcceptanceReport
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import read_tables
from pipeline.stages import open_artifact

FAVOURITE = 433
QUICK = [
    "evaluate.max_tokens=24",
    "evaluate.concurrency=4",
    "evaluate.general_prompts=0",
    "evaluate.max_repeat_share=1.0",  # a random target's replies repeat themselves
    "target.max_model_len=256",
    "gate.resamples=1000",
    "gate.min_speed_ratio=0.01",
    "gate.max_tail_ratio=100.0",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    target = tiny_target(root / "target", favourite=FAVOURITE)
    prompts = root / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"question {i} of {i * i}"}) for i in range(48)))
    return {
        "target": target,
        "prompts": prompts,
        "cold": tiny_drafter(root / "cold", target, seed=1),
        "good": tiny_drafter(root / "good", target, seed=2, proposes=FAVOURITE),
        "out": root / "out",
    }


def compared(folders, capsys, first, second, *settings):
    names = [str(folders.get(name, name)) for name in (first, second)]
    overrides = [part for setting in (*QUICK, *settings) for part in ("--set", setting)]
    where = ["--target", str(folders["target"]), "--prompts", str(folders["prompts"]), "--out", str(folders["out"])]
    compare.main([*names, *where, *overrides])
    return capsys.readouterr().out


def page_of(text):
    page = Path(text.rpartition("page: ")[2].strip())
    decision = json.loads((page.parent / "decision.json").read_text())
    manifest = json.loads((page.parent / "manifest.json").read_text())
    return page.read_text(), decision, manifest["parents"]["report"]


def test_the_better_drafter_is_promoted_over_the_cold_one_and_the_page_says_so(folders, capsys):
    text = compared(folders, capsys, "cold", "good")
    assert text.startswith("promote: good in place of cold"), text
    page, decision, report_id = page_of(text)
    assert decision["decision"] == "promote" and decision["ci_low"] > 1
    assert "good" in page and "cold" in page
    report = open_artifact(folders["out"], AcceptanceReport, report_id)
    rows = read_tables(report.folder, report.manifest.shards, ACCEPTANCE).to_pylist()
    assert all(row["ttft_s"] > 0 for row in rows)
    assert report.manifest.settings["speculation"]["num_speculative_tokens"] == 3


def test_one_and_none_are_compared_with_restarts_and_the_drift_is_shown(folders, capsys):
    text = compared(folders, capsys, "none", "good", "evaluate.max_prompts=32", "evaluate.blocks=2")
    _, decision, report_id = page_of(text)
    report = open_artifact(folders["out"], AcceptanceReport, report_id).manifest
    assert report.parents["champion"] == "none"
    assert report.measured["champion"]["emitted_tokens_per_step"] == 1.0
    assert report.measured["challenger"]["emitted_tokens_per_step"] > 1.2
    assert report.measured["challenger"]["num_replies_different"] == 0  # float32, 4 at a time on a toy
    assert report.drift["tokens_per_s"] > 0
    assert decision["lift"] == pytest.approx(report.measured["challenger"]["emitted_tokens_per_step"], rel=1e-6)


def test_what_cannot_be_compared_says_what_to_do(folders, capsys):
    with pytest.raises(SystemExit):
        compared(folders, capsys, "none", "none")
    assert "name at least one drafter's folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compared(folders, capsys, "cold", str(folders["target"]))
    assert "not a drafter that can serve" in capsys.readouterr().err
