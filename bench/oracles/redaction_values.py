"""Made-up values of the kinds that a redactor must find, drawn by a seed; nothing here knows how they are looked for.

Formats are those that the issuers publish: national numbering plans, ISO 7812 and 13616, RFC 4291, the vendors' own
pages on their keys. No value lies in a range that is reserved for examples: those need no redaction.
"""

import base64
import itertools
import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

_ALNUM = string.ascii_letters + string.digits
_UPPER = string.ascii_uppercase + string.digits
_BASE64 = _ALNUM + "+/"
_HEX = "0123456789abcdef"


@dataclass(frozen=True)
class Value:
    """One value of a kind, as it stands in the text, and the part of it of which nothing may be left."""

    kind: str
    text: str
    core: str


def text_of(rng: random.Random, alphabet: str, length: int) -> str:
    """So many characters of an alphabet."""
    return "".join(rng.choice(alphabet) for _ in range(length))


def filled(rng: random.Random, shape: str) -> str:
    """The shape with # as any digit, N as one from 2 to 9 and X as a capital letter."""
    drawn = {"#": string.digits, "N": "23456789", "X": string.ascii_uppercase}
    return "".join(rng.choice(drawn[character]) if character in drawn else character for character in shape)


_FIRST = "ingrid tomasz sinead rahul beatriz yuki kofi lieke aurelie matteo siobhan dmitri zeynep oluwaseun".split()
_LAST = "thorvaldsen wisniewski oconnor subramanian carvalho hoshino mensah vandermeer lefebvre bianchi".split()
_HOSTS = (
    "gmail.com outlook.com web.de orange.fr posteo.de kpn.nl libero.it uol.com.br tohoku.ac.jp nhs.uk proton.me "
    "mail.ru yahoo.co.uk bigpond.net.au firma-krause.de ateliers-dumont.fr smartgrid.io rivermuseum.museum "
    "dept.physics.uni-koeln.de fileserver.internal xn--mller-kva.de"
).split()


def email(rng: random.Random) -> Value:
    first, last, number = rng.choice(_FIRST), rng.choice(_LAST), rng.randrange(10, 9999)
    local = rng.choice(
        [
            f"{first}.{last}",
            f"{first[0]}{last}{number}",
            f"{first}_{last}",
            f"{last}-{first}",
            f"{first}.{last}+orders{number}",
            f"{first}{number}x",
            f"{first.title()}.{last.title()}",
        ]
    )
    host = rng.choice(_HOSTS)
    whole = f"{local}@{host}"
    if rng.random() < 0.1:
        whole = whole.upper()
    return Value("email", whole, local)


# Shapes by country, national and international. Area codes and exchanges are ones in use.
_PHONES = (
    "(415) N3#-####|(212) N4#-####|617-N5#-####|303.N2#.####|+1 206 N3#-####|+1-512-N6#-####|1-800-N4#-####"
    "|020 8### ####|0161 4## ####|07911 ######|+44 20 8### ####|+44 7911 ######|+44 (0)161 4## ####"
    "|030 8#######|0151 2#######|089/3######|+49 30 8#######|+49 (0)151 2#######|0049 89 3######"
    "|01 42 ## ## ##|06 12 ## ## ##|+33 1 42 ## ## ##|+33 6 12 ## ## ##|04.91.##.##.##"
    "|+34 612 ## ## ##|+34 93 4## ## ##|+39 06 698# ####|+39 347 #######|+351 912 ### ###"
    "|+91 98### #####|098### #####|+55 11 9#### ####|(11) 9#### ####|(21) 3### ####"
    "|+31 6 2### ####|+48 601 ### ###|+81 3 3### ####|+61 2 9### ####|+41 44 2## ## ##|+43 1 5######|+46 8 6## ## ##"
).split("|")


def phone(rng: random.Random) -> Value:
    text = filled(rng, rng.choice(_PHONES))
    return Value("phone", text, "".join(filter(str.isdigit, text))[-6:])


def luhn_digit(digits: str) -> str:
    """The check digit of ISO 7812, by the table of doubled digits."""
    doubled = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
    total = sum(doubled[int(d)] if place % 2 == 0 else int(d) for place, d in enumerate(reversed(digits)))
    return str(-total % 10)


_CARDS = (("4539", 16), ("4716", 16), ("5184", 16), ("5391", 16), ("2315", 16), ("3714", 15), ("3479", 15),
          ("6011", 16), ("6511", 16), ("3528", 16), ("3612", 14))  # fmt: skip


def card_number(rng: random.Random, *, valid: bool) -> str:
    """A card number as people write it: in fours (an American Express in 4-6-5), with spaces, dashes or neither."""
    start, length = rng.choice(_CARDS)
    digits = start + text_of(rng, string.digits, length - len(start) - 1)
    check = int(luhn_digit(digits))
    digits += str(check if valid else (check + rng.randrange(1, 10)) % 10)
    sizes = (4, 6, 5) if length == 15 else (4, 6, 4) if length == 14 else (4, 4, 4, 4)
    places = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    groups = [digits[a:b] for a, b in itertools.pairwise(places)]
    return rng.choice((" ", "-", "")).join(groups)


def card(rng: random.Random) -> Value:
    text = card_number(rng, valid=True)
    return Value("card", text, "".join(filter(str.isdigit, text)))


_IBANS = {
    "DE": "##################", "FR": "##########X#########2##", "GB": "XXXX##############",
    "ES": "####################", "IT": "X######################", "NL": "XXXX##########", "AT": "################",
    "CH": "#################", "BE": "############",
    "PL": "########################", "SE": "####################", "PT": "#####################",
    "NO": "###########", "IE": "XXXX##############", "SA": "####################", "BR": "#######################XX",
}  # fmt: skip


def iban(rng: random.Random) -> Value:
    country = rng.choice(list(_IBANS))
    account = filled(rng, "7" + _IBANS[country][1:] if _IBANS[country][0] == "#" else _IBANS[country])
    numeric = "".join(str(int(character, 36)) for character in account + country + "00")
    whole = f"{country}{98 - int(numeric) % 97:02d}{account}"
    text = rng.choice([whole, " ".join(whole[n : n + 4] for n in range(0, len(whole), 4))])
    return Value("iban", text, whole[4:])


def ipv4(rng: random.Random) -> Value:
    text = f"{rng.choice((31, 78, 84, 91, 145, 151, 176, 185, 217))}.{rng.randrange(10, 250)}." + ".".join(
        str(rng.randrange(3, 254)) for _ in range(2)
    )
    return Value("ipv4", rng.choice([text, text, f"{text}/32"]), text)


def ipv6(rng: random.Random) -> Value:
    start = rng.choice(("2a02:8109", "2a01:e0a", "2003:c7", "2600:1700", "2401:4900"))
    groups = [f"{rng.randrange(0x1000, 0xFFFF):x}" for _ in range(6)]
    text = rng.choice(
        [
            ":".join([start, *groups]),
            f"{start}:{groups[0]}::{groups[1]}",
            f"{start}::{groups[2]}",
            f"{start}:{groups[0]}:{groups[1]}::{groups[3]}:{groups[4]}",
            f"{start}:{groups[0]}:{groups[1]}:0:0:0:{groups[3]}".upper(),
        ]
    )
    return Value("ipv6", text, text)


def url_credentials(rng: random.Random) -> Value:
    secret = text_of(rng, _ALNUM, rng.choice((14, 20, 32)))
    user = f"{rng.choice(_FIRST)}{rng.randrange(100, 999)}"
    host = rng.choice(("db.acme-shop.io", "git.nordwerk.de", "files.lumen.co", "10.44.7.19"))
    text = rng.choice(
        [
            f"https://{user}:{secret}@{host}/repo.git",
            f"postgres://{user}:{secret}@{host}:5432/orders",
            f"redis://:{secret}@{host}:6379/0",
            f"https://{host}/v1/report?access_token={secret}",
            f"https://{host}/export?format=csv&api_key={secret}&page=2",
            f"https://{host}/files/a.pdf?X-Amz-Expires=60&X-Amz-Signature={secret}",
        ]
    )
    return Value("url_credentials", text, secret)


def _key(kind: str, start: str, secret: str) -> Value:
    return Value(kind, start + secret, secret)


def aws_key(rng: random.Random) -> Value:
    return _key("aws_key", rng.choice(("AKIA", "ASIA")), text_of(rng, string.ascii_uppercase + "234567", 16))


def github_token(rng: random.Random) -> Value:
    if rng.random() < 0.3:
        return _key("github_token", "github_pat_", f"{text_of(rng, _ALNUM, 22)}_{text_of(rng, _ALNUM, 59)}")
    return _key("github_token", rng.choice(("ghp_", "gho_", "ghs_")), text_of(rng, _ALNUM, 36))


def slack_token(rng: random.Random) -> Value:
    ids = "-".join(text_of(rng, "123456789", 12) for _ in range(2))
    if rng.random() < 0.3:
        return _key("slack_token", f"xoxp-{ids}-{text_of(rng, '123456789', 12)}-", text_of(rng, _HEX, 32))
    return _key("slack_token", f"xoxb-{ids}-", text_of(rng, _ALNUM, 24))


def stripe_key(rng: random.Random) -> Value:
    return _key(
        "stripe_key", rng.choice(("sk_live_", "rk_live_", "sk_test_")), text_of(rng, _ALNUM, rng.choice((24, 99)))
    )


def google_key(rng: random.Random) -> Value:
    if rng.random() < 0.2:
        return _key("google_key", "GOCSPX-", text_of(rng, _ALNUM + "_-", 28))
    return _key("google_key", "AIza", text_of(rng, _ALNUM + "_-", 34) + rng.choice(_ALNUM))


def llm_key(rng: random.Random) -> Value:
    start, secret = rng.choice(
        [
            ("sk-", f"{text_of(rng, _ALNUM, 20)}T3BlbkFJ{text_of(rng, _ALNUM, 20)}"),
            ("sk-proj-", f"{text_of(rng, _ALNUM, 74)}T3BlbkFJ{text_of(rng, _ALNUM, 74)}"),
            ("sk-", text_of(rng, _HEX, 32)),
            ("sk-ant-api03-", f"{text_of(rng, _ALNUM + '_-', 93)}AA"),
            ("hf_", text_of(rng, string.ascii_letters, 34)),
        ]
    )
    return _key("llm_key", start, secret)


def _part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


def jwt(rng: random.Random) -> Value:
    head = _part({"alg": rng.choice(("HS256", "RS256")), "typ": "JWT"})
    claims = _part(
        {
            "sub": text_of(rng, string.digits, 10),
            "name": rng.choice(_LAST),
            "iat": rng.randrange(16 * 10**8, 17 * 10**8),
        }
    )
    signature = text_of(rng, _ALNUM + "_-", rng.choice((43, 342)))
    return Value("jwt", f"{head}.{claims}.{signature}", f"{claims}.{signature}")


def private_key(rng: random.Random) -> Value:
    name = rng.choice(
        ("RSA PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY", "ENCRYPTED PRIVATE KEY")
    )
    lines = [text_of(rng, _BASE64, 64) for _ in range(rng.choice((3, 13, 25)))] + [text_of(rng, _BASE64, 22) + "=="]
    text = "\n".join([f"-----BEGIN {name}-----", *lines, f"-----END {name}-----"])
    return Value("private_key", text, "".join(lines)[:-2])


def password(rng: random.Random) -> Value:
    """A value that only the name before it gives away."""
    secret = rng.choice(
        [
            text_of(rng, _ALNUM, 24),
            text_of(rng, _HEX, 40),
            f"{text_of(rng, string.ascii_lowercase, 7).title()}{rng.randrange(1000, 9999)}!{text_of(rng, _ALNUM, 4)}",
            f"{text_of(rng, _ALNUM, 12)}#{text_of(rng, _ALNUM, 6)}",
        ]
    )
    text = rng.choice(
        [
            f'password = "{secret}"',
            f"DB_PASSWORD={secret}",
            f"api_key: {secret}",
            f'"client_secret": "{secret}"',
            f"export AUTH_TOKEN='{secret}'",
            f"aws_secret_access_key = {text_of(rng, _BASE64, 30)}{secret[:10]}",
        ]
    )
    core = text.rsplit(" ", 1)[-1] if text.startswith("aws_") else secret
    return Value("password", text, core)


KINDS: dict[str, Callable[[random.Random], Value]] = {
    make.__name__: make
    for make in (email, phone, card, iban, ipv4, ipv6, url_credentials, aws_key, github_token, slack_token, stripe_key,
                 google_key, llm_key, jwt, private_key, password)
}  # fmt: skip
