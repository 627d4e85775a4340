"""The queue of states: never above its budget, in one order, no side that waits for ever, no kill that matters."""

import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import heartbeat, state_queue
from pipeline.engines import PartDone
from pipeline.errors import ConfigError, StageError
from pipeline.heartbeat import Heartbeat
from pipeline.produce import producing
from pipeline.shards import commit_part, part_path
from pipeline.state_queue import StateQueue

PART_BYTES = 10_000


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(state_queue, "POLL_S", 0.002)
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.05)


def queue_of(folder, num_parts=10, *, budget=2, timeout_s=30.0, order=None):
    """A queue with room for ``budget`` parts, their records included."""
    expected = {index: PART_BYTES + 1000 for index in order or range(num_parts)}
    return StateQueue(folder, budget * (PART_BYTES + 1000), expected, timeout_s)


@dataclass(frozen=True)
class Blobs:
    """Work whose parts are one file of zeros, written bit by bit; with faults as a test wants them."""

    folder: Path
    fails_at: int | None = None
    seconds: float = 0.0

    def begin(self, engine):
        return None

    def part(self, engine, index, begun):
        if index == self.fails_at:
            raise StageError(f"no states for part {index}")
        with open(self.folder / "log", "a") as log:
            log.write(f"{index}\n")
        time.sleep(self.seconds)

        def write(path):
            with open(path, "wb") as file:
                for _ in range(10):
                    file.write(bytes(PART_BYTES // 10))
                    file.flush()

        rejects = [{"row_id": f"bad-{index}", "reason": "zero_states"}]
        files = {f"states-{index:05d}-00.arrow": (2, write)}
        commit_part(self.folder / "queue", index, files, rejects=rejects, counts={"rows": 2})
        return PartDone(index, 3, 30)


class Threads:
    """Engines as threads; what one dies over (any other exception) is done again, as Ray Data does it."""

    def __init__(self, number=2):
        self.number = number

    def run(self, work, parts):
        with ThreadPoolExecutor(self.number) as pool:
            waiting = {pool.submit(work.part, None, index, None): index for index in parts}
            while waiting:
                done = next(as_completed(waiting))
                index = waiting.pop(done)
                if isinstance(done.exception(), KeyError):
                    waiting[pool.submit(work.part, None, index, None)] = index
                else:
                    yield done.result()


def begun(folder):
    """Parts in the order that engines began them."""
    return [int(line) for line in (folder / "log").read_text().split()]


def watched(folder, until):
    """The most bytes that the folder ever held, its records included."""
    most = 0
    while not until.is_set():
        total = 0
        for path in folder.glob("*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        most = max(most, total)
        time.sleep(0.001)
    return most


def stream(queue, tmp_path, work=None, engines=None, *, at_a_time=1):
    """Take every part out, in order."""
    with producing(queue, work or Blobs(tmp_path), engines or Threads(), total_rows=30):
        for start in range(0, len(queue.order), at_a_time):
            parts = queue.order[start : start + at_a_time]
            queue.wait_for(parts)
            assert all(part_path(queue.folder, index).exists() for index in parts)
            queue.release(start + len(parts))


def test_a_corpus_five_times_the_budget_passes_through_and_the_disk_never_holds_more(tmp_path):
    queue = queue_of(tmp_path / "queue", 10, budget=2, order=[7, 2, 9, 0, 4, 1, 8, 3, 6, 5])
    queue.recover()
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        most = pool.submit(watched, queue.folder, ended)
        stream(queue, tmp_path, engines=Threads(3))
        ended.set()
    overhead = 2000  # heartbeat.json, released.json and the locks
    assert PART_BYTES < most.result() <= queue.max_bytes + overhead
    places = [queue.order.index(part) for part in begun(tmp_path)]
    assert sorted(places) == list(range(10))
    assert all(abs(place - turn) <= 1 for turn, place in enumerate(places)), "two fit, so two may change places"
    assert queue.released().counts == {"rows": 20}
    assert [one["row_id"] for one in queue.released().rejects] == [f"bad-{n}" for n in queue.order]
    assert queue.bytes_taken() == {} and queue.missing() == []


def test_a_part_that_is_larger_than_the_budget_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"part 1 takes about 50 bytes.*room for 40.*capture\.max_bytes"):
        StateQueue(tmp_path, 40, {0: 30, 1: 50})


def test_when_the_engines_fail_training_ends_with_their_error(tmp_path):
    queue = queue_of(tmp_path / "queue")
    with pytest.raises(StageError, match=r"^no states for part 4") as failure:
        stream(queue, tmp_path, Blobs(tmp_path, fails_at=4))
    assert "will not come: the engines failed: no states for part 4" in str(failure.value.__cause__)
    assert queue.released().parts <= 4


def test_engines_that_end_too_early_are_an_error_and_no_hang(tmp_path):
    class Lazy(Threads):
        def run(self, work, parts):
            yield from super().run(work, parts[:3])

    with pytest.raises(StageError, match=r"ended without parts \[3, 4"):
        stream(queue_of(tmp_path / "queue"), tmp_path, engines=Lazy())


def test_when_training_fails_the_engines_stop(tmp_path):
    queue = queue_of(tmp_path / "queue")
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), producing(queue, Blobs(tmp_path), Threads(), total_rows=30):
        queue.wait_for(queue.order[:2])
        raise ZeroDivisionError
    assert threading.active_count() == before
    assert sorted(begun(tmp_path)) == [0, 1], "two fit, and nothing was begun after training had ended"


LEADS = """
import sys, time
from pathlib import Path
from pipeline.heartbeat import Heartbeat
with Heartbeat(Path(sys.argv[1]) / "heartbeat.json"):
    print("beats", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_when_the_leading_process_is_killed_both_sides_say_so(tmp_path, side):
    queue = queue_of(tmp_path, budget=1, timeout_s=1.0)
    (tmp_path / "states-00000-00.arrow").write_bytes(bytes(PART_BYTES))
    commit_part(tmp_path, 0, {})
    process = subprocess.Popen([sys.executable, "-c", LEADS, str(tmp_path)], stdout=subprocess.PIPE, cwd=CHECKOUT)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(StageError, match=rf"no sign of life for 1 s.*pid {process.pid}"):
        if side == "trainer":
            queue.wait_for([1])
        else:
            with queue.admitted():
                pytest.fail("there is no room")


CHECKOUT = Path(__file__).resolve().parents[2]
HOLDS = """
import pickle, sys
queue = pickle.loads(sys.stdin.buffer.read())
with queue.admitted() as admitted:
    (queue.folder / f".states-{admitted.index:05d}-00.arrow.tmp").write_bytes(bytes(5000))
    print(admitted.index, flush=True)
    import time; time.sleep(60)
"""


def die_in_the_middle(queue):
    """An engine's process is killed while it is at a part; which one."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CHECKOUT
    )
    process.stdin.write(pickle.dumps(queue))
    process.stdin.close()
    index = int(process.stdout.readline())
    assert queue.bytes_taken()[index] == PART_BYTES + 1000, "its whole room is kept for it"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return index


def test_what_a_dead_engine_left_is_done_before_anything_later(tmp_path):
    queue = queue_of(tmp_path, budget=2)
    with Heartbeat(queue.heartbeat):
        assert die_in_the_middle(queue) == 0
        with queue.admitted() as again:
            assert (again.index, again.tries) == (0, 2)
            assert not list(tmp_path.glob(".states*")), "what the dead one wrote is gone"
            with queue.admitted() as other:
                assert (other.index, other.tries) == (1, 1)


def test_a_part_that_takes_down_one_engine_after_another_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(state_queue, "MAX_TRIES", 2)
    queue = queue_of(tmp_path)
    with Heartbeat(queue.heartbeat):
        assert [die_in_the_middle(queue), die_in_the_middle(queue)] == [0, 0]
        with pytest.raises(StageError, match="part 0 was begun 2 times"), queue.admitted():
            pass
    queue.recover()
    with Heartbeat(queue.heartbeat), queue.admitted() as admitted:
        assert admitted.tries == 1, "a new run tries again"


def test_after_a_kill_committed_parts_are_used_and_all_else_is_removed(tmp_path):
    queue = queue_of(tmp_path / "queue", 6, budget=6)
    queue.recover()
    blobs = Blobs(tmp_path)
    for index in (0, 1, 2, 4, 5):
        blobs.part(None, index, None)
    queue.release(1)
    before = {path.name: path.stat().st_mtime_ns for path in queue.folder.glob("*-0000[24]*")}
    (queue.folder / "states-00005-00.arrow").write_bytes(b"cut")
    (queue.folder / ".states-00003-00.arrow.12-ab.tmp").write_bytes(b"half")
    (queue.folder / "rows-00003.parquet").write_bytes(b"PAR1")
    # A kill between the note that part 1 is done with and the removal of its files.
    body = json.loads((queue.folder / "released.json").read_text())
    (queue.folder / "released.json").write_text(json.dumps({**body, "parts": 2}))
    queue.recover()
    assert queue.missing() == [3, 5]
    assert {path.name for path in queue.folder.iterdir() if "lock" not in path.name} == {"released.json", *before}
    assert {path.name: path.stat().st_mtime_ns for path in queue.folder.glob("*-0000[24]*")} == before
    with pytest.raises(StageError, match=r"parts \[1\] were trained on and removed"):
        queue.wait_for([1, 2])


def test_nothing_is_cleared_while_an_engine_of_the_killed_run_is_still_at_a_part(tmp_path):
    queue = queue_of(tmp_path, timeout_s=0.3)
    with Heartbeat(queue.heartbeat), queue.admitted():
        with pytest.raises(StageError, match="an engine of an earlier run is still at part 0"):
            queue.recover()
        assert queue.heartbeat.exists()
    queue.recover()
    assert not queue.heartbeat.exists()


def test_a_release_also_removes_what_a_killed_release_left(tmp_path):
    queue = queue_of(tmp_path / "queue", 3, budget=3)
    queue.recover()
    for index in range(3):
        Blobs(tmp_path).part(None, index, None)
    (queue.folder / "released.json").write_text(json.dumps({"parts": 2}))
    queue.release(1)
    assert sorted(queue.bytes_taken()) == [2] and queue.released().parts == 2


def test_a_run_that_died_goes_on_with_what_is_there(tmp_path):
    queue = queue_of(tmp_path / "queue", 6, budget=3)
    with pytest.raises(ZeroDivisionError), producing(queue, Blobs(tmp_path), Threads(), total_rows=18):
        queue.wait_for(queue.order[:2])
        queue.release(1)
        queue.wait_for(queue.order[1:4])
        raise ZeroDivisionError
    with producing(queue, Blobs(tmp_path), Threads(), total_rows=18):
        for place in range(1, 6):
            queue.wait_for([queue.order[place]])
            queue.release(place + 1)
    assert sorted(begun(tmp_path)) == list(range(6)), "none twice"
    assert queue.released().parts == 6


def test_a_queue_is_the_same_in_another_process(tmp_path):
    queue = queue_of(tmp_path, order=[3, 1, 2])
    assert pickle.loads(pickle.dumps(queue)).order == (3, 1, 2)


def test_after_a_kill_a_smaller_budget_still_has_room_for_what_is_needed_first(tmp_path):
    queue = queue_of(tmp_path / "queue", 6, budget=6)
    queue.recover()
    for index in (1, 2, 3, 4):
        Blobs(tmp_path).part(None, index, None)
    smaller = queue_of(tmp_path / "queue", 6, budget=3)
    smaller.recover()
    assert smaller.missing() == [0, 3, 4, 5]
    with Heartbeat(smaller.heartbeat), smaller.admitted() as admitted:
        assert admitted.index == 0
