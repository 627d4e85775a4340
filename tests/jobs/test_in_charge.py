"""One controller at a time: who is in charge, and when a term is over."""

import json
import os
import signal
import threading
import time

import pytest

from jobs import in_charge as module
from jobs.in_charge import in_charge, who_is_in_charge
from pipeline.errors import StageError

pytestmark = pytest.mark.timeout(120)  # what hangs fails


def terms(root):
    return sorted(path.name for path in (root / "in_charge").glob("*.json"))


def elsewhere(root, **changed):
    """The newest term as if its owner were on another machine."""
    path = root / "in_charge" / terms(root)[-1]
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "far pid:[1]", "over": False, **changed}))
    return path


def test_of_two_at_once_one_is_refused_and_is_told_who_is_in_charge(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_ACTOR", "airflow")
    with in_charge(tmp_path, "deploy"):
        assert f"pid {os.getpid()} on" in who_is_in_charge(tmp_path)
        told = pytest.raises(StageError, match=r"deploy: another process.*started by airflow.*--abort")
        with told, in_charge(tmp_path, "rollback"):
            pass
    assert who_is_in_charge(tmp_path) is None
    with in_charge(tmp_path, "rollback"):
        assert terms(tmp_path) == ["000001.json", "000002.json"]


def test_many_that_begin_in_the_same_moment_are_one_winner(tmp_path):
    won, lost, barrier, leave = [], [], threading.Barrier(8), threading.Event()

    def contend():
        barrier.wait()
        try:
            with in_charge(tmp_path, "deploy") as term:
                won.append(term.number)
                leave.wait(10)
        except StageError:
            lost.append(True)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while len(won) + len(lost) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    leave.set()
    for thread in threads:
        thread.join()
    assert (won, len(lost)) == ([1], 7)


def test_a_process_that_was_killed_here_blocks_nobody_for_a_moment(tmp_path):
    child = os.fork()
    if child == 0:
        with in_charge(tmp_path, "deploy"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    began = time.monotonic()
    with in_charge(tmp_path, "deploy") as term:
        assert term.number == 2
    assert time.monotonic() - began < module.SILENT_S / 2


def test_an_owner_on_another_machine_is_alive_while_its_counter_moves_and_dead_when_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    monkeypatch.setattr(module, "PERIOD_S", 0.1)
    with in_charge(tmp_path, "deploy"):
        pass
    path, stop = elsewhere(tmp_path), threading.Event()

    def beat():
        beats = 0
        while not stop.wait(0.1):
            beats += 1
            elsewhere(tmp_path, beats=beats)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(StageError, match="on far"), in_charge(tmp_path, "deploy"):
        pass
    stop.set()
    thread.join()
    assert path.exists()
    with in_charge(tmp_path, "deploy") as term:
        assert term.number == 2


def test_an_owner_who_was_taken_for_dead_stops_before_it_writes_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.2)
    monkeypatch.setattr(module, "PERIOD_S", 60.0)
    with in_charge(tmp_path, "deploy") as late:
        elsewhere(tmp_path)
        monkeypatch.setattr(module, "PERIOD_S", 0.05)
        with in_charge(tmp_path, "deploy") as term:
            term.require()
            with pytest.raises(StageError, match="term 2 has begun"):
                late.require()
