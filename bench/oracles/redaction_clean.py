"""Texts without personal data that hold what looks like it, drawn by a seed."""

import random
import string
import uuid

from bench.oracles.redaction_values import card_number, filled, text_of

_HEX = "0123456789abcdef"


def _order(rng: random.Random) -> str:
    number = filled(
        rng, rng.choice(("R1####", "2024-#######", "ORD-########", "#######", "########-##", "1##########"))
    )
    return rng.choice(
        ("Where is order {}?", "Bestellung {} fehlt", "Commande nº {} non reçue", "ticket #{} again")
    ).format(number)


def _version(rng: random.Random) -> str:
    number = filled(
        rng,
        rng.choice(
            (
                "1.#.#",
                "v2.1#.0",
                "10.0.19#41.##5",
                "version 4.2.0.1",
                "v1.2.3.4",
                "Chrome/12#.0.6#67.1#5",
                "numpy==1.26.#",
                "react@18.2.#",
                "firmware 7.1.0.22",
                "release 3.8.1.19",
            )
        ),
    )
    return rng.choice(("Does {} still get fixes?", "Seit {} stürzt es ab", "upgrade to {} broke the build")).format(
        number
    )


def _date(rng: random.Random) -> str:
    when = rng.choice(
        (
            f"2024-0{rng.randrange(1, 9)}-1{rng.randrange(9)}",
            f"1{rng.randrange(9)}/0{rng.randrange(1, 9)}/2023",
            f"1{rng.randrange(9)}.0{rng.randrange(1, 9)}.2025",
            f"2025-03-0{rng.randrange(1, 9)}T12:30:4{rng.randrange(9)}Z",
            f"17{rng.randrange(10**7, 10**8)}",
            f"20240{rng.randrange(1, 9)}15 093000",
            "12:30:45.123",
        )
    )
    return rng.choice(
        ("The meeting on {} moved.", "Am {} war es kalt", "log entry at {}: started", "Depuis le {}")
    ).format(when)


def _isbn(rng: random.Random) -> str:
    shape = rng.choice(("978-3-16-14841#-#", "97800#######N", "0-306-4061#-#", "978-0-13-4685##-#"))
    return f"Summarise ISBN {filled(rng, shape)} for me"


def _hash(rng: random.Random) -> str:
    value = text_of(rng, _HEX, rng.choice((7, 32, 40, 64)))
    return rng.choice(
        ("git show {}", "commit {} broke main", "sha256:{}", "md5 {}", "Fixed in {}.", "docker pull app@sha256:{}")
    ).format(value)


def _uuid(rng: random.Random) -> str:
    return f"request id {uuid.UUID(int=rng.getrandbits(128), version=4)} timed out"


def _price(rng: random.Random) -> str:
    value = rng.choice(
        (
            f"$1,{rng.randrange(100, 999)},{rng.randrange(100, 999)}.50",
            f"{rng.randrange(10, 99)}.{rng.randrange(100, 999)},00 €",
            f"£{rng.randrange(1000, 9999)}",
            f"{rng.randrange(10**6, 10**8)} yen",
            f"1 {rng.randrange(100, 999)} 000 Kč",
        )
    )
    return rng.choice(("It cost {}.", "Der Preis ist {}", "total: {}", "Le total est de {}")).format(value)


def _coordinates(rng: random.Random) -> str:
    north, east = rng.uniform(-60, 60), rng.uniform(-170, 170)
    return rng.choice(
        (
            f"Which town is at {north:.6f}, {east:.6f}?",
            f"lat={north:.4f}&lon={east:.4f}",
            f"48°51'24\"N 2°21'{rng.randrange(60)}\"E",
        )
    )


def _bad_card(rng: random.Random) -> str:
    return rng.choice(("Is {} a valid card number?", "Gutschein {} geht nicht", "voucher {}", "serial {}")).format(
        card_number(rng, valid=False)
    )


def _maths(rng: random.Random) -> str:
    a, b, c = (rng.randrange(10, 10**6) for _ in range(3))
    return rng.choice(
        (
            f"A farmer has {a} sheep and buys {b} more for ${c}. How many are there?",
            f"{a} * {b} + {c} = ?",
            f"pi is 3.14159265358979{rng.randrange(10, 99)}",
            f"Sort {a} {b} {c} {a + b} {b + c}",
            f"{rng.randrange(1900, 2020)}-{rng.randrange(2021, 2030)}: revenue {a},{b:06d}",
            f"|{a}|{b}|{c}|\n|---|---|---|",
            f"The population rose from {a:,} to {a + b:,} in {rng.randrange(1900, 2024)}.",
        )
    )


def _code(rng: random.Random) -> str:
    n = rng.randrange(10, 99)
    return rng.choice(
        (
            f"for (std::size_t i = 0; i < {n}; ++i) std::cout << v[i] << std::endl;",
            f"x = a[::2] + b[1::{n}] @ c.T",
            "@dataclass\nclass Point:\n    x: int\n    y: int = 0",
            "password = getpass.getpass()\nif password == stored: ok()",
            'api_key = os.environ["API_KEY"]',
            "token = tokenizer.encode(text)[0]",
            "def f(secret: str) -> bytes: ...",
            "password: str = Field(min_length=8)",
            "SELECT token, secret FROM sessions WHERE id = ?",
            "API_KEY=<your key here>",
            'config = {"password": "********", "user": null}',
            "PASSWORD=changeme",
            "secret: ${{ secrets.DEPLOY_TOKEN }}",
            f"#include <array>\nstd::array<int, {n}> dead::beef();",
            "curl https://example.com/api?page=2&token=YOUR_TOKEN",
            "git clone git://host/repo && cd repo",
            f"color: #{text_of(rng, _HEX, 6)}; margin: 0 {n}px",
            "127.0.0.1 localhost",
            "app.run(host='0.0.0.0', port=8080)",
            "netmask 255.255.255.0",
            "import numpy as np  # noqa: E402",
            f"assert parse('1.3.6.1.4.1.311.{n}') is not None",
            "key = lambda item: item[0]; secret_key = None",
            f"MAC 3c:22:fb:{n}:0a:1b, mtu 1500",
            "fe80::1%lo0 and ::1 are local",
            f"id_{text_of(rng, string.digits, 8)}",
        )
    )


def _talk(rng: random.Random) -> str:
    return rng.choice(
        (
            "What is a good password policy?",
            "Wie ändere ich mein Passwort: geht das online?",
            "Explain e-mail @ a high level.",
            "My phone is broken, what now?",
            "The secret: always salt the water.",
            "Write a poem about tokens and keys.",
            "Call me maybe. 99 problems, 1 solution.",
            "Explique le RGPD en 5 points.",
            "Which IP law applies to a 1-800 number?",
            "Follow @weather on any site",
            "section 3.1.4.2 of the norm",
            "paragraph 12.4.1.3 says no",
            "key: value pairs in YAML",
            "The IBAN format has up to 34 characters.",
            "Is sk-learn the same as scikit-learn?",
            "the sk-ies are blue",
            "Rooms 101 102 103 104 105 106",
            "Ratio 4:3:2::1",
            "password: see the attached manual",
            "Score 21-15, 18-21, 15-12",
            "Chapter 10 verses 12-13, 2 Samuel 7:12-16",
            "ages 12 14 16 18 20 22 24",
            "Flight LH 1234 gate B42 seat 12A",
            "ASIN B07XJ8C8F5, EAN 4006381333931",
            "VIN WVWZZZ1JZXW000001",
            "tracking 1Z999AA10123456784",
            "postcode 10115 Berlin",
            "Windows key XXXXX-XXXXX",
            "in 1984-1985 and 2001-2003",
        )
    )


_MAKERS = (_order, _version, _date, _isbn, _hash, _uuid, _price, _coordinates, _bad_card, _maths, _code, _talk)


def clean_text(rng: random.Random) -> str:
    """One text without a value that would have to go."""
    return rng.choice(_MAKERS)(rng)
