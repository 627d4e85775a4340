"""The verdict's page as a reader sees it: a real browser, light and dark, on a phone, a tablet and a desk."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import TITLES
from tests.pipeline.report_samples import sample_page

PROBE = (Path(__file__).parent / "page_probe.js").read_text()
SCHEMES = ("light", "dark")
WIDTHS = (360, 768, 1280)
SMALLEST_PX = 9.0  # a chart's label, as it is on the screen
PATIENCE_S = 180  # a machine that does much else takes long to draw
CONTRAST, CONTRAST_LARGE = 4.5, 3.0  # WCAG 2.2, 1.4.3 (AA)
LARGE_PX, LARGE_BOLD_PX = 24.0, 18.66


@dataclass(frozen=True)
class Seen:
    """What the browser asked for, said and showed."""

    url: str
    scheme: str
    width: int
    requests: list[str]
    complaints: list[str]
    page: dict[str, Any]


def look(browser, html: str, *, scheme: str, width: int, folder: Path) -> Seen:
    """The page in a window of that width, with everything unfolded; its picture is left in the folder."""
    file = folder / "page.html"
    file.write_text(html)
    tab = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab.set_default_timeout(1000 * PATIENCE_S)
    try:
        requests, complaints = [], []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(file.as_uri(), wait_until="load")
        page = tab.evaluate(PROBE)
        tab.screenshot(path=folder / f"{scheme}-{width}.png", full_page=True)
        return Seen(file.as_uri(), scheme, width, requests, complaints, page)
    finally:
        tab.close()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The folder of a decision's pictures: under SLIPSTREAM_SCREENSHOTS where that is set."""
    kept = os.environ.get("SLIPSTREAM_SCREENSHOTS")
    root = Path(kept).resolve() if kept else tmp_path_factory.mktemp("pictures")

    def folder(decision: str) -> Path:
        (root / decision).mkdir(parents=True, exist_ok=True)
        return root / decision

    return folder


@pytest.fixture(scope="module", params=[(s, w) for s in SCHEMES for w in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def seen(request, browser, pictures):
    """A promotion's page in each colour scheme and width."""
    scheme, width = request.param
    return look(browser, sample_page(), scheme=scheme, width=width, folder=pictures("promote"))


def test_the_page_asks_the_network_for_nothing_and_raises_no_complaint(seen):
    assert seen.requests == [seen.url]
    assert seen.complaints == []


def test_nothing_reaches_beyond_the_window(seen):
    assert seen.page["inner_width"] == seen.width
    assert seen.page["scroll_width"] <= seen.width
    assert [t["text"] for t in seen.page["texts"] if t["box"]["left"] < 0 or t["box"]["right"] > seen.width + 0.5] == []


def test_every_drawing_has_room(seen):
    assert len(seen.page["drawings"]) >= 10
    assert all(one["width"] > 20 and one["height"] > 5 for one in seen.page["drawings"])


def test_the_verdict_and_the_parts_have_their_headings(seen):
    headings = {tag: [t for t in seen.page["texts"] if t["tag"] == tag] for tag in ("h1", "h2")}
    assert [one["text"] for one in headings["h1"]] == [TITLES["promote"]]
    assert len(headings["h2"]) >= 6
    assert all(one["box"]["width"] > 0 and one["size_px"] >= 12 for one in headings["h1"] + headings["h2"])
    assert headings["h1"][0]["size_px"] > max(one["size_px"] for one in headings["h2"])


def test_every_label_of_a_chart_can_be_read(seen):
    labels = [text for text in seen.page["texts"] if text["chart"]]
    assert len(labels) >= 10
    assert [(t["text"], t["size_px"]) for t in labels if t["size_px"] < SMALLEST_PX or t["box"]["width"] <= 0] == []


def test_every_text_stands_out_from_its_background(seen):
    assert faint(seen.page["texts"]) == []


def test_the_dark_page_is_dark_and_the_light_one_light(browser, pictures):
    light, dark = (
        luminance(colour(look(browser, sample_page(), scheme=s, width=768, folder=pictures("promote")).page["canvas"]))
        for s in SCHEMES
    )
    assert light > 0.8 and dark < 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("decision", TITLES)
def test_every_verdict_stands_out_and_fits_a_phone(browser, pictures, decision, scheme):
    seen = look(browser, sample_page(decision), scheme=scheme, width=360, folder=pictures(decision))
    (heading,) = [text for text in seen.page["texts"] if text["tag"] == "h1"]
    assert heading["text"].startswith(TITLES[decision])
    assert contrast(heading) >= CONTRAST
    assert faint(seen.page["texts"]) == []
    assert seen.page["scroll_width"] <= 360
    assert seen.requests == [seen.url] and seen.complaints == []


def test_the_ratio_is_the_one_that_wcag_gives():
    # Black on white is 21, and #767676 is the well-known last grey that passes on white.
    white = {"backgrounds": ["rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"], "opacity": 1}
    assert contrast({"color": "rgb(0, 0, 0)", **white}) == pytest.approx(21)
    assert contrast({"color": "rgb(118, 118, 118)", **white}) == pytest.approx(4.54, abs=0.01)
    assert contrast({"color": "rgba(0, 0, 0, 0)", **white}) == pytest.approx(1)


def faint(texts: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """The texts whose contrast is below what WCAG asks of their size, with the ratio."""
    found = []
    for text in texts:
        large = text["size_px"] >= (LARGE_BOLD_PX if text["weight"] >= 700 else LARGE_PX)
        if (ratio := contrast(text)) < (CONTRAST_LARGE if large else CONTRAST):
            found.append((text["text"], round(ratio, 2)))
    return found


def contrast(text: dict[str, Any]) -> float:
    """The contrast ratio of a text and what lies behind it. Source: WCAG 2.2, definition of contrast ratio."""
    behind = (1.0, 1.0, 1.0, 1.0)  # the browser's own canvas, under all that is transparent
    for layer in reversed(text["backgrounds"]):
        behind = over(colour(layer), behind)
    *rgb, alpha = colour(text["color"])
    ink = over((*rgb, alpha * text["opacity"]), behind)
    lighter, darker = sorted((luminance(ink), luminance(behind)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def over(top: tuple[float, ...], under: tuple[float, ...]) -> tuple[float, ...]:
    """A colour laid over an opaque one."""
    return (*(top[3] * a + (1 - top[3]) * b for a, b in zip(top[:3], under[:3], strict=True)), 1.0)


def luminance(rgba: tuple[float, ...]) -> float:
    """Relative luminance, 0 to 1. Source: WCAG 2.2, definition of relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgba[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def colour(css: str) -> tuple[float, ...]:
    """Red, green, blue and alpha, 0 to 1, of a computed colour."""
    numbers = [float(number) for number in re.findall(r"[\d.]+(?:e-?\d+)?", css)]
    rgb = [n / 255 for n in numbers[:3]] if css.startswith("rgb") else numbers[:3]
    assert css.startswith(("rgb", "color(srgb ")) and len(numbers) in (3, 4), css
    return (*rgb, numbers[3] if len(numbers) == 4 else 1.0)
