"""The verdict's page: whole in itself, and saying what was measured."""

from html import unescape
from html.parser import HTMLParser

from pipeline import report
from pipeline.artifacts import AcceptanceReport
from pipeline.bootstrap import Interval
from pipeline.criteria import Reason
from pipeline.gate import Verdict

NAN = float("nan")
LIFT = Interval(1.42, 1.31, 1.53, 84)


def page(*, decision="promote", lift=LIFT, title="toy--mail", measured=None):
    reasons = [
        Reason("lift", "1.42 is enough", 1.31, 1.0, True),
        Reason("speed", "too <slow> & sad", 0.5, 0.9, False, "reject"),
        Reason("control", "above more training alone", 1.2, 1.0, None),
    ]
    verdict = Verdict(decision, reasons, {"challenger/champion": lift}, {"returns": lift})
    manifest = AcceptanceReport(
        derivation_id="feedc0de00000001",
        parents={"champion": "aaaa", "challenger": "bbbb", "responses": "cccc"},
        measured=measured or {"champion": one(1.50, 101.5), "challenger": one(2.13, 144.25)},
        settings={"dtype": "bfloat16", "concurrency": 8},
    )
    curve = [{"step": 0, "loss": 4.0, "walk_acceptance_length": 1.2}, {"step": 100, "loss": 2.0}]
    return report.render(verdict, manifest, curves={"challenger": curve}, title=title)


def one(length, speed):
    return {
        "num_requests": 90,
        "num_tokens": 9000,
        "num_drafts": 5000,
        "num_accepted_tokens": 2500,
        "num_accepted_tokens_per_pos": [1700, 800],
        "num_accepted_and_emitted": 2450,
        "served_acceptance_length": length,
        "emitted_tokens_per_step": length - 0.02,
        "tokens_per_s": speed,
        "walk": {"num_drafts": 5000, "num_accepted_tokens": 2550},
        "flagged": {"loop": 3},
        "slices": {"returns": {"emitted_tokens_per_step": length}},
        "num_replies_different": 1,
    }


class Outline(HTMLParser):
    """Every tag and attribute, and whether open tags are closed in order."""

    VOID = {"meta", "br", "link", "img", "line", "rect", "circle", "polyline"}

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_in_itself():
    html = page()
    outline = Outline(html)
    assert outline.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not {"src", "href", "onclick", "onload"} & {name for name, _ in outline.attributes}
    assert not any(word in html for word in ("http:", "https:", "url(", "@import"))


def test_the_page_says_what_was_decided_and_measured():
    text = Outline(page()).text
    for figure in ("Promote", "1.42", "1.31", "1.53", "84", "1.50", "2.13", "101.5", "144.2", "returns", "loop 3"):
        assert figure in text
    for lineage in ("feedc0de00000001", "aaaa", "bbbb", "cccc", "bfloat16"):
        assert lineage in text
    # 2550 and 2450 accepted drafts in 5000 steps.
    assert "0.510" in text and "0.490" in text and "3.9%" in text


def test_what_failed_is_in_sight_and_what_passed_is_folded():
    text = Outline(page(decision="reject")).text
    assert text.index("too <slow> & sad") < text.index("1 of 2 checks passed") < text.index("1.42 is enough")


def test_text_from_outside_cannot_become_markup():
    assert "<slow>" not in page()
    assert "<b>bold" not in page(title="<b>bold")


def test_every_decision_has_a_title_and_light_and_dark_colours():
    for decision in report.TITLES:
        html = page(decision=decision)
        assert report.TITLES[decision] in unescape(html)
        assert "prefers-color-scheme: dark" in html and "width=device-width" in html


def test_what_was_not_measured_is_a_dash_and_not_a_number():
    empty = one(1.0, 1.0) | {
        "served_acceptance_length": None,
        "emitted_tokens_per_step": None,
        "num_drafts": 0,
        "num_accepted_tokens": 0,
        "num_accepted_and_emitted": 0,
        "num_accepted_tokens_per_pos": [],
        "walk": None,
        "slices": {},
    }
    measured = {role: empty for role in ("champion", "challenger")}
    html = page(decision="cannot_say", lift=Interval(NAN, NAN, NAN, 0), measured=measured)
    assert "could not be measured" in html
    assert "nan" not in Outline(html).text.lower()
