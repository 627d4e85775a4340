"""Erasure in the tap's own logs: the subject's records go, every other byte stays where it is."""

import json
import os
import stat
from datetime import UTC, datetime

import pytest

from pipeline import collect
from pipeline.config import Config
from pipeline.erase_logs import erase_from_logs
from pipeline.split import load_key
from pipeline.tombstones import add_tombstones, subject_hashes
from pipeline.windows import Pinned, open_window

TAPS = "traffic-host-7-1700000000000.jsonl"
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def asked(n, who):
    return {"id": f"r{n}", "ts": 1.7e9 + n, "consent": "recorded", "subject": who, "prompt": f"{who} asks for {n}"}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def config(tmp_path):
    logs = tmp_path / "root" / "traffic"
    logs.mkdir(parents=True)
    settings = {"sources": [logs], "redaction": "none"}
    return Config.model_validate({"root": tmp_path / "root", "target": {"model": tmp_path}, "collect": settings})


def erased(config, *subjects):
    key = load_key(config)
    hashes = frozenset(one for subject in subjects for one in subject_hashes(key, subject))
    return erase_from_logs(config.root, config.collect.sources, key, hashes)


def test_records_are_blanked_and_every_other_byte_stays_where_it_was(config):
    log = config.root / "traffic" / TAPS
    before = lines(asked(1, "anna"), asked(2, "berta")) + "{broken\n" + lines(asked(3, "anna"), asked(4, "anna-lena"))
    log.write_text(before)
    log.chmod(0o600)
    os.utime(log, (1.7e9, 1.7e9))
    (log.parent / f".{TAPS}.99.tmp").write_text("a killed run's")
    assert (done := erased(config, "anna")).records == 2
    after = log.read_text()
    assert len(after) == len(before) and [len(line) for line in after.split("\n")] == list(map(len, before.split("\n")))
    assert [line for line in after.split("\n") if line.strip()] == [
        line for line in before.split("\n") if line and '"anna"' not in line
    ]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600 and log.stat().st_mtime == 1.7e9, "the tap deletes by age"
    assert [path.name for path in log.parent.iterdir()] == [TAPS]
    assert done.lines() == ["2 records blanked in the tap's logs"]
    assert erased(config, "anna").records == 0


def test_lines_that_nobody_can_read_do_not_end_an_erasure(config):
    log, other = config.root / "traffic" / TAPS, config.root / "traffic" / "other.jsonl"
    log.write_text('{"a":' + "[" * 5000 + "]" * 5000 + "}\n" + "\0" * 9 + lines(asked(1, "anna")))
    other.write_text(lines({**asked(2, "\ud800"), "format": "other"}))
    assert erased(config, "anna").lines() == ["1 records blanked in the tap's logs"]


def test_what_is_being_written_or_of_others_making_is_left_and_told(config):
    logs = config.root / "traffic"
    growing, others = logs / TAPS.replace(".jsonl", ".open.jsonl"), logs / "proxy.jsonl"
    for path in (growing, others):
        path.write_text(lines(asked(1, "anna"), asked(2, "anna")))
    (logs / "traffic-host-7-1700000000001.sealed").write_bytes(b"no such thing")
    told = "\n".join((done := erased(config, "anna")).lines())
    assert (done.records, sorted(done.left.values())) == (0, [2, 2])
    assert f"{growing}: 2 records; it is being written: erase again" in told
    assert f"{others}: 2 records; no log of the tap" in told
    assert "1700000000001.sealed: not searched to its end" in told
    assert growing.read_text() == others.read_text() == lines(asked(1, "anna"), asked(2, "anna"))


def test_object_storage_and_folders_that_are_gone_are_no_error(config):
    sources = ("s3://bucket/traffic", config.root / "nowhere")
    done = erase_from_logs(config.root, sources, load_key(config), frozenset({"x"}))
    assert (done.records, done.unread) == (0, ["s3://bucket/traffic"])


def test_a_window_that_was_open_on_the_file_is_opened_anew_and_others_stay(config):
    (config.root / "traffic" / TAPS).write_text(lines(asked(1, "anna"), asked(2, "berta")))
    settings = config.collect.window.model_copy(update={"kind": "cumulative"})
    for of, name in (("mine", f"traffic/{TAPS}"), ("shared", f"traffic/{TAPS}#0123abcd"), ("another", "proxy.jsonl")):
        open_window(config.root, settings, [Pinned(name=name, size_bytes=9, sha256="x")], now=NOW, of=of)
    erased(config, "anna")
    assert {path.parent.name for path in (config.root / "windows").glob("*/*.json")} == {"another"}


def test_a_cumulative_run_after_an_erasure_has_everybody_else_and_late_records(config):
    log = config.root / "traffic" / TAPS
    log.write_text(lines(*(asked(n, f"s{n}") for n in range(40))))
    settings = config.collect.model_copy(
        update={"window": config.collect.window.model_copy(update={"kind": "cumulative"})}
    )
    config = config.model_copy(update={"collect": settings})
    assert collect.run(config, now=NOW).manifest.counts["kept_records"] == 40
    add_tombstones(config.root, subject_hashes(load_key(config), "s7"), now=NOW)
    assert erased(config, "s7").records == 1
    (log.parent / TAPS.replace("7-17", "8-17")).write_text(lines(asked(99, "s7"), asked(98, "late")))
    after = collect.run(config, now=NOW.replace(day=2)).manifest
    assert (after.counts["kept_records"], after.rejects) == (40, {"erased_subject": 1})
