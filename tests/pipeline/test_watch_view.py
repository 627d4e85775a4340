import json

import pytest

from pipeline.watch.accepted import Watching, advance
from pipeline.watch.view import told_apart
from tests.pipeline.watch_samples import CONFIG, sample
from tests.pipeline.watched import MIX, hours


@pytest.fixture(scope="module")
def shown():
    return sample()


def test_the_body_is_strict_json_and_says_whether_to_retrain(shown):
    body, _ = shown
    again = json.loads(json.dumps(body, allow_nan=False))
    assert again["retrain"] and again["firing"] == [one["id"] for one in again["alarms"] if one["fires"]]
    assert again["slices"]["all"]["promised"] == pytest.approx(3.3)
    assert again["slices"]["route=code"]["acceptance_length"] == pytest.approx(1 + 0.84 * 2.8, abs=0.01)


def test_the_page_shows_what_fires_the_slice_it_is_in_and_every_part(shown):
    _, html = shown
    assert html.count("<h1>") == 1 and "Retrain: acceptance or what is asked has changed" in html
    assert "fell by 16% in route=code" in html and html.index("<h2>route=code</h2>") < html.index("<h2>route=mail</h2>")
    for words in ("promised", "10.0.0.2:8000", "refused", "words", "×", "days to find"):
        assert words in html
    assert "http://" not in html.replace("http://10.0.0.", "") and "<script" not in html


def test_a_watch_that_has_just_begun_has_a_page_too():
    body, html = sample(3)
    assert body["phase"] == "learning" and "Learning what is usual" in html and "no day was judged yet" in html
    _, empty = sample(0)
    assert "No hour is complete yet" in empty


def test_a_mix_that_moved_and_acceptance_that_moved_are_told_apart():
    made, state = hours(8 * 24), Watching()
    for number in range(1, len(made) + 1):
        state = advance(CONFIG, state, made[:number])
    more_code = {cell: n * (4 if cell[0] == "code" else 1) for cell, n in MIX.items()}
    mix = told_apart(state, hours(24, first=len(made), mix=more_code))
    # (92 + 4 x 84) / (50 + 4 x 30) against 176 / 80.
    assert mix["mix"] == pytest.approx(428 / 170 / 2.2 - 1, abs=0.01) and abs(mix["within"]) < 0.01
    within = told_apart(state, hours(24, first=len(made), factor=lambda cell: 0.9))
    assert within["within"] == pytest.approx(-0.1, abs=0.01) and abs(within["mix"]) < 0.01
