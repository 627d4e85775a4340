"""The verdict's page: whole in itself, saying what was measured, and standing whatever was not."""

from html import unescape
from html.parser import HTMLParser

import pytest

from pipeline import report
from pipeline.bootstrap import UNKNOWN, Interval
from pipeline.criteria import Reason
from tests.pipeline.report_samples import (
    DECISIONS,
    ROUTES,
    sample_curves,
    sample_page,
    sample_report,
    sample_speed,
    sample_verdict,
)

LEAST = {"curves": {}, "speed": None, "policy_id": None}


class Outline(HTMLParser):
    """Every tag and attribute, and whether open tags are closed in order."""

    VOID = {"meta", "br", "link", "img", "line", "rect", "circle", "polyline"}

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text, self.ids = [], [], [], "", []
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
        self.text += f" {data}" if "style" not in self.open else ""


def two_roles(**changed):
    """A report of champion and challenger alone, without what only a fleet's own run has."""
    measured = {role: one | changed for role, one in sample_report().measured.items() if role != "control"}
    return sample_report(measured=measured, parents={"champion": "aaaa", "challenger": "bbbb"}, drift=None, looks=[])


def bare_verdict(decision="promote", **changed):
    """What a first day's comparison gives: two drafters, no slices, no speed, no general set."""
    lift = sample_verdict(decision).lift
    nothing = {"slices": {}, "general": None, "speed": None, "tail": None, "positions": [], "evidence": None}
    nothing |= {"level": None, "looks": [], "gained": [], "lost": [], "speculate_up_to": None, "recommended": {}}
    reasons = [Reason("lift", "enough", lift.ratio, 1.0, True)]
    comparisons = {"challenger/champion": lift}
    return sample_verdict(decision, **{**nothing, "reasons": reasons, "comparisons": comparisons, **changed})


def text_of(html):
    """What a reader sees, on one line; and the page is well-formed."""
    outline = Outline(html)
    assert outline.open == []
    return " ".join(outline.text.split())


@pytest.mark.parametrize("decision", DECISIONS)
def test_the_page_is_whole_in_itself(decision):
    html = sample_page(decision)
    outline = Outline(html)
    assert outline.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert not {"src", "href", "xlink:href", "onclick", "onload"} & {name for name, _ in outline.attributes}
    assert not any(word in html for word in ("http:", "https:", "url(", "@import"))
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


@pytest.mark.parametrize("decision", DECISIONS)
def test_every_decision_is_the_first_thing_said(decision):
    html = unescape(sample_page(decision))
    assert html.index(f"<h1>{report.TITLES[decision]}") < html.index('class="tiles"')


def test_the_first_part_answers_how_much_how_sure_and_what_can_go_wrong():
    answers = text_of(sample_page()).partition("checks passed")[0]
    for figure in ("46% more tokens", "27% more a second", "2,970 → 3,772", "1.11 → 1.62"):
        assert figure in answers
    for how_sure in ("1.39 to 1.54", "97.5% interval", "285 conversations", "settled early after 2 looks: 50%"):
        assert how_sure in answers
    for risk in ("weakest slice, language=de 0.96 ×", "between tokens 1.04 ×", "general prompts 0.98 ×", "1.3%"):
        assert risk in answers


def test_what_failed_comes_before_any_figure_and_what_passed_is_folded():
    reasons = [
        Reason("flagged", "few left out", 0.01, 0.2, True),
        Reason("walk:challenger", "training and serving disagree", 0.2, 0.05, False, "hold"),
        Reason("speed", "too <slow> & sad", 0.5, 0.9, False, "reject"),
        Reason("control", "above more training alone", 1.2, 1.0, None),
    ]
    text = text_of(sample_page("reject", verdict=sample_verdict("reject", reasons=reasons)))
    failed = text.index("too <slow> & sad")  # what decided, before what would only have held
    assert failed < text.index("training and serving disagree") < text.index("How much faster?")
    assert text.index("How much faster?") < text.index("1 of 3 checks passed") < text.index("few left out")
    assert text.index("1 more shown, not required") < text.index("above more training alone")


def test_of_many_failures_the_first_are_in_sight_and_none_is_lost():
    reasons = [Reason(f"slice:a={i}", f"slice number {i:02d} lost", 0.5, 0.9, False, "reject") for i in range(20)]
    text = text_of(sample_page("reject", verdict=sample_verdict("reject", reasons=reasons)))
    assert text.index("number 05") < text.index("14 more failed") < text.index("number 06")
    assert text.index("number 19") < text.index("How much faster?")


def test_text_from_outside_cannot_become_markup():
    names = {"champion": "<i>one", "challenger": "<script>alert(1)</script>"}
    reasons = [Reason("speed", "<slow>", 0.5, 0.9, False, "reject")]
    slices = {"tenant=<b>acme": Interval(1.1, 1.0, 1.2, 9)}
    html = sample_page(verdict=sample_verdict(reasons=reasons, slices=slices), title="<u>title", names=names)
    assert not any(tag in html for tag in ("<i>one", "<script", "<slow>", "<b>acme", "<u>title"))
    assert "<script>alert(1)</script>" in text_of(html)


def test_every_slice_is_shown_under_its_dimension_with_its_share():
    text = text_of(sample_page())
    for name in ROUTES:
        assert name.partition("=")[2] in text
    assert "cancel order 1.20 → 1.98 tokens a step · 61 conversations · 21% of prompts" in text
    assert "the floor, 0.90 ×" in text
    for dimension in ("route", "tenant", "language", "length", "temperature", "thinking"):
        assert f"<h3>{dimension}</h3>" in sample_page()


def test_of_many_slices_the_weakest_are_in_sight_and_none_is_lost():
    slices = {f"tenant=number {i:03d}": Interval(0.8 + i / 100, 0.7 + i / 100, 0.9 + i / 100, 50) for i in range(60)}
    html = sample_page(verdict=sample_verdict(slices=slices, reasons=[]))
    text = text_of(html)
    assert all(name.partition("=")[2] in text for name in slices)
    assert text.index("number 007") < text.index("52 more of tenant, none weaker") < text.index("number 008")


def test_lengths_are_in_the_order_of_their_numbers():
    slices = {f"length={end}": Interval(1.1, 1.0, 1.2, 50) for end in (">8192", "≤128", "≤2048", "≤512", "≤8192")}
    text = text_of(sample_page(verdict=sample_verdict(slices=slices, reasons=[]))).partition("By slice")[2]
    places = [text.index(end) for end in ("≤128", "≤512", "≤2048", "≤8192", ">8192")]
    assert places == sorted(places)


def test_speed_says_where_speculation_stops_paying_and_what_to_use_below():
    text = text_of(sample_page())
    assert "Speculation pays up to 32 requests at a time" in text
    assert "64 target alone 1.00 ×" in text
    assert "num_speculative_tokens_per_batch_size" in text
    assert text.count("target alone") >= 8  # a line, and a row at each of seven concurrencies
    everywhere = sample_speed().model_copy(update={"recommended": {"1": 7, "8": 3}})
    assert "pays at every concurrency that was measured" in text_of(sample_page(speed=everywhere))
    nowhere = sample_speed().model_copy(update={"recommended": {"1": 0, "8": 0}})
    assert "pays at none of the concurrencies" in text_of(sample_page(speed=nowhere))


def test_dont_speculate_names_the_concurrency():
    assert "Don't speculate above 8 requests at a time" in text_of(sample_page("dont_speculate"))
    nowhere = sample_verdict("dont_speculate", speculate_up_to=0)
    assert "above" not in text_of(sample_page("dont_speculate", verdict=nowhere)).partition("Where the fleet")[0]


def test_prompts_are_named_by_id_and_their_slices_alone():
    text = text_of(sample_page())
    assert "00c0ffee000000000000000000000000 en · ≤512 · returns 1.10 3.40" in text
    assert "09deadbe" in text
    assert "slipstream lineage ID" in text


def test_lineage_settings_versions_and_what_was_left_out_are_there():
    text = text_of(sample_page())
    for found in ("feedc0de00000001", "bbbb000000000002", "5beed00000000006", "9f2c01d4a7b3", "99aabbccddeeff00"):
        assert found in text
    for found in ("bfloat16", "5ca1ab1e5ca1ab1e", "2.9.0", "repeats itself, and loops are easy to draft 3 3 3"):
        assert found in text
    assert "measured again at the end: 1.01 × its own tokens a second" in text


def test_walk_against_served_is_of_the_requests_that_were_walked():
    counts = {
        "num_drafts": 100,
        "num_accepted_tokens": 51,
        "served": {"num_drafts": 100, "num_accepted_and_emitted": 49},
    }
    text = text_of(sample_page(report=two_roles(walk=counts)))
    assert "champion 0.510 0.490 3.9%" in text


def test_two_drafters_and_nothing_else_make_a_page():
    manifest = two_roles(walk=None, general=None, latency=None, slices={}, flagged={})
    text = text_of(sample_page(verdict=bare_verdict(), report=manifest, **LEAST))
    assert "1 of 1 checks passed" in text
    for absent in ("control", "By slice", "Speed against", "Walk against", "General prompts", "Waiting", "moved most"):
        assert absent not in text


def test_comparing_with_none_speaks_of_the_target_alone():
    alone = {"num_accepted_tokens": 0, "num_accepted_tokens_per_pos": [], "num_accepted_and_emitted": 0}
    lengths = {"served_acceptance_length": 1.0, "emitted_tokens_per_step": 1.0, "walk": None}
    manifest = two_roles(walk=None)
    measured = manifest.measured | {"champion": manifest.measured["champion"] | alone | lengths}
    manifest = manifest.model_copy(update={"measured": measured})
    html = sample_page(verdict=bare_verdict(), report=manifest, names={"champion": "none", "challenger": "acme-v2"})
    text = text_of(html)
    assert "than with the target alone" in text
    assert "acme-v2 over target alone" in text
    assert "than with the champion" not in text


def test_what_was_not_measured_is_a_dash_and_not_a_number():
    nothing = {"served_acceptance_length": None, "emitted_tokens_per_step": None, "num_drafts": 0, "slices": {}}
    nothing |= {"num_accepted_tokens": 0, "num_accepted_and_emitted": 0, "num_accepted_tokens_per_pos": []}
    nothing |= {"num_requests": 0, "tokens_per_s": float("nan"), "walk": None, "general": None}
    nothing |= {"latency": dict.fromkeys(("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"))}
    reasons = [Reason("lift", "not a number", float("nan"), 1.0, False, "cannot_say")]
    slices = {"route=a": UNKNOWN, "route=b": Interval(1.2, float("nan"), float("nan"), 1)}
    unknown = {"comparisons": {"challenger/champion": UNKNOWN}, "speed": UNKNOWN, "tail": UNKNOWN, "general": UNKNOWN}
    verdict = bare_verdict("cannot_say", reasons=reasons, slices=slices, **unknown)
    html = sample_page("cannot_say", verdict=verdict, report=two_roles(**nothing), **LEAST)
    text = text_of(html)
    assert "could not be measured" in text
    assert "nan" not in text.lower().replace("maintenance", "")
    assert not any("nan" in value or "inf" in value for _, value in Outline(html).attributes if value)


def test_an_interval_that_holds_no_difference_is_not_called_a_gain():
    assert "No difference to the champion is shown in tokens a step: 1.04 × (0.99 to 1.09)" in text_of(
        sample_page("hold")
    )


def test_every_drawing_with_a_role_has_a_name_and_the_others_are_hidden():
    html = sample_page()
    for piece in html.split("<svg")[1:]:
        tag = piece.partition(">")[0]
        assert 'aria-hidden="true"' in tag or ('role="img"' in tag and 'aria-label="' in tag)


def test_a_page_of_thousands_of_conversations_and_steps_stays_small():
    steps = [{"step": s, "loss": 4 - s / 5000, "walk_acceptance_length": 1.2} for s in range(10_000)]
    lift = Interval(1.2, 1.19, 1.21, 1_234_567)
    verdict = bare_verdict(comparisons={"challenger/champion": lift})
    html = sample_page(verdict=verdict, curves={"challenger": steps, **sample_curves()})
    assert "1,234,567 conversations" in html
    assert len(html) < 300_000
