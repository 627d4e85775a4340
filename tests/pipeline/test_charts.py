"""Where things lie in a drawing."""

from itertools import pairwise

import pytest

from pipeline import charts
from pipeline.bootstrap import Interval

NAN = float("nan")


def test_bars_are_as_long_as_their_values_from_zero():
    drawn = charts.bars({"champion": 1.5, "challenger": 3.0, "control": None})
    assert [row["percent"] for row in drawn] == [50, 100, 0]


def test_intervals_share_one_axis_that_holds_the_line_of_no_difference():
    drawn = charts.intervals({"a": Interval(1.5, 1.4, 1.6, 9), "b": Interval(2.0, 1.9, 2.1, 9)})
    (a, b) = drawn["rows"]
    assert 0 < drawn["one"] < a["from"] < a["at"] < a["to"] < b["from"] < b["to"] < 100
    assert a["at"] - a["from"] == pytest.approx(b["at"] - b["from"], abs=0.05)


def test_lines_keep_their_order_and_stay_inside():
    chart = charts.line_chart({"challenger": [(0, 1.0), (100, 2.0), (200, 1.5)]})
    (line,) = chart["lines"]
    (x0, y0), (x1, y1), (x2, y2) = line["points"]
    assert x0 < x1 < x2
    assert y1 < y2 < y0  # the drawing's y points down
    assert x0 >= 0 and x2 <= 100
    assert y1 >= 0
    assert y0 <= chart["height"]


def test_no_points_draw_no_chart():
    assert charts.line_chart({"challenger": []}) is None
    assert charts.line_chart({"challenger": [(0, NAN)]}) is None


def test_ticks_are_round_and_inside():
    assert charts.ticks(0.93, 1.62, 4) == [1.0, 1.2, 1.4, 1.6]
    assert charts.ticks(0, 400, 5) == [0, 100, 200, 300, 400]


def test_an_interval_far_wider_than_the_others_is_cut_and_says_so():
    drawn = charts.intervals({"a": Interval(1.1, 1.05, 1.15, 9), "wide": Interval(1.2, 0.01, 90.0, 2)})
    (a, wide) = drawn["rows"]
    assert wide["cut"] == (True, True)
    assert (wide["from"], wide["to"]) == (0, 100)
    assert a["cut"] == (False, False)
    assert a["to"] - a["from"] > 10


def test_the_floor_lies_on_the_axis_and_what_is_unknown_nowhere():
    drawn = charts.intervals({"a": Interval(1.5, 1.4, 1.6, 9), "b": Interval(NAN, NAN, NAN, 0)}, floor=0.9)
    assert 0 < drawn["floor"] < drawn["one"]
    assert (drawn["rows"][1]["at"], drawn["rows"][1]["from"]) == (None, None)
    assert charts.intervals({})["floor"] is None


def test_on_a_doubling_axis_every_doubling_is_as_wide():
    chart = charts.line_chart({"a": [(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)]}, log_x=True, x_ticks=(1, 2, 4, 8))
    places = [x for x, _ in chart["lines"][0]["points"]]
    assert places == pytest.approx([0, 100 / 3, 200 / 3, 100], abs=0.01)
    assert [name for _, name in chart["x_ticks"]] == ["1", "2", "4", "8"]


def test_names_at_the_ends_of_lines_do_not_lie_on_each_other():
    chart = charts.line_chart({f"line {i}": [(0, 0.0), (1, 5.0 + i / 1000)] for i in range(6)}, from_zero=True)
    places = sorted(line["name_at"] for line in chart["lines"])
    assert min(b - a for a, b in pairwise(places)) >= 15
    assert places[-1] <= chart["height"]


def test_a_long_line_is_thinned_and_keeps_its_ends():
    chart = charts.line_chart({"a": [(float(i), float(i)) for i in range(10_001)]})
    (line,) = chart["lines"]
    assert len(line["points"]) < 250
    assert (line["points"][0][0], line["points"][-1][0]) == (0, 100)
    assert line["last"] == 10_000


def test_one_point_lies_in_the_middle():
    assert charts.line_chart({"a": [(3, 1.0)]}, from_zero=True)["lines"][0]["points"][0][0] == 50
    assert charts.line_chart({"a": [(3, 0.0)]}, from_zero=True) is not None
