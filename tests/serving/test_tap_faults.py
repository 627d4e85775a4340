"""What may go wrong behind the tap: a writer that is killed, stuck or has no room. Clients notice none of it."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tapped import ANSWER, CHAT, app_that_answers, outcomes, records, send

from serving.errors import TapError
from serving.tap import TrafficTap, feeder
from serving.tap.feeder import QUEUE_SIZE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tap(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TAP_DIR", str(tmp_path / "log"))
    monkeypatch.setenv("SLIPSTREAM_TAP_CONSENT", "allow_all")
    monkeypatch.setattr(feeder, "FIRST_BACK_OFF_S", 0.05)
    tap = TrafficTap(app_that_answers(ANSWER))
    yield tap
    if tap.feeder.writer and not tap.feeder.writer.died:
        os.kill(tap.feeder.writer.process.pid, signal.SIGCONT)
    tap.feeder.close(30)


def wait_for(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_killed_writer_is_replaced_and_what_was_with_it_is_counted(tap):
    for _ in range(3):
        assert send(tap, times=5).json() == ANSWER
        wait_for(lambda: tap.feeder.writer and tap.feeder.writer.num_unanswered == 0 and tap.feeder.queue.empty())
        pid = tap.feeder.writer.process.pid
        os.kill(pid, signal.SIGKILL)
        assert send(tap, times=2).json() == ANSWER
        wait_for(lambda pid=pid: tap.feeder.writer and tap.feeder.writer.process.pid != pid)
    kept, found = records(tap), outcomes(tap)
    assert found["written"] == len(kept) >= 15 and sum(found.values()) == 21
    assert set(found) <= {"written", "dropped_writer_died"} and tap.metrics.counts["writer_started"] == 4


def test_a_stuck_writer_fills_the_queue_and_no_request_waits(tap):
    send(tap)
    wait_for(lambda: tap.metrics.counts["written"] == 1)
    os.kill(tap.feeder.writer.process.pid, signal.SIGSTOP)
    tap.app = app_that_answers(json.dumps(ANSWER).encode() + b" " * 4000)  # 4 MB into a pipe of 1 MiB and a full queue
    started = time.monotonic()
    send(tap, times=QUEUE_SIZE + 600)
    assert time.monotonic() - started < 30
    wait_for(lambda: tap.metrics.counts["dropped_queue_full"] > 0)
    os.kill(tap.feeder.writer.process.pid, signal.SIGCONT)
    kept, found = records(tap), outcomes(tap)
    assert found["written"] == len(kept) and sum(found.values()) == 1 + QUEUE_SIZE + 600
    assert 0 < found["dropped_queue_full"] <= 600 and set(found) == {"written", "dropped_queue_full"}


def test_the_servers_end_does_not_wait_for_a_stuck_writer(tap):
    os.kill(tap.feeder.writer.process.pid, signal.SIGSTOP)
    send(tap, times=3)
    started = time.monotonic()
    tap.feeder.close(0.5)
    assert 0.3 < time.monotonic() - started < 3
    assert outcomes(tap) == {"dropped_at_shutdown": 3}
    tap.app = app_that_answers(ANSWER)
    assert send(tap).json() == ANSWER, "and who still asks gets an answer"


def test_no_room_stops_the_tap_and_not_the_server(tap):
    send(tap)
    wait_for(lambda: tap.metrics.counts["written"] == 1)
    (log,) = tap.settings.log.folder.iterdir()
    pid = tap.feeder.writer.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (log.stat().st_size + 100, resource.RLIM_INFINITY))
    assert send(tap, CHAT | {"temperature": 0.7}, times=4).json() == ANSWER
    kept = records(tap)
    assert outcomes(tap) == {"written": 1, "dropped_write_error": 1, "dropped_stopped": 3} and len(kept) == 1


def records_left(folder):
    return [
        json.loads(line)
        for path in Path(folder).iterdir()
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def test_what_had_reached_the_writer_is_written_although_the_server_is_killed(tmp_path):
    """The tap of a process that is killed outright; its writer sees the end of the pipe."""
    code = """
import os, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from tapped import ANSWER, app_that_answers, send
from serving.tap import TrafficTap
tap = TrafficTap(app_that_answers(ANSWER))
send(tap, times=50)
while not tap.feeder.queue.empty():
    time.sleep(0.01)
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""
    env = {**os.environ, "SLIPSTREAM_TAP_DIR": str(tmp_path), "SLIPSTREAM_TAP_CONSENT": "allow_all"}
    subprocess.run([sys.executable, "-c", code, str(ROOT)], env=env, check=False)
    wait_for(lambda: [path.suffixes for path in tmp_path.iterdir()] == [[".jsonl"]])
    assert len(records_left(tmp_path)) == 50


def test_a_key_without_its_library_stops_the_start_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TAP_DIR", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_TAP_CONSENT", "allow_all")
    monkeypatch.setenv("SLIPSTREAM_TAP_KEY", "k1:" + "A" * 43 + "=")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(TapError, match="cryptography package is not installed"):
        TrafficTap(app_that_answers(ANSWER))


def test_a_sealed_log_holds_no_word_of_anyone(tmp_path, monkeypatch):
    from tapped import sealed_lines

    from pipeline.sources.sealed import keys_of_environment

    monkeypatch.setenv("SLIPSTREAM_TAP_DIR", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_TAP_CONSENT", "allow_all")
    monkeypatch.setenv("SLIPSTREAM_TAP_KEY", "k1:" + "A" * 43 + "=")
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, times=3)
    tap.feeder.close(30)
    (log,) = tmp_path.iterdir()
    assert log.suffixes == [".sealed"] and b"parcel" not in log.read_bytes() and b"messages" not in log.read_bytes()
    found = [json.loads(line) for line in sealed_lines(log, keys_of_environment())]
    assert [record["messages"] for record in found] == [CHAT["messages"]] * 3
