import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.collect_config import WindowConfig
from pipeline.errors import ConfigError, SchemaError
from pipeline.windows import Pinned, close_window, interval, open_window

ROOT = Path(__file__).resolve().parents[2]
DAY = timedelta(days=1)
NOON = datetime(2026, 3, 10, 12, 30, tzinfo=UTC)
MIDNIGHT = datetime(2026, 3, 10, tzinfo=UTC).timestamp()


def pin(name, size, sha256="00"):
    return Pinned(name=name, size_bytes=size, sha256=sha256)


def opened(root, now, *sources, kind="sliding", **settings):
    return open_window(root, WindowConfig(kind=kind, **settings), sources, now=now, of="traffic")


def closed(root, now, *sources, kind="sliding", **settings):
    window = opened(root, now, *sources, kind=kind, **settings)
    close_window(root, WindowConfig(kind=kind, **settings), window, of="traffic", prompts="p")
    return window


def test_a_window_of_everything_takes_records_with_and_without_a_time(tmp_path):
    window = opened(tmp_path, NOON, pin("a", 10), kind="all")
    assert [window.place(ts, source="a", offset=0) for ts in (None, 0.0, 1e12)] == ["in"] * 3
    assert not (tmp_path / "windows").exists()


def test_windows_end_at_whole_days_so_that_two_runs_of_one_night_are_one(tmp_path):
    first = opened(tmp_path, NOON, pin("a", 10), days=2)
    again = opened(tmp_path, NOON + timedelta(hours=7), pin("a", 500), pin("b", 3), days=2)
    assert first == again
    assert (first.start, first.end) == (MIDNIGHT - 2 * 86400, MIDNIGHT)
    assert again.sources == (pin("a", 10),)


def test_hours_divide_the_day_from_midnight_utc():
    settings = WindowConfig(kind="sliding", days=1, every_hours=8)
    assert interval(settings, now=NOON, previous_end=None)[1] == MIDNIGHT + 8 * 3600


def test_missed_nights_are_caught_up_and_no_record_falls_between_two_windows(tmp_path):
    closed(tmp_path, NOON, pin("a", 10), days=1)
    after = opened(tmp_path, NOON + 5 * DAY, pin("a", 90), days=1)
    assert (after.start, after.end) == (MIDNIGHT, MIDNIGHT + 5 * 86400)


def test_a_window_that_was_opened_and_not_completed_counts_as_missed(tmp_path):
    closed(tmp_path, NOON, pin("a", 10), days=1)
    opened(tmp_path, NOON + DAY, pin("a", 20), days=1)
    assert opened(tmp_path, NOON + 2 * DAY, pin("a", 30), days=1).start == MIDNIGHT


def test_a_record_belongs_to_exactly_one_place_by_its_time(tmp_path):
    window = opened(tmp_path, NOON, pin("a", 10), days=1)
    ends = (MIDNIGHT - 86400, MIDNIGHT)
    found = [window.place(ts, source="a", offset=0) for ts in (ends[0] - 1, ends[0], ends[1] - 1, ends[1], None)]
    assert found == ["earlier", "in", "in", "later", "no_time"]


def test_what_came_late_goes_to_the_next_window_once(tmp_path):
    closed(tmp_path, NOON, pin("a", 1000), days=1)
    old = MIDNIGHT - 30 * 86400
    second = closed(tmp_path, NOON + DAY, pin("a", 2000), pin("b", 50), days=1)
    places = {
        "read before": second.place(old, source="a", offset=999),
        "appended since": second.place(old, source="a", offset=1000),
        "a new file": second.place(old, source="b", offset=0),
    }
    assert places == {"read before": "earlier", "appended since": "in", "a new file": "in"}
    third = opened(tmp_path, NOON + 2 * DAY, pin("a", 2000), pin("b", 50), days=1)
    assert third.place(old, source="a", offset=1000) == "earlier"
    assert third.place(old, source="b", offset=0) == "earlier"


def test_a_file_that_one_window_did_not_see_is_not_forgotten_by_the_one_after(tmp_path):
    closed(tmp_path, NOON, pin("a", 1000), pin("gone", 70), days=1)
    closed(tmp_path, NOON + DAY, pin("a", 1000), days=1)
    third = opened(tmp_path, NOON + 2 * DAY, pin("a", 1000), pin("gone", 70), days=1)
    assert third.place(0.0, source="gone", offset=69) == "earlier"


def test_a_packed_file_that_was_read_once_holds_nothing_new_whatever_it_unpacks_to(tmp_path):
    packed = Pinned(name="a.gz", size_bytes=100, sha256="00", is_packed=True)
    closed(tmp_path, NOON, packed, days=1)
    second = opened(tmp_path, NOON + DAY, packed, days=1)
    assert second.place(0.0, source="a.gz", offset=5000) == "earlier"


def test_what_comes_late_in_a_sealed_file_that_was_still_open_is_not_lost(tmp_path):
    growing = Pinned(name="a.sealed", size_bytes=10, sha256="00", is_packed=True, is_open=True)
    closed(tmp_path, NOON, growing, days=1)
    whole = Pinned(name="a.sealed", size_bytes=900, sha256="01", is_packed=True)
    after = closed(tmp_path, NOON + DAY, whole, days=1)
    assert after.place(MIDNIGHT - 5, source="a.sealed", offset=700) == "in"
    assert (
        opened(tmp_path, NOON + 2 * DAY, whole, days=1).place(MIDNIGHT - 5, source="a.sealed", offset=700) == "earlier"
    )


def test_the_first_window_takes_nothing_from_before_its_start(tmp_path):
    assert opened(tmp_path, NOON, pin("a", 10), days=1).place(0.0, source="a", offset=5) == "earlier"


def test_a_cumulative_window_grows_at_its_end_alone(tmp_path):
    since = NOON - 100 * DAY
    first = closed(tmp_path, NOON, pin("a", 10), kind="cumulative", since=since)
    second = opened(tmp_path, NOON + DAY, pin("a", 20), kind="cumulative", since=since)
    assert first.start == second.start == since.timestamp()
    assert second.end - first.end == 86400
    assert opened(tmp_path, NOON, pin("a", 10), kind="cumulative").place(0.0, source="a", offset=0) == "in"


def test_an_end_that_has_not_come_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"2026-03-11T00:00:00\+00:00 has not come yet"):
        opened(tmp_path, NOON, pin("a", 10), until=datetime(2026, 3, 11, tzinfo=UTC))


def test_an_end_before_the_last_completed_window_is_refused_unless_it_is_on_record(tmp_path):
    closed(tmp_path, NOON - DAY, pin("a", 5), days=1)
    last = closed(tmp_path, NOON, pin("a", 10), days=1)
    before = NOON.replace(hour=0, minute=0) - DAY
    assert opened(tmp_path, NOON, pin("a", 10), days=1, until=before).sources == (pin("a", 5),)
    with pytest.raises(ConfigError, match="lies before the end of the last completed window"):
        opened(tmp_path, NOON, pin("a", 10), days=1, until=before - DAY)
    assert last.completed is None  # what is on disk was completed


def test_other_sources_have_windows_of_their_own(tmp_path):
    closed(tmp_path, NOON, pin("a", 10), days=1)
    other = open_window(tmp_path, WindowConfig(kind="sliding", days=1), [pin("z", 1)], now=NOON, of="other")
    assert other.sources == (pin("z", 1),)
    assert other.previous_end is None


def test_of_runs_that_begin_together_all_have_the_window_of_the_first(tmp_path):
    script = (
        "import sys, time\nfrom datetime import UTC, datetime\nfrom pathlib import Path\n"
        "from pipeline.collect_config import WindowConfig\nfrom pipeline.windows import Pinned, open_window\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "for n in range(40):\n"
        "    pin = Pinned(name='a', size_bytes=int(sys.argv[2]), sha256='00')\n"
        "    now = datetime(2026, 3, 10, 12, tzinfo=UTC)\n"
        "    made = open_window(Path(sys.argv[1]), WindowConfig(kind='sliding'), [pin], now=now, of=str(n))\n"
        "    print(made.sources[0].size_bytes)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    runs = [subprocess.Popen([*command, str(n)], **pipes) for n in range(3)]
    for process in runs:
        assert process.stdout.readline() == "ready\n"
    for process in runs:
        process.stdin.write("\n")
        process.stdin.flush()
    first, *others = (process.communicate()[0] for process in runs)
    assert len(first.splitlines()) == 40 and others == [first, first]


def test_a_damaged_window_says_which_file_to_remove(tmp_path):
    opened(tmp_path, NOON, pin("a", 10), days=1)
    (path,) = (tmp_path / "windows" / "traffic").glob("*.json")
    path.write_text("{")
    with pytest.raises(SchemaError, match=path.name):
        opened(tmp_path, NOON, pin("a", 10), days=1)
