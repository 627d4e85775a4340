import base64
import ipaddress
import json
import re

import pytest

from pipeline.split import SplitKey
from pipeline.surrogates import Surrogates, check_digit, is_made_up

KEY = SplitKey(b"the split key of these tests")
TOKEN = "ghp_" + "aB3d" * 9
WEB_TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
VALUES = [
    ("email", "Anna.Berg@firma.de", "anna.berg@firma.de"),
    ("phone", "(415) 867-5309", "+1 4158675309"),
    ("phone", "0151 23456789", "+49 15123456789"),
    ("phone", "+34 612 34 56 78", "+34 612345678"),
    ("card", "4539 1488 0343 6467", "4539148803436467"),
    ("card", "3714-496353-98431", "371449635398431"),
    ("iban", "DE89 3704 0044 0532 0130 00", "DE89370400440532013000"),
    ("iban", "GB29NWBK60161331926819", "GB29NWBK60161331926819"),
    ("ip", "84.12.3.4", "84.12.3.4"),
    ("ip", "2a02:8109::9ec0:1f", "2a02:8109::9ec0:1f"),
    ("api_key", TOKEN, TOKEN),
    ("api_key", "sk-0123456789abcdef0123456789abcdef", "sk-0123456789abcdef0123456789abcdef"),
    ("jwt", WEB_TOKEN, WEB_TOKEN),
    ("password", "hunter2xy", "hunter2xy"),
    ("url_secret", "Zq8rT2mLw9XpB4", "Zq8rT2mLw9XpB4"),
    ("private_key", "\nMIIEow" + "aB3d" * 20 + "==\n", "\nMIIEow" + "aB3d" * 20 + "==\n"),
]
IDS = [f"{kind} {text[:12].strip()}" for kind, text, _ in VALUES]


def made(kind, text, normal, *, conversation="c1", key=KEY):
    return Surrogates(key, conversation).of(kind, text, normal)


def luhn_holds(digits):
    """Doubled from the right by a table, summed: not how the code under test does it."""
    table = "0246813579"
    total = sum(int(table[int(d)]) if n % 2 else int(d) for n, d in enumerate(reversed(digits)))
    return total % 10 == 0


def iban_holds(iban):
    plain = iban.replace(" ", "")
    return int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


@pytest.mark.parametrize(("kind", "text", "normal"), VALUES, ids=IDS)
def test_a_value_becomes_one_made_up_value_in_its_conversation_and_another_elsewhere(kind, text, normal):
    first = made(kind, text, normal)
    assert first != text
    assert made(kind, text, normal) == first
    assert made(kind, text, normal, conversation="c2") != first
    assert made(kind, text, normal, key=SplitKey(b"another key of these tests")) != first


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("email", "Anna.Berg@firma.de", "cameron.toby311@example.com"),
        ("phone", "(415) 867-5309", "(596) 555-0141"),
        ("phone", "+34 612 34 56 78", "+34 000 89 84 50"),
        ("card", "4539 1488 0343 6467", "4242 4242 0396 1208"),
        ("iban", "DE89 3704 0044 0532 0130 00", "DE71 0000 4134 6177 5376 54"),
        ("ip", "84.12.3.4", "198.19.139.45"),
        ("ip", "2a02:8109::9ec0:1f", "2001:db8:511b:fd9b::404c:6d2f"),
        ("api_key", TOKEN, "ghp_fN0poS2yoP1mdU3tqH4ntP7kaU6tkNOTREAL"),
        ("password", "hunter2xy", "notreal9561"),
    ],
)
def test_made_up_values_never_change_from_one_version_to_the_next(kind, text, expected):
    normal = next(n for k, t, n in VALUES if (k, t) == (kind, text))
    assert made(kind, text, normal) == expected


def test_spellings_of_one_value_give_one_made_up_value_each_in_its_own_spelling():
    assert made("email", "ANNA@FIRMA.DE", "anna@firma.de") == made("email", "anna@firma.de", "anna@firma.de")
    national, abroad = (made("phone", t, "+1 4158675309") for t in ("(415) 867-5309", "+1 415-867-5309"))
    assert (national, abroad) == ("(596) 555-0141", "+1 596-555-0141")
    grouped, plain = (
        made("iban", t, "DE89370400440532013000") for t in ("DE89 3704 0044 0532 0130 00", "de89370400440532013000")
    )
    assert grouped.replace(" ", "").lower() == plain


@pytest.mark.parametrize(("kind", "text", "normal"), VALUES, ids=IDS)
def test_what_is_made_up_is_told_from_what_is_not(kind, text, normal):
    assert not is_made_up(kind, normal)
    value = made(kind, text, normal)
    country = normal.partition(" ")[0]
    spelt = {
        "phone": lambda: f"{country} {re.sub(r'[^0-9]', '', value)[-len(normal.partition(' ')[2]) :]}",
        "card": lambda: re.sub(r"[^0-9]", "", value),
        "iban": lambda: value.replace(" ", ""),
    }
    assert is_made_up(kind, spelt.get(kind, lambda: value)())


def test_examples_that_everyone_knows_are_replaced_too_since_someone_may_be_meant():
    for kind, normal in (
        ("email", "jane.doe@example.com"),
        ("ip", "203.0.113.7"),
        ("card", "4242424242424242"),
        ("phone", "+1 4155550132"),
        ("phone", "+44 2079460958"),
        ("phone", "+46 846505123"),  # of what Sweden keeps for film, 08-465 004 xx, it is the next hundred
        ("iban", "BR1500000000000010932840814P2"),  # Banco do Brasil's own number is eight zeros
    ):
        assert not is_made_up(kind, normal), normal


def test_cards_and_accounts_keep_network_country_grouping_and_check_digits():
    for text in ("4539 1488 0343 6467", "5391-4880-3436-4678", "3714 496353 98431", "36148906479471"):
        for n in range(20):
            card = made("card", text, re.sub("[ -]", "", text), conversation=f"c{n}")
            assert luhn_holds(re.sub("[ -]", "", card)), card
            assert re.sub(r"\d", "#", card) == re.sub(r"\d", "#", text)
            assert card[0] == text[0]
    for text in ("DE89 3704 0044 0532 0130 00", "GB29NWBK60161331926819", "FR14 2004 1010 0505 0001 3M02 606",
                 "BR15 0000 0000 0000 1093 2840 814P 2"):  # fmt: skip
        for n in range(20):
            iban = made("iban", text, text.replace(" ", ""), conversation=f"c{n}")
            assert iban_holds(iban), iban
            assert iban[:2] == text[:2] and is_made_up("iban", iban.replace(" ", ""))
            assert re.sub("[A-Z]", "X", re.sub(r"\d", "#", iban)) == re.sub("[A-Z]", "X", re.sub(r"\d", "#", text))


def test_a_check_digit_is_that_of_numbers_that_networks_publish():
    assert [check_digit(n) for n in ("411111111111111", "37828224631000", "601111111111111")] == ["1", "5", "7"]


def test_addresses_are_of_the_ranges_for_tests_and_keep_their_mask():
    assert ipaddress.ip_address(made("ip", "10.1.2.3", "10.1.2.3")) in ipaddress.ip_network("198.18.0.0/15")
    assert made("ip", "10.1.2.3/24", "10.1.2.3").endswith("/24")
    assert ipaddress.ip_address(made("ip", "2a02::1:2", "2a02::1:2")) in ipaddress.ip_network("2001:db8::/32")


def test_tokens_keep_vendor_shape_and_length_and_nothing_of_the_secret():
    for start, secret in (
        ("sk_live_", "Zq8rT2mLw9XpB4vN6cK1sD3f"),
        ("AKIA", "Q7RT2MLW5XPB4VN6"),
        ("xoxb-", "123456789012-aBcDeFgHiJkLmNo"),
    ):
        token = made("api_key", start + secret, start + secret)
        assert token.startswith(start) and len(token) == len(start + secret)
        assert not any(secret[n : n + 5] in token for n in range(len(secret) - 4))
        assert [c.isalnum() for c in token] == [c.isalnum() for c in start + secret]


def test_a_web_token_stays_one_and_says_nothing_of_its_owner():
    head, claims, signature = made("jwt", WEB_TOKEN, WEB_TOKEN).split(".")
    decoded = [json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in (head, claims)]
    assert decoded[0] == {"alg": "HS256", "typ": "JWT"}
    assert set(decoded[1]) == {"sub"} and decoded[1]["sub"] != "1234567890"
    assert len(signature) == 43


def test_a_private_key_keeps_its_lines_also_where_they_are_escaped():
    for gap in ("\n", "\\n"):
        key = gap + gap.join(["MIIEowIBAAKCAQEA7bq9", "Zq8rT2mLw9XpB4vN6cK1", "qQ=="]) + gap
        value = made("private_key", key, key)
        assert [len(line) for line in value.split(gap)] == [0, 20, 20, 4, 0]
        assert value.endswith("==" + gap)


def test_what_is_made_up_is_never_the_value_itself_though_few_values_are_to_choose_from():
    for n in range(300):
        assert made("custom_floor", "7", "7", conversation=f"c{n}") != "7"
        assert made("place", "Fernvale", "fernvale", conversation=f"c{n}") != "Fernvale"


def test_a_name_alone_becomes_what_it_is_in_the_full_name():
    first, last = made("person", "Anna Berg", "anna berg").split()
    assert made("person", "Anna", "anna") == first
    assert made("person", "Mr. BERG", "mr. berg").split()[-1] == last.upper()
