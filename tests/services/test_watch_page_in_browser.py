"""The watch's page as a reader sees it."""

import pytest

from tests.pipeline.watch_samples import sample
from tests.services.test_page_in_browser import SCHEMES, SMALLEST_PX, WIDTHS, faint, look


@pytest.fixture(scope="module", params=[(s, w) for s in SCHEMES for w in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def seen(request, browser, tmp_path_factory):
    """The page of a watch with an alarm, in each colour scheme and width."""
    scheme, width = request.param
    return look(browser, sample()[1], scheme=scheme, width=width, folder=tmp_path_factory.mktemp("watch"))


def test_the_page_asks_for_nothing_fits_its_window_and_can_be_read(seen):
    assert seen.requests == [seen.url] and seen.complaints == []
    assert seen.page["scroll_width"] <= seen.width
    assert faint(seen.page["texts"]) == []
    labels = [text for text in seen.page["texts"] if text["chart"]]
    assert len(labels) >= 10
    assert [t["text"] for t in labels if t["size_px"] < SMALLEST_PX or t["box"]["width"] <= 0] == []
    assert all(one["width"] > 20 and one["height"] > 5 for one in seen.page["drawings"])
