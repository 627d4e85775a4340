"""Whole runs of collect: windows, kills, pieces, and what the report may tell."""

import gzip
import json
import os
import random
import signal
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline import collect, collected
from pipeline.config import load_config
from pipeline.errors import StageError
from pipeline.schemas import PROMPTS
from pipeline.shards import read_tables

ROOT = Path(__file__).resolve().parents[2]
DAY = 86_400.0
NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
MIDNIGHT = datetime(2026, 3, 10, tzinfo=UTC).timestamp()
WORDS = ("harbour", "lantern", "meadow", "copper", "violin", "glacier", "saffron", "thimble", "orchard", "granite")


def asked(number, *, ts=None, subject=None, **more):
    draw = random.Random(number)
    text = f"{number}: " + " ".join(draw.choices(WORDS, k=12))
    return {"consent": "recorded", "subject": subject or f"s{number}", "ts": ts, "prompt": text, **more}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def configure(tmp_path):
    """A configuration of the log folder of this test; overrides as on the command line."""
    (tmp_path / "traffic").mkdir()

    def configure(*overrides, root="root"):
        text = f"root = '{root}'\n[target]\nmodel = 'm'\n[collect]\nsources = ['traffic']\nredaction = 'none'\n"
        (tmp_path / f"{root}.toml").write_text(text)
        return load_config(tmp_path / f"{root}.toml", overrides)

    return configure


def rows(artifact):
    return read_tables(artifact.folder, artifact.manifest.shards, PROMPTS).to_pylist()


def numbers(artifact):
    return sorted(int(json.loads(row["messages"])[0]["content"].split(":")[0]) for row in rows(artifact))


def test_each_night_takes_what_came_since_and_a_second_run_of_one_night_is_the_first(configure, tmp_path):
    log = tmp_path / "traffic" / "a.jsonl"
    config = configure("collect.window={kind='sliding', days=1}")
    log.write_text(lines(asked(n, ts=MIDNIGHT - DAY + 60 * n) for n in range(5)))
    first = collect.run(config, now=NOON)
    assert numbers(first) == [0, 1, 2, 3, 4]
    with open(log, "a") as file:
        file.write(lines([asked(5, ts=MIDNIGHT - 10), asked(6, ts=MIDNIGHT + 10)]))
    again = collect.run(config, now=NOON + timedelta(hours=6))
    assert (again.id, numbers(again)) == (first.id, [0, 1, 2, 3, 4])
    second = collect.run(config, now=NOON + timedelta(days=1))
    assert numbers(second) == [5, 6]  # 5 was late
    assert second.manifest.rejects == {"before_window": 5}
    with pytest.raises(StageError, match=r"none was served from 2026-03-11T00:00.* to 2026-03-12T00:00"):
        collect.run(config, now=NOON + timedelta(days=2))


def test_a_window_without_records_says_so_and_is_not_completed(configure, tmp_path):
    config = configure("collect.window={kind='sliding', days=1}")
    log = tmp_path / "traffic" / "a.jsonl"
    log.write_text(lines([asked(1, ts=MIDNIGHT + 5)]))
    with pytest.raises(StageError, match=r"none of 1 records can be used \(after_window 1\); none was served from"):
        collect.run(config, now=NOON)
    assert numbers(collect.run(config, now=NOON + timedelta(days=1))) == [1]


def test_a_record_without_a_time_is_a_reject_only_where_a_window_needs_one(configure, tmp_path):
    (tmp_path / "traffic" / "a.jsonl").write_text(lines([asked(1), asked(2, ts=MIDNIGHT - 5), asked(3, ts="noon")]))
    assert numbers(collect.run(configure())) == [1, 2, 3]
    config = configure("collect.window={kind='sliding', days=1}", "collect.max_reject_share=0.9", root="other")
    windowed = collect.run(config, now=NOON)
    assert windowed.manifest.rejects == {"no_time": 1, "malformed_time": 1}


def test_a_log_that_changed_under_a_window_is_named_and_not_read_as_if_it_had_not(configure, tmp_path, monkeypatch):
    config = configure("collect.window={kind='sliding', days=1}")
    log = tmp_path / "traffic" / "a.jsonl"
    log.write_text(lines(asked(n, ts=MIDNIGHT - 60) for n in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(collected.Reading, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            collect.run(config, now=NOON)
    log.write_text(lines(asked(n, ts=MIDNIGHT - 60) for n in range(10, 14)))
    with pytest.raises(StageError, match=r"traffic/a\.jsonl are others than when the window"):
        collect.run(config, now=NOON)
    log.unlink()
    (tmp_path / "traffic" / "b.jsonl").write_text(lines([asked(1, ts=MIDNIGHT - 60)]))
    with pytest.raises(StageError, match=r"traffic/a\.jsonl is gone since the window"):
        collect.run(config, now=NOON)


def test_logs_of_one_name_may_grow_while_a_killed_run_waits_to_go_on(configure, tmp_path, monkeypatch):
    config = configure("collect.window={kind='sliding', days=1}", "collect.sources=['eu/traffic', 'us/traffic']")
    for n, region in enumerate(("eu", "us")):
        (tmp_path / region / "traffic").mkdir(parents=True)
        (tmp_path / region / "traffic" / "day.jsonl").write_text(lines([asked(n, ts=MIDNIGHT - 60)]))
    with monkeypatch.context() as patch:
        patch.setattr(collected.Reading, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            collect.run(config, now=NOON)
    with open(tmp_path / "us" / "traffic" / "day.jsonl", "a") as log:
        log.write(lines([asked(2, ts=MIDNIGHT - 30)]))
    assert numbers(collect.run(config, now=NOON)) == [0, 1]
    assert numbers(collect.run(config, now=NOON + timedelta(days=1))) == [2]  # late, and once


@pytest.mark.parametrize("moment", range(1, 30, 6))
def test_a_run_that_is_killed_anywhere_ends_as_one_that_was_not(configure, tmp_path, moment):
    for number in range(3):
        records = [asked(n % 97, subject=f"s{n % 11}") for n in range(number, 300, 3)]
        (tmp_path / "traffic" / f"{number}.jsonl").write_text(lines(records))
    straight = collect.run(configure("collect.piece_bytes=8000", root="straight"))
    configure("collect.piece_bytes=8000", root="killed")
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom pipeline import collect\n"
        "from pipeline.config import load_config\nleft = int(sys.argv[1])\n"
        "def hook(event, arguments):\n"
        "    global left\n"
        "    if event == 'os.rename' or event == 'shutil.rmtree':\n"
        "        left -= 1\n"
        "        if not left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(hook)\n"
        "collect.run(load_config(Path(sys.argv[2]), ['collect.piece_bytes=8000']))\n"
    )
    command = [sys.executable, "-c", script, str(moment), str(tmp_path / "killed.toml")]
    killed = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert killed.returncode in (0, -signal.SIGKILL)
    finished = collect.run(load_config(tmp_path / "killed.toml", ["collect.piece_bytes=8000"]))
    assert finished.manifest.content_id == straight.manifest.content_id
    assert rows(finished) == rows(straight)
    assert not (finished.folder / "work").exists()


def test_pieces_names_and_compression_change_no_row(configure, tmp_path):
    records = [asked(n % 150, subject=f"s{n % 40}") for n in range(400)]
    plain = tmp_path / "traffic" / "a.jsonl"
    plain.write_text(lines(records))
    whole = collect.run(configure(root="whole"))
    cut = collect.run(configure("collect.piece_bytes=5000", root="cut"))
    assert cut.manifest.content_id == whole.manifest.content_id
    plain.unlink()
    (tmp_path / "traffic" / "b.jsonl.gz").write_bytes(gzip.compress(lines(records[:200]).encode()))
    (tmp_path / "traffic" / "c.jsonl").write_text(lines(reversed(records[200:])))
    other = collect.run(configure(root="other"))
    assert rows(other) == rows(whole) and other.manifest.content_id == whole.manifest.content_id


def test_a_record_that_nobody_thought_of_is_counted_and_told_without_its_text(configure, tmp_path, monkeypatch):
    (tmp_path / "traffic" / "a.jsonl").write_text(lines([asked(1), asked(2), asked(3)]))
    real = collected.canonical_request

    def odd(body):
        if body["prompt"].startswith("2"):
            raise KeyError(body["prompt"])
        return real(body)

    monkeypatch.setattr(collected, "canonical_request", odd)
    artifact = collect.run(configure("collect.max_reject_share=0.5"))
    assert artifact.manifest.rejects == {"unexpected_KeyError": 1}
    assert b"harbour" not in (artifact.folder / "rejects.jsonl").read_bytes()


def test_a_subject_or_a_time_that_nobody_could_have_ends_no_run(configure, tmp_path):
    reply = {"prompt_token_ids": [1], "usage": {"completion_tokens": 1},
             "choices": [{"token_ids": [2], "finish_reason": "stop"}]}  # fmt: skip
    odd = [asked(2, subject="\ud800"), asked(5, target="\ud800", response=reply)]
    odd.append(asked(3, ts="9999-12-31T23:59:59-05:00"))
    (tmp_path / "traffic" / "a.jsonl").write_text(lines([asked(1), *odd, asked(4, ts="0001-01-01T00:00:00+05:00")]))
    artifact = collect.run(configure("collect.max_reject_share=0.5"))
    assert (numbers(artifact), artifact.manifest.rejects) == ([1, 3, 4], {"not_unicode": 2})


def test_a_tenant_with_few_subjects_is_left_out_where_a_drafter_is_shared_and_kept_where_it_is_its_own(
    configure, tmp_path
):
    large = [asked(n, tenant="large", subject=f"l{n}") for n in range(60)]
    small = [asked(100 + n, tenant="small", subject=f"t{n % 2}") for n in range(6)]
    (tmp_path / "traffic" / "a.jsonl").write_text(lines([*large, *small]))
    shared = collect.run(configure())
    assert shared.manifest.counts["few_subjects"] == 6
    assert numbers(shared) == list(range(60))
    (tmp_path / "traffic" / "a.jsonl").write_text(lines(small))
    assert len(rows(collect.run(configure(root="own")))) == 6


def test_a_budget_that_leaves_too_few_subjects_to_train_on_stops_the_run(configure, tmp_path):
    records = [asked(n, tenant=f"t{n % 2}", subject=f"s{n}") for n in range(120)]
    (tmp_path / "traffic" / "a.jsonl").write_text(lines(records))
    assert len(rows(collect.run(configure("collect.near_similarity='off'")))) == 120
    with pytest.raises(StageError, match=r"the training rows are of \d subjects, .* collect.min_subjects = 10"):
        collect.run(configure("collect.near_similarity='off'", "collect.max_prompts=10", root="small"))


def test_requests_without_a_subject_are_no_subjects_each(configure, tmp_path):
    records = [asked(n, tenant=f"t{n % 2}", subject=f"request:{n:032x}") for n in range(120)]
    (tmp_path / "traffic" / "a.jsonl").write_text(lines(records))
    with pytest.raises(StageError, match="of 0 subjects"):
        collect.run(configure("collect.near_similarity='off'"))


def test_one_subject_that_is_most_of_a_shared_drafters_training_stops_the_run(configure, tmp_path):
    records = [asked(n, tenant="a", subject=f"l{n}") for n in range(20)]
    records += [asked(100 + n, tenant="b", subject=f"m{n}") for n in range(12)]
    log = tmp_path / "traffic" / "a.jsonl"
    for name in (f"much{n}" for n in range(40)):  # one that trains
        log.write_text(lines([*records, *(asked(200 + n, tenant="a", subject=name) for n in range(60))]))
        try:
            collect.run(configure(root=name))
        except StageError as error:
            assert "more than collect.max_subject_share = 0.2" in str(error)
            return
    pytest.fail("no subject was dealt into the train set")


def test_the_report_counts_by_source_reason_and_stratum_and_holds_no_text(configure, tmp_path):
    good = [asked(n, ts=1000.0 + n, route="support") for n in range(30)]
    bad = [{**asked(40), "consent": None}, {**asked(41), "messages": 3}]
    (tmp_path / "traffic" / "a.jsonl").write_text(lines([*good, *bad]) + "{broken\n")
    (tmp_path / "traffic" / "b.jsonl").write_text(lines([asked(50, ts=5000.0, route="chat")]))
    artifact = collect.run(configure())
    report = json.loads((artifact.folder / "report.json").read_text())
    assert (report["records"], report["kept"]) == (34, 31)
    assert report["dropped"] == {"malformed_messages": 1, "no_consent": 1, "not_json": 1}
    assert report["sources"]["traffic/a.jsonl"]["dropped"] == report["dropped"]
    assert report["watermarks"]["traffic/b.jsonl"] == "1970-01-01T01:23:20+00:00"
    assert report["prompts"]["counts"]["distinct"] == 31
    assert sum(report["prompts"]["lengths"].values()) == report["prompts"]["counts"]["kept"]
    kept = {tuple(one["stratum"][1:3]): one["kept"] for one in report["prompts"]["strata"]}
    assert {route for _, route in kept} == {"support", "chat"}
    page = (artifact.folder / "report.html").read_text()
    assert "31 of 34 records were kept" in page and "traffic/a.jsonl" in page and "no_consent" in page
    listed = (artifact.folder / "rejects.jsonl").read_text()
    assert not any(word in text for word in WORDS for text in (page, listed, json.dumps(report)))
    assert [json.loads(line)["reason"] for line in listed.splitlines()] == ["malformed_messages", "not_json"]


def test_what_expired_does_not_come_back_from_a_log_and_a_zero_retention_tenant_is_never_taken(configure, tmp_path):
    now = datetime(2026, 3, 10, tzinfo=UTC)
    old, new = (now.timestamp() - days * 86_400 for days in (9, 1))
    records = [asked(1, ts=old), asked(2, ts=new), asked(3, ts=new, tenant="initech"), asked(4)]
    (tmp_path / "traffic" / "a.jsonl").write_text(lines(records))
    config = configure("retention.ttl_days=7", "collect.zero_retention=['initech']", "collect.max_reject_share=0")
    found = collect.run(config, now=now)
    assert found.manifest.rejects == {"expired": 1, "zero_retention": 1, "cannot_expire": 1}
    assert found.manifest.counts["kept_records"] == 1


def test_folders_that_hold_peoples_words_are_their_owners_alone(configure, tmp_path):
    (tmp_path / "traffic" / "a.jsonl").write_text(lines([asked(1)]))
    root = collect.run(configure()).folder.parents[1]
    for name in ("prompts", "responses", "states"):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o700
