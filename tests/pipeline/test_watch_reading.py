from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import Rejected, SchemaError
from pipeline.split import SplitKey
from pipeline.watch.hours import HOUR_S
from pipeline.watch.logs import Position
from pipeline.watch.reading import FILE, Reading, read_reading
from pipeline.watch.served import BUCKETS, Served
from pipeline.watch_config import WatchConfig
from tests.pipeline.watched import START

CONFIG = WatchConfig(asked_sample=50)
KEY = SplitKey(b"a key of these tests")
NOW = START + 2 * 86400


def served(ts=START + 60, conversation="a", version="1", drafts=10, accepted=20, weight=1.0):
    return Served(ts, version, conversation, ("mail",), weight, drafts, accepted, np.ones(BUCKETS, np.uint8))


def reading(*some):
    made = Reading(("route",))
    for one in some:
        made.take(one, CONFIG, KEY, now=NOW)
    return made


def test_an_hour_is_closed_with_the_version_of_most_drafts_and_counts_the_others():
    made = reading(served(), served(conversation="b", drafts=30, weight=2.0), served(version="2", conversation="c"))
    (hour,) = made.close(START + HOUR_S)
    assert (hour.version, hour.others, hour.cells) == ("1", 1, {("mail",): (3, 70, 60)})


def test_hours_close_in_order_once_they_are_over():
    made = reading(served(START + HOUR_S + 5), served(START + 5), served(START + 3 * HOUR_S))
    assert [hour.start for hour in made.close(START + 2.5 * HOUR_S)] == [START, START + HOUR_S]
    assert made.closed == START + HOUR_S
    assert [hour.start for hour in made.close(START + 4 * HOUR_S)] == [START + 3 * HOUR_S]


@pytest.mark.parametrize(
    ("reason", "ts"), [("late", START + 30), ("in_the_future", NOW + 7200), ("too_old", NOW - 61 * 86400)]
)
def test_records_out_of_their_time_are_told(reason, ts):
    made = reading(served(START + 2 * HOUR_S))
    list(made.close(START + HOUR_S))
    with pytest.raises(Rejected, match=reason):
        made.take(served(ts), CONFIG, KEY, now=NOW)


def test_what_is_kept_comes_back_and_goes_on(tmp_path):
    made = reading(served(), served(conversation="b"), served(START + HOUR_S, version="2"))
    made.positions["/logs/a"] = Position(100, 3)
    made.outcomes["counted"] += 3
    made.write(tmp_path, CONFIG)
    again = read_reading(tmp_path, ("route",))
    assert again.positions == made.positions and again.outcomes == made.outcomes and again.newest == START + HOUR_S
    again.take(served(), CONFIG, KEY, now=NOW)
    made.take(served(), CONFIG, KEY, now=NOW)
    assert list(again.close(NOW)) == list(made.close(NOW))


def test_a_day_is_sampled_one_entry_a_conversation_and_nobody_erased(tmp_path):
    made = reading(*(served(START + i, conversation=str(i % 120)) for i in range(1000)))
    made.without(frozenset({"7"}))
    list(made.close(START + 86400))
    ((day, sample),) = made.days(CONFIG)
    names = [one.conversation for one in sample]
    assert day == START and len(names) == len(set(names)) == 50 and "7" not in names
    assert list(made.days(CONFIG)) == []


def test_a_conversation_that_stands_for_more_requests_is_sampled_more_often():
    made = reading(*(served(START + i, conversation=str(i), weight=9.0 if i % 2 else 1.0) for i in range(2000)))
    list(made.close(START + 86400))
    ((_, sample),) = made.days(CONFIG)
    heavy = sum(int(one.conversation) % 2 for one in sample)
    assert heavy > 38  # 45 of 50 are expected


def test_a_damaged_file_or_one_of_other_dimensions_stops_with_what_to_do(tmp_path):
    reading(served()).write(tmp_path, CONFIG)
    with pytest.raises(SchemaError, match=r"watch\.dimensions says tenant"):
        read_reading(tmp_path, ("tenant",))
    (tmp_path / FILE).write_text("{")
    with pytest.raises(SchemaError, match="to begin anew"):
        read_reading(tmp_path, ("route",))


def test_requests_that_a_swap_came_between_make_no_release_of_an_hour():
    made = reading(served(version="unknown", drafts=90), served(version="3", conversation="b"))
    (hour,) = made.close(START + HOUR_S)
    assert (hour.version, hour.others) == ("3", 1)


def test_an_hour_stays_small_whatever_a_header_says(tmp_path):
    made = Reading(("route",))
    for i in range(1000):
        made.take(replace(served(conversation=str(i)), cell=(f"request-{i}",)), CONFIG, KEY, now=NOW)
    made.write(tmp_path, CONFIG)
    made = read_reading(tmp_path, ("route",))
    made.take(replace(served(conversation="last"), cell=("request-1000",)), CONFIG, KEY, now=NOW)
    (hour,) = made.close(START + HOUR_S)
    assert len(hour.cells) == 201 and hour.slices["all"][0] == 1001
    assert hour.cells["other",][0] == 1001 - 200 and hour.cells["request-0",][0] == 1


def test_single_conversations_go_when_they_are_erased_and_when_they_expire():
    made = reading(served(), served(conversation="b"))
    made.without(frozenset({"a"}))
    assert [name for name, _ in made.open[START]["1"]] == ["b"]
    assert [one.conversation for one in made.sampled[START]] == ["b"]
    made.expire(START + 1.0)
    assert made.sampled == {}
    made.without(frozenset({"b"}))
    assert list(made.close(START + HOUR_S)) == []


def test_a_clock_that_was_ahead_and_is_back_closes_no_hour_that_has_not_come():
    made = Reading(("route",))
    ahead = START + 5 * 365 * 86400
    made.take(served(ahead), CONFIG, KEY, now=ahead)
    assert [hour.start for hour in made.close(ahead + HOUR_S)] == [ahead]
    made.take(served(ahead + 2 * HOUR_S), CONFIG, KEY, now=ahead + 2 * HOUR_S)
    assert made.back_to(NOW) and not made.back_to(NOW)
    made.take(served(NOW), CONFIG, KEY, now=NOW)
    assert list(made.open) == [NOW] and made.newest <= NOW + 600
