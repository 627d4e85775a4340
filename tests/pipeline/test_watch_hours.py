import json

import pytest

from pipeline.errors import SchemaError
from pipeline.watch.hours import HOUR_S, forget_hour, hour_of, read_hours, write_hour
from tests.pipeline.watched import START, hours

ROWS = {
    ("anna", ("mail", "en")): [2, 10, 20],
    ("anna", ("code", "en")): [1, 5, 15],
    ("ben", ("mail", "en")): [1, 20, 30],
}


def test_sums_are_of_every_slice_and_the_spread_is_over_conversations():
    hour = hour_of(START, "3", ("route", "language"), ROWS, others=4)
    assert dict(hour.cells) == {("mail", "en"): (3, 30, 50), ("code", "en"): (1, 5, 15)}
    assert hour.slices == {
        "all": (4, 35, 65),
        "route=mail": (3, 30, 50),
        "language=en": (4, 35, 65),
        "route=code": (1, 5, 15),
    }
    # anna has 15 drafts and 35 accepted in all, ben 20 and 30.
    assert hour.spread["all"] == (2, 15**2 + 20**2, 15 * 35 + 20 * 30, 35**2 + 30**2)
    assert hour.spread["route=code"] == (1, 25, 75, 225)
    assert (hour.version, hour.others) == ("3", 4)


def test_an_hour_comes_back_as_it_was_kept_and_old_ones_go(tmp_path):
    made = hours(30)
    for hour in made:
        write_hour(tmp_path, hour)
    assert read_hours(tmp_path) == made
    assert read_hours(tmp_path, since=START + 25 * HOUR_S) == made[25:]
    for hour in made[:10]:
        forget_hour(tmp_path, hour)
    assert read_hours(tmp_path) == made[10:]


@pytest.mark.parametrize("body", ["", "{", '{"schema_version": 99}', "[]"])
def test_a_damaged_hour_is_named(tmp_path, body):
    (tmp_path / "2027-01-01T00.json").write_text(body)
    with pytest.raises(SchemaError, match=r"2027-01-01T00\.json.*remove it"):
        read_hours(tmp_path)


def test_a_kept_hour_names_no_conversation(tmp_path):
    write_hour(tmp_path, hour_of(START, "3", ("route", "language"), ROWS))
    (path,) = tmp_path.iterdir()
    assert "anna" not in path.read_text() and json.loads(path.read_text())["version"] == "3"
