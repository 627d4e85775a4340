"""A watch whose process, disk, clock or logs fail: it goes on, and nothing counts twice."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import watch as watch_job
from jobs import watch_look, watch_replicas
from jobs.watch import FIRING
from jobs.watch_look import Watch
from pipeline.watch.hours import HOUR_S
from tests.jobs.watched_logs import SETTINGS, START, config_of, fall, look, records, write_log

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "logs"


def test_a_watch_that_is_killed_at_any_moment_ends_where_one_that_is_not_does(tmp_path, folder):
    begin = int(time.time() // HOUR_S - 110) * HOUR_S
    whole = records(0, 80, start=begin) + records(80, 26, start=begin, factor=fall)
    write_log(folder, whole)
    rng, roots = random.Random(5), (tmp_path / "killed", tmp_path / "straight")
    commands = []
    for root in roots:
        toml = tmp_path / f"{root.name}.toml"
        watch = ", ".join(f"{name} = {json.dumps(value)}" for name, value in SETTINGS.items())
        toml.write_text(
            f'root = "{root}"\nworkload = "mails"\nwatch = {{{watch}}}\n[target]\nmodel = "/models/toy"\n'
            f'[collect]\nsources = ["{folder}"]\n'
        )
        commands.append([sys.executable, "jobs/watch.py", "--config", str(toml), "--once"])
    for _ in range(3):
        process = subprocess.Popen(commands[0], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(1.0, 4.0))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120) for command in commands]
    assert [one.returncode for one in done] == [FIRING, FIRING], done[0].stderr
    killed, straight = (rounded(one.stdout) for one in done)
    assert killed["firing"] == straight["firing"]
    assert different(killed["slices"], straight["slices"]) == {}
    assert killed["records"] == straight["records"]
    for name in ("hours", "asked"):
        kept = [{p.name: rounded(p.read_text()) for p in (root / "watch" / name).glob("[!.]*")} for root in roots]
        assert kept[0] == kept[1] and (name == "asked" or len(kept[0]) == 106)


def rounded(text):
    """JSON without the last digits of its sums, which depend on the order that a kill leaves."""
    return json.loads(text, parse_float=lambda digits: round(float(digits), 9))


def different(these, those):
    """What is not alike in the figures of slices, by slice and figure."""
    assert set(these) == set(those)
    pairs = {(name, key): (these[name].get(key), those[name].get(key)) for name in these for key in these[name]}
    return {at: (a, b) for at, (a, b) in pairs.items() if a != b}


class Killed(BaseException):
    """The end of a process, as far as a test in one process can have it."""


def test_killed_before_or_after_any_file_is_kept_the_next_look_ends_where_it_should(tmp_path, folder, monkeypatch):
    from pipeline import artifacts
    from pipeline.watch import asked, hours, reading, state

    for module in (asked, hours, reading, state, watch_look, watch_replicas):
        monkeypatch.setattr(module, "write_durably", lambda path, data: keep(path, data))
    calls = []

    def keep(path, data):
        calls.append(path.name)
        if killed and len(calls) == killed[0] and killed[1] == "before":
            raise Killed
        artifacts.write_durably(path, data)
        if killed and len(calls) == killed[0] and killed[1] == "after":
            raise Killed

    write_log(folder, records(0, 22))
    straight, killed = config_of(tmp_path / "straight", sources=[folder]), None
    look(straight, 21)
    shutil.copytree(straight.root, tmp_path / "before")
    write_log(folder, records(22, 4))
    calls.clear()
    expected, whole = look(straight, 25), list(calls)
    assert {"reading.json", "replicas.json", "state.json", "alarms.json", "2027-01-01.json"} < set(whole)
    made = tmp_path / "straight" / "watch"
    for number in range(1, len(whole) + 1):
        for when in ("before", "after"):
            killed, root = (number, when), tmp_path / f"{number}-{when}"
            shutil.copytree(tmp_path / "before", root)
            calls.clear()
            with pytest.raises(Killed):
                look(config_of(root, sources=[folder]), 25)
            killed = None
            assert look(config_of(root, sources=[folder]), 25) == expected
            for kept in (made / "hours", made / "asked"):
                own = root / "watch" / kept.name
                assert {p.name: p.read_text() for p in own.iterdir()} == {p.name: p.read_text() for p in kept.iterdir()}


def test_hours_that_a_killed_first_look_left_count_once(tmp_path, folder):
    write_log(folder, records(0, 80) + records(80, 26, factor=fall))
    straight, killed = (config_of(tmp_path / name, sources=[folder]) for name in ("straight", "killed"))
    expected = look(straight, 107)
    left = killed.root / "watch" / "hours"
    left.mkdir(parents=True)
    for path in sorted((straight.root / "watch" / "hours").iterdir())[:40]:  # and no reading.json yet
        shutil.copy(path, left)
    assert different(look(killed, 107)["slices"], expected["slices"]) == {}


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path, folder, monkeypatch):
    from pipeline import artifacts
    from pipeline.watch import hours

    config, straight = (config_of(tmp_path / name, sources=[folder]) for name in ("full", "straight"))
    write_log(folder, [])
    full = [OSError(28, "No space left on device")] * 2

    def keep(path, data):
        if path.name == "2027-01-01T03.json" and full:
            raise full.pop()
        artifacts.write_durably(path, data)

    class Enough(Exception):
        pass

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            write_log(folder, records(2, 5))
        if len(looks) == 4:
            raise Enough

    looks, watches = [], []
    monkeypatch.setattr(hours, "write_durably", keep)
    monkeypatch.setattr(watch_job.time, "sleep", sleep)

    def of(config):
        watches.append(Watch(config, clock=lambda: START + (7.5 if looks else 1.5) * HOUR_S))
        return watches[-1]

    monkeypatch.setattr(watch_job, "Watch", of)
    with pytest.raises(Enough):
        watch_job._go_on(config)
    assert len(watches) == 3 and not full
    assert look(config, 6)["slices"] == look(straight, 6)["slices"]
    assert len(list((config.root / "watch" / "hours").iterdir())) == 5


def test_a_clock_that_jumps_ahead_and_back_costs_a_day_at_most(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 90))
    before = look(config, 89)
    years = Watch(config, clock=lambda: START + 5 * 365 * 86400.0).look()
    assert years["slices"] == before["slices"]
    write_log(folder, records(90, 48))
    back = look(config, 137)
    assert back["records"]["counted"] == 20 * 138 - back["records"].get("late", 0)
    assert back["records"].get("late", 0) <= 20 * 24 and back["phase"] == "watching" and not back["firing"]
    # The tap's clock was ahead too: what it wrote then is forgotten.
    write_log(folder, records(5 * 365 * 24, 1))
    Watch(config, clock=lambda: START + 5 * 365 * 86400.0 + 2 * HOUR_S).look()
    write_log(folder, records(138, 30))
    again = look(config, 167)
    assert again["slices"]["all"]["requests"] == 20 * 24 and again["phase"] == "watching"
    assert len(list((config.root / "watch" / "hours").iterdir())) <= 168 and not list(config.root.rglob("2031*"))


def test_a_log_that_nobody_may_read_holds_the_watch_up_for_a_day_and_no_longer(tmp_path, folder, monkeypatch):
    from pipeline.errors import StageError
    from pipeline.watch import logs

    read = logs.read

    def refuses(new, *, max_line_bytes):
        if "other" in new.key:
            raise StageError("permission denied")
        return read(new, max_line_bytes=max_line_bytes)

    monkeypatch.setattr(logs, "read", refuses)
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 40))
    write_log(folder, records(0, 1), name="traffic-other-1-1700000000000.jsonl")
    assert look(config, 20)["slices"] == {}
    body = look(config, 39)
    assert body["slices"]["all"]["requests"] == 20 * 16 and "permission" not in json.dumps(body)


def test_what_has_expired_is_neither_read_nor_kept(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder], retention={"ttl_days": 2})
    write_log(folder, records(0, 72))
    body = look(config, 71)
    assert body["records"] == {"counted": 20 * 47, "expired": 20 * 25}  # it is half past midnight
    asked = config.root / "watch" / "asked"
    assert [path.name for path in asked.iterdir()] == ["2027-01-03.json"]
    Watch(config, clock=lambda: START + 30 * 86400.0).look()
    assert list(asked.iterdir()) == [] and '"sampled":[]' in (config.root / "watch/reading.json").read_text()


def test_a_part_that_cannot_be_read_is_read_by_the_next_look_and_counts_once(tmp_path, folder, monkeypatch):
    from pipeline.errors import StageError
    from pipeline.watch import logs

    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 3))
    read = logs.read

    def breaks(new, *, max_line_bytes):
        for number, record in enumerate(read(new, max_line_bytes=max_line_bytes)):
            if number == 17:
                raise StageError("the storage is gone")
            yield record

    monkeypatch.setattr(logs, "read", breaks)
    assert look(config, 1)["records"] == {}
    monkeypatch.setattr(logs, "read", read)
    monkeypatch.setattr(logs, "PART_BYTES", 5000)
    assert look(config, 1)["records"] == {"counted": 60}


def test_a_damaged_state_stops_with_what_to_do(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 3))
    look(config, 3)
    (tmp_path / "root/watch/state.json").write_text("{")
    from pipeline.errors import SchemaError

    with pytest.raises(SchemaError, match=r"state\.json.*remove it to learn anew"):
        look(config, 4)
    os.remove(tmp_path / "root/watch/state.json")
    assert look(config, 4)["records"]["counted"] == 60
