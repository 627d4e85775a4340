"""A controller that is killed with -9 at any of its lines: the next one ends the rollout, and swaps nothing twice."""

import os
import random
import signal
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from jobs.ledger import unfinished
from tests.jobs.rollouts import folders, roll, start, wait_until

pytestmark = pytest.mark.timeout(600)  # what hangs fails

ROOT = Path(__file__).resolve().parents[2]
TRACED = ("serving/fleet/", "jobs/ledger.py", "jobs/in_charge.py", "pipeline/artifacts.py")


class Tracer:
    """Counts the lines that are run in the controller's files, and kills this process at one of them."""

    def __init__(self, fatal=None):
        self.fatal, self.seen, self.lock = fatal, Counter(), threading.Lock()

    def begin(self):
        threading.settrace(self.call)
        sys.settrace(self.call)

    def call(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(str(ROOT)) or not name[len(str(ROOT)) + 1 :].startswith(TRACED):
            return None
        return self.line

    def line(self, frame, event, argument):
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            with self.lock:
                self.seen[place] += 1
                if self.fatal == (place, self.seen[place]):
                    os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def in_a_child(tracer, work):
    """The lines that a child process ran; None where it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tracer.begin()
            work()
            sys.settrace(None)
            with os.fdopen(write, "w") as out:
                out.writelines(f"{count} {line} {name}\n" for (name, line), count in tracer.seen.items())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as found:
        told = found.read().splitlines()
    os.waitpid(child, 0)
    split = [line.split(" ", 2) for line in told]
    return {(name, int(line)): int(count) for count, line, name in split} or None


def world(folder, *, refusing):
    folder.mkdir()
    made = folders(folder, "1", "2")
    replicas = start(2, made["1"])
    if refusing:
        replicas[1].script.refuses = "2"
    return folder, made, replicas


@pytest.mark.parametrize("refusing", [False, True], ids=["all take it", "one refuses"])
def test_killed_at_any_line_the_next_controller_ends_the_rollout_with_one_version_everywhere(tmp_path, refusing):
    root, made, replicas = world(tmp_path / "whole", refusing=refusing)
    lines = in_a_child(Tracer(), lambda: roll(root, made, replicas))
    assert lines is not None and len(lines) > 220
    wanted = "1" if refusing else "2"
    # The first time that a line is reached, and the last. All of them take minutes: SLIPSTREAM_EVERY_LINE=1.
    fatal = sorted({(place, count) for place, n in lines.items() for count in {1, n}})
    if not os.environ.get("SLIPSTREAM_EVERY_LINE"):
        fatal = random.Random(len(fatal)).sample(fatal, 40)
    wrong, killed = [], 0
    for i, one in enumerate(fatal):
        root, made, replicas = world(tmp_path / str(i), refusing=refusing)
        killed += in_a_child(Tracer(one), partial(roll, root, made, replicas)) is None
        release = roll(root, made, replicas)
        served = [replica.version for replica in replicas]
        swaps = [replica.swaps for replica in replicas]
        once = [[("1", "2")]] * 2 if not refusing else [[("1", "2"), ("2", "1")], []]
        if served != [wanted] * 2 or swaps != once or unfinished(root) is not None:
            wrong.append((one, release.phase, release.why, served, swaps))
        for replica in replicas:
            replica.close()
    assert wrong == []
    assert killed > 0.8 * len(fatal)


def test_a_swap_that_goes_on_after_its_controller_died_is_waited_for_and_not_ordered_twice(tmp_path):
    made = folders(tmp_path, "1", "2")
    replicas = start(2, made["1"], swap_s=0.6)
    child = os.fork()
    if child == 0:
        try:
            roll(tmp_path, made, replicas)
        finally:
            os._exit(0)
    wait_until(lambda: replicas[0].paused)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    release = roll(tmp_path, made, replicas)
    assert release.phase == "converged"
    assert [replica.swaps for replica in replicas] == [[("1", "2")], [("1", "2")]]
    for replica in replicas:
        replica.close()
