"""The held-out records that redaction is measured by: labels, check digits, and no word of the patterns."""

import ast
import json
from pathlib import Path
from random import Random

from bench.oracles.redaction_held_out import Labelled, clean_records, labelled_records, left_over
from bench.oracles.redaction_held_out_keys import base62_checksum
from bench.oracles.redaction_held_out_values import bban, iban, luhn_digit
from bench.oracles.redaction_recall import held_out_recall

ORACLES = Path(__file__).resolve().parents[2] / "bench" / "oracles"


def test_the_records_know_nothing_of_how_values_are_looked_for():
    for path in ORACLES.glob("redaction_held_out*.py"):
        modules = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert {m for m in modules if m.startswith(("pipeline", "bench"))} <= {
            "bench.oracles",
            *(f"bench.oracles.{other.stem}" for other in ORACLES.glob("redaction_held_out*.py")),
        }


def test_every_label_is_where_it_says_and_the_same_seed_gives_the_same_records():
    records = list(labelled_records())
    assert len(records) >= 600 and len({value.kind for record in records for value in record.values}) >= 20
    assert all(record.text[v.start : v.end] == v.text for record in records for v in record.values)
    assert all(record.values for record in records)
    assert all(json.loads(record.text) for record in records if record.tool_arguments)
    assert records == list(labelled_records())
    assert len(list(clean_records())) >= 600


def test_check_digits_are_those_of_published_numbers():
    assert [luhn_digit(n) for n in ("411111111111111", "37828224631000")] == [1, 5]
    for wrong, rests in ((0, {1}), (5, set(range(97)) - {1})):
        numbers = (iban(Random(n), wrong=wrong).replace(" ", "") for n in range(40))
        assert {int("".join(str(int(c, 36)) for c in n[4:] + n[:4])) % 97 for n in numbers} <= rests
    assert bban(Random(1), "BE")[:10].isdigit() and int(bban(Random(1), "BE")[:10]) % 97 == int(
        bban(Random(1), "BE")[10:]
    )
    # CRC-32 of "123456789" is CBF43926 (3421780262).
    assert base62_checksum("123456789") == "3jZRME"


def test_a_value_is_left_over_as_it_is_regrouped_or_in_part():
    def left(text, kind, value):
        return left_over({"messages": [{"role": "user", "content": text}]}, Labelled(kind, value, 0, 0))

    assert left("to +49 30 2345-6789", "phone", "+49 30 23456789")
    assert left("key ...4567890abcdef", "generic_api_key", "ABCDEFGHIJKLMN1234567890abcdef")
    assert not left("key sk_live_zzzzzzzzzzzzzzzz", "stripe", "sk_live_1234567890abcdef")


def test_doing_nothing_finds_nothing():
    idle = held_out_recall(lambda body: body, regions=())
    assert idle["held_out_recall_pattern_kinds"]["value"] == idle["held_out_false_alarms"]["value"] == 0
