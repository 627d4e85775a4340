"""The labelled records that redaction is measured by, and what it finds in them."""

import ast
import random
from pathlib import Path

from bench.oracles.redaction_recall import recall, redaction_figures
from bench.oracles.redaction_records import KINDS, clean, labelled, left_over
from bench.oracles.redaction_values import card_number, luhn_digit

ROOT = Path(__file__).resolve().parents[2]


def test_the_records_know_nothing_of_how_values_are_looked_for():
    for name in ("redaction_values", "redaction_clean", "redaction_records"):
        tree = ast.parse((ROOT / "bench" / "oracles" / f"{name}.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {module for module in modules if module.startswith("pipeline")}


def test_there_are_enough_records_of_each_kind_and_their_labels_are_in_them():
    records = list(labelled())
    assert len(records) >= 500 and len(KINDS) >= 10
    assert all(left_over(record.body, record.value) for record in records)
    assert len(list(clean())) >= 500


def test_doing_nothing_finds_nothing_and_changing_everything_is_all_false_alarms():
    idle = recall(lambda body: body)
    assert idle["recall_pattern_kinds"]["value"] == 0 and idle["false_alarms"]["value"] == 0
    blank = recall(lambda body: {})
    assert blank["recall_pattern_kinds"]["value"] == 1 and blank["false_alarms"]["value"] == 1
    assert blank["surroundings_kept"]["value"] < 0.2


def test_check_digits_of_the_records_are_those_of_published_numbers():
    assert [luhn_digit(n) for n in ("411111111111111", "37828224631000")] == ["1", "5"]
    rng = random.Random(0)
    for valid in (True, False):
        digits = "".join(filter(str.isdigit, card_number(rng, valid=valid)))
        assert (luhn_digit(digits[:-1]) == digits[-1]) is valid


def test_redaction_finds_what_it_has_to_and_leaves_clean_records_alone():
    figures = redaction_figures(seed=11)
    assert figures["recall_pattern_kinds"]["met"] and figures["false_alarms"]["met"]
    assert figures["surroundings_kept"]["value"] >= 0.98
    assert figures["recall_names"]["value"] is None
