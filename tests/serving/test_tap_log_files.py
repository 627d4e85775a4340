"""The log's files: whole under their final names, readable to the last whole record under any other, gone in time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tapped import sealed_lines

from serving.tap.log_files import TrafficLog, recover
from serving.tap.sealing import Key
from serving.tap.settings import LogSettings

ROOT = Path(__file__).resolve().parents[2]
SECRET = bytes(range(32))
NAME = r"traffic-[A-Za-z0-9.-]+-\d+-\d{13}"


class Log:
    """A log in a folder, with the events that it told."""

    def __init__(self, folder, *, first_pause_s=0.0, **settings):
        self.events = []
        self.log = TrafficLog(
            LogSettings(Path(folder), **settings), on_event=self.events.append, first_pause_s=first_pause_s
        )

    def write(self, *numbers, width=0):
        return [self.log.write(json.dumps({"n": n, "text": "x" * width}).encode() + b"\n") for n in numbers]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def numbers(path, keys=None):
    lines = sealed_lines(path, keys) if path.suffix == ".sealed" else path.read_bytes().splitlines(keepends=True)
    return [json.loads(line)["n"] for line in lines if line.endswith(b"\n")]


KINDS = pytest.mark.parametrize(("key", "kind"), [(None, "jsonl"), (Key("k1", SECRET), "sealed")], ids=str)


@KINDS
def test_a_file_is_begun_with_its_first_record_and_committed_by_rename(tmp_path, key, kind):
    log = Log(tmp_path, key=key)
    assert names(tmp_path) == []
    assert log.write(1, 2) == ["written", "written"]
    (name,) = names(tmp_path)
    assert re.fullmatch(rf"{NAME}\.open\.{kind}", name)
    assert numbers(tmp_path / name, {"k1": SECRET}) == [1, 2], "an open file's whole records can be read"
    log.log.close()
    (final,) = names(tmp_path)
    assert final == name.replace(".open", "") and numbers(tmp_path / final, {"k1": SECRET}) == [1, 2]
    assert log.events == ["file_opened", "file_committed"]


def test_a_log_without_records_leaves_no_file(tmp_path):
    Log(tmp_path).log.close()
    assert names(tmp_path) == []


def test_files_are_committed_by_size_and_by_age(tmp_path):
    log = Log(tmp_path, file_bytes=300, file_s=0.05)
    log.write(*range(3), width=120)
    assert log.events == ["file_opened", "file_committed"]
    time.sleep(0.002)  # another name
    log.write(4)
    log.log.tick()
    assert log.events[2:] == ["file_opened"]
    time.sleep(0.06)
    log.log.tick()
    assert log.events[2:] == ["file_opened", "file_committed"]
    assert [numbers(tmp_path / name) for name in names(tmp_path)] == [[0, 1, 2], [4]]


@KINDS
def test_a_full_disk_pauses_the_log_and_leaves_no_torn_record(tmp_path, key, kind):
    """The file's own descriptor leads to /dev/full, so the writes fail as on a full disk."""
    log = Log(tmp_path, key=key, first_pause_s=0.2)
    log.write(1)
    keep, full = os.dup(log.log.fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log.log.fd)
    assert log.write(2, 3) == ["dropped_disk_full", "dropped_stopped"]
    time.sleep(0.22)
    assert log.write(4) == ["written"]
    os.close(keep)
    log.log.close()
    log.log.sweep()
    kept = [n for name in names(tmp_path) for n in readable(tmp_path / name)]
    assert sorted(kept) == [1, 4] and log.events.count("stopped") == 1


def readable(path):
    """The numbers on record, also of a committed file without its end mark."""
    found = []
    if path.suffix != ".sealed":
        return numbers(path)
    try:
        for line in sealed_lines(path, {"k1": SECRET}):
            found.append(json.loads(line)["n"])
    except EOFError:
        pass
    return found


@KINDS
def test_a_record_that_did_not_fit_is_taken_back(tmp_path, key, kind):
    """A limit on the size of files lets a part of a record through, as a nearly full disk does."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from serving.tap.log_files import TrafficLog
from serving.tap.sealing import Key
from serving.tap.settings import LogSettings
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
key = Key("k1", bytes(range(32))) if {kind!r} == "sealed" else None
log = TrafficLog(LogSettings(Path(sys.argv[1]), key=key), on_event=lambda name: None)
print([log.write(b'{{"n": %d, "text": "%s"}}\\n' % (n, b"x" * 400)) for n in range(3)])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "['written', 'written', 'dropped_write_error']\n", done.stderr
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().endswith(b"\n") if kind == "jsonl" else path.stat().st_size < 1000
    assert readable(path) == [0, 1]


@KINDS
@pytest.mark.parametrize("torn", [0, 1, 28])
def test_what_a_killed_writer_left_is_cut_to_its_whole_records_and_committed(tmp_path, key, kind, torn):
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from serving.tap.log_files import TrafficLog
from serving.tap.sealing import Key
from serving.tap.settings import LogSettings
key = Key("k1", bytes(range(32))) if {kind!r} == "sealed" else None
log = TrafficLog(LogSettings(Path(sys.argv[1]), key=key), on_event=lambda name: None)
for n in range(3):
    log.write(b'{{"n": %d}}\\n' % n)
os.write(log.fd, (log._seal.chunk(b'{{"n": 3}}\\n') if key else b'{{"n": 3, "text": "' + b"x" * 40)[:{torn}])
print("ready", flush=True)
time.sleep(60)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    (path,) = tmp_path.iterdir()
    assert numbers(path, {"k1": SECRET}) == [0, 1, 2]
    alive = Log(tmp_path)
    assert alive.events == [] and names(tmp_path) == [path.name], "a file that is being written is left alone"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    alive.log.sweep()
    (left,) = tmp_path.iterdir()
    assert left.name == path.name.replace(".open", "") and alive.events == ["file_recovered"]
    assert readable(left) == [0, 1, 2]


def test_an_open_file_without_a_whole_record_is_deleted_once_its_writer_is_dead(tmp_path):
    for content, kind in ((b"", "jsonl"), (b'{"n": 1', "jsonl"), (b"", "sealed"), (b"SLIPTAP\x01\x02k1", "sealed")):
        path = tmp_path / f"traffic-h-1-{time.time_ns() // 1_000_000}.open.{kind}"
        path.write_bytes(content)
        assert recover(path) and not path.exists()


def test_a_long_torn_line_is_cut_whatever_its_length(tmp_path):
    path = tmp_path / f"traffic-h-1-{time.time_ns() // 1_000_000}.open.jsonl"
    path.write_bytes(b'{"n": 1}\n' + b"x" * 3_000_000)
    assert recover(path)
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == b'{"n": 1}\n'


def test_the_folders_own_files_are_deleted_when_their_time_is_over_and_nobody_elses(tmp_path):
    now_ms = time.time_ns() // 1_000_000
    old, young = now_ms - 8 * 24 * 3600 * 1000, now_ms - 6 * 24 * 3600 * 1000
    gone = [f"traffic-h-1-{old}.jsonl", f"traffic-h.example-1-{old}.sealed", f"traffic-h-1-{old}.open.jsonl",
            f".traffic-h-1-{old}.open.jsonl", f".traffic-h-1-{old}.jsonl.99.tmp"]  # fmt: skip
    kept = [
        f"traffic-h-1-{young}.jsonl",
        f"traffic-h-1-{old}.jsonl.gz",
        f"other-h-1-{old}.jsonl",
        "notes.txt",
        f".traffic-h-1-{young}.jsonl.99.tmp",
    ]
    for name in gone + kept:
        (tmp_path / name).write_text('{"n": 1}\n')
        os.utime(tmp_path / name)
    log = Log(tmp_path)
    assert names(tmp_path) == sorted(kept) and log.events == ["file_expired"] * 5


def test_no_record_outlives_its_time_although_its_file_was_touched(tmp_path):
    log = Log(tmp_path, ttl_s=0.2, file_s=0.05)
    log.write(1)
    time.sleep(0.06)
    log.log.tick()
    (path,) = tmp_path.iterdir()
    time.sleep(0.25)
    os.utime(path)
    log.log.tick()
    assert names(tmp_path) == []


def test_a_folder_that_has_gone_pauses_the_log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    log = Log(folder)
    folder.rmdir()
    assert log.write(1) == ["dropped_write_error"]
    log.log.sweep()
    assert log.events == ["stopped", "sweep_failed"]
    folder.mkdir()
    assert log.write(2) == ["written"]


def test_pauses_grow_while_errors_go_on_and_are_short_again_after_a_record(tmp_path):
    log = Log(tmp_path / "none", first_pause_s=0.05)
    seen = []
    for _ in range(3):
        assert log.write(1) == ["dropped_write_error"]
        seen.append(log.log._paused_until - time.monotonic())
        time.sleep(max(0.0, seen[-1]) + 0.01)
    assert seen == pytest.approx([0.05, 0.1, 0.2], abs=0.02)
    (tmp_path / "none").mkdir()
    assert log.write(2) == ["written"] and log.log._pause_s == 0.05
