"""Where things lie in a drawing."""

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
