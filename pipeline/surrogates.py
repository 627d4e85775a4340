"""Made-up values in place of personal ones: natural, of the same form, out of ranges that belong to nobody.

A keyed hash of conversation, kind and value draws each, so that a value is replaced alike in every turn and every run,
otherwise in another conversation, and that nobody without the key can go back. The ranges are told apart again, so that
a made-up value stays as it is when it is met.

Sources of the ranges: RFC 2606 (domains); RFC 2544 and 3849 (addresses); the numbers that regulators keep for film and
broadcast (phones); payment networks' test numbers (cards). An IBAN's bank code of zeros or X is no bank's, but for
Brazil's largest: there it is nines. Of each only a part is used: other examples are replaced like any value, since who
wrote them may have meant someone.
"""

import base64
import hashlib
import ipaddress
import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeline.split import SplitKey

# Names that stand first or last, for anyone: "Mr Weber" and "Anna Weber" are one person.
_NAMES = (
    "alex ariel aubrey avery bailey blair cameron casey charlie dakota dana devon drew eden elliot emery finley "
    "frankie gray harley harper hayden hollis indigo jamie jesse jordan jules kai kendall kerry kim lane lee lennon "
    "leslie logan marlow micah morgan noel oakley parker payton perry quinn reese remy riley river robin rory rowan "
    "sage sasha sidney skyler stevie sutton tatum taylor terry toby tracy val wren wynne"
).split()
_PLACES = (
    "Alderbrook Ashmere Birchhaven Brackenford Cedarholm Copperton Dunmarsh Eastwick Elmstead Fairhollow Fernvale "
    "Foxbridge Glenrock Greystone Harborough Hazelton Highmoor Ivydale Kestrelton Lakeford Larkhill Maplewick "
    "Millbrae Northmere Oakhurst Pinecrest Quarrybank Redfield Rosedale Sandford Stonebury Thornwood Westerly"
).split()
_MARK, _HEX_MARK = "NOTREAL", "00c0ffee"
_OWN_MAIL = re.compile(rf"(?:{'|'.join(_NAMES)})\.(?:{'|'.join(_NAMES)})\d{{3}}@example\.(?:com|org|net)")
_OWN_NETWORKS = (ipaddress.ip_network("198.18.0.0/15"), ipaddress.ip_network("2001:db8:511b::/48"))
# The first digits of a card → those of test numbers of its network. The test numbers that everyone knows aren't ours.
_OWN_CARDS = {"34": "37828224", "37": "37828224", "35": "35660020", "3": "30569309", "4": "42424242", "5": "55555555",
              "2": "55555555", "6": "60111111", "1": "42424242"}  # fmt: skip
_KNOWN_CARDS = frozenset(
    "4242424242424242 5555555555554444 378282246310005 6011111111111117 3566002020360505 30569309025904".split()
)
# Country code → how numbers for film and broadcast begin; # stands for any digit, N for one from 2 to 9.
_OWN_PHONES: Mapping[str, tuple[str, ...]] = {
    "1": ("N9#55501",),
    "33": ("26191", "35301", "46571", "53649"),
    "44": ("1174960", "1184960", "1514960", "1914980"),
    "46": ("8465004", "7017406", "3139006"),
    "49": ("3023125", "6990009", "4066969", "8999998", "17139200", "176040690"),
    "61": ("35550", "75550", "85550"),
    "353": ("2091",),
}
_NO_BRAZILIAN = "99999999"
_NO_RANGE = "000"  # no plan gives out a national number that begins so, nor with the two that are left without a 0
_VENDOR = re.compile(
    r"(?:gh[a-z]_|github_pat_|sk-ant-api\d\d-|sk-proj-|sk-|[rsp]k_(?:live|test)_|xox[a-z]-|A[KS]IA|AIza|GOCSPX-|hf_"
    r"|glpat-|ya29\.|SG\.|npm_|pypi-)?"
)
_ESCAPE = re.compile(r"\\+[nrt]")
_FORMS = {
    "card": re.compile(r"\d{12,19}"),
    "iban": re.compile(r"[A-Z]{2}\d\d[A-Z0-9]{11,30}"),
    "phone": re.compile(r"\+\d+ \d+"),
    "jwt": re.compile(r"[\w-]+\.[\w-]+\.[\w-]*"),
}
_WEB_TOKEN_HEAD = {"alg": "HS256", "typ": "JWT"}


class _Draws:
    """Draws that a seed fixes for good, whatever Python runs."""

    def __init__(self, seed: str):
        self._seed, self._used, self._bytes = seed, 0, hashlib.shake_256(seed.encode()).digest(256)

    def below(self, limit: int) -> int:
        if self._used + 4 > len(self._bytes):
            self._bytes = hashlib.shake_256(self._seed.encode()).digest(4 * len(self._bytes))
        drawn = int.from_bytes(self._bytes[self._used : self._used + 4])
        self._used += 4
        return drawn % limit

    def one(self, of: str | list[str] | tuple[str, ...]) -> str:
        return of[self.below(len(of))]

    def digits(self, count: int) -> str:
        return "".join(self.one(string.digits) for _ in range(count))

    def like(self, character: str) -> str:
        """A character of the same class; what is neither letter nor digit stays."""
        for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
            if character in alphabet:
                return self.one(alphabet)
        return self.one(string.ascii_lowercase) if character.isalnum() else character


@dataclass(frozen=True)
class Surrogates:
    """The made-up values of one conversation."""

    key: SplitKey
    conversation: str
    _made: dict[tuple[str, str, str], str] = field(default_factory=dict, repr=False, compare=False)

    def of(self, kind: str, text: str, normal: str) -> str:
        """What stands for a value, written as ``text`` is. Spellings with one ``normal`` form give one value."""
        known = self._made.get((kind, text, normal))
        if known is None:
            known = self._made[kind, text, normal] = self._make(kind, text, normal)
        return known

    def _make(self, kind: str, text: str, normal: str) -> str:
        form = _FORMS.get(kind)
        # Where two values run into each other, their characters are of no one form.
        make = _MAKERS.get(kind, _of_same_form) if form is None or form.fullmatch(normal) else _token
        for attempt in range(100):
            draws = _Draws(self.key.hash("surrogate", f"{self.conversation}\0{kind}\0{normal}\0{attempt}"))
            made = make(self, draws, text, normal) if make is _person else make(draws, text, normal)
            if made.casefold() != text.casefold():
                return made
        return _MARK


def is_made_up(kind: str, normal: str) -> bool:
    """Whether a value lies in the ranges that values are made up in here."""
    match kind:
        case "email":
            return _OWN_MAIL.fullmatch(normal) is not None
        case "ip":
            return any(ipaddress.ip_address(normal) in network for network in _OWN_NETWORKS)
        case "card":
            return normal.startswith(tuple(_OWN_CARDS.values())) and normal not in _KNOWN_CARDS
        case "iban":
            return normal[4:12] == _NO_BRAZILIAN if normal.startswith("BR") else not normal[4:8].strip("0X")
        case "phone":
            country, _, national = normal.removeprefix("+").partition(" ")
            own = (_NO_RANGE[1:], *_OWN_PHONES.get(country, ()))
            return any(re.match(start.replace("#", r"\d").replace("N", "[2-9]"), national) for start in own)
        case "api_key" | "jwt" | "private_key" | "url_secret" | "password":
            plain = "".join(filter(str.isalnum, _ESCAPE.sub("", normal))).lower()
            return _MARK.lower() in plain or plain.endswith(_HEX_MARK)
    return False


def check_digit(digits: str) -> str:
    """The Luhn digit that makes a card number of these digits valid. Source: ISO/IEC 7812-1."""
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        total += digit if place % 2 else sum(divmod(2 * digit, 10))
    return str(-total % 10)


def _email(draws: _Draws, text: str, normal: str) -> str:
    name = f"{draws.one(_NAMES)}.{draws.one(_NAMES)}{draws.below(900) + 100}"
    return f"{name}@example.{draws.one(('com', 'org', 'net'))}"


def _card(draws: _Draws, text: str, normal: str) -> str:
    start = next(own for first, own in _OWN_CARDS.items() if normal.startswith(first))
    body = start + draws.digits(len(normal) - len(start) - 1)
    return _written_as(text, body + check_digit(body))


def _iban(draws: _Draws, text: str, normal: str) -> str:
    bank = "".join("0" if character.isdigit() else "X" for character in normal[4:8])
    bank = _NO_BRAZILIAN if normal.startswith("BR") else bank
    account = bank + "".join(draws.like(character) for character in normal[4 + len(bank) :])
    numeric = "".join(str(int(character, 36)) for character in f"{account}{normal[:2]}00")
    made = _written_as(text, f"{normal[:2]}{98 - int(numeric) % 97:02d}{account}")
    return made.lower() if text == text.lower() else made


def _ip(draws: _Draws, text: str, normal: str) -> str:
    mask = text[len(text.partition("/")[0]) :]
    if ":" not in normal:
        return f"198.{18 + draws.below(2)}.{draws.below(256)}.{1 + draws.below(254)}{mask}"
    first, second, third = (draws.below(0xFFFF) + 1 for _ in range(3))
    return f"2001:db8:511b:{first:x}::{second:x}:{third:x}{mask}"


def _phone(draws: _Draws, text: str, normal: str) -> str:
    country, _, national = normal.removeprefix("+").partition(" ")
    starts = [start for start in _OWN_PHONES.get(country, ()) if len(start) + 2 <= len(national)] or [_NO_RANGE]
    start = draws.one(starts).replace("N", draws.one("23456789"))
    start = "".join(draws.one(string.digits) if character == "#" else character for character in start)
    made = start + draws.digits(len(national) - len(start))
    written = "".join(filter(str.isdigit, text))
    return _written_as(text, written[: max(0, len(written) - len(made))] + made)


def _token(draws: _Draws, text: str, normal: str) -> str:
    """The same shape and length, ending in NOTREAL; shorter ones than can hold it become a word of that kind."""
    start = _VENDOR.match(normal).end()
    plain = "".join(filter(str.isalnum, normal[start:]))
    is_hex = all(character in "0123456789abcdef" for character in plain)
    mark = _HEX_MARK if is_hex else _MARK if any(map(str.isupper, plain)) else _MARK.lower()
    if len(plain) < len(mark) + 3:
        return f"{normal[:start]}{_MARK.lower()}{draws.digits(4)}"
    return normal[:start] + _masked(draws, normal[start:], mark)


def _masked(draws: _Draws, text: str, mark: str) -> str:
    """Every letter and digit drawn anew but those of \\n and its like, the last ones replaced by the mark."""
    pieces = re.findall(rf"{_ESCAPE.pattern}|[\s\S]", text)
    places = [n for n, piece in enumerate(pieces) if piece.isalnum()]
    if len(places) < len(mark):
        return mark
    for place in places:
        pieces[place] = draws.like(pieces[place])
    for place, character in zip(places[-len(mark) :], mark, strict=True):
        pieces[place] = character
    return "".join(pieces)


def _web_token(draws: _Draws, text: str, normal: str) -> str:
    _, claims, signature = normal.split(".", 2)
    room = max(1, len(claims) * 3 // 4 - len('{"sub":""}'))
    sealed = _masked(draws, signature, _MARK)
    return f"{_encoded(_WEB_TOKEN_HEAD)}.{_encoded({'sub': draws.digits(room)})}.{sealed}"


def _encoded(value: Mapping[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


def _person(surrogates: Surrogates, draws: _Draws, text: str, normal: str) -> str:
    """Word by word, so that a first or last name alone becomes what it is in the full name."""

    def word(match: re.Match[str]) -> str:
        seed = f"{surrogates.conversation}\0name\0{match.group().casefold()}"
        made = _Draws(surrogates.key.hash("surrogate", seed)).one(_NAMES)
        return made.upper() if match.group().isupper() and len(match.group()) > 1 else made.title()

    return re.sub(r"[^\W\d_]+", word, text)


def _place(draws: _Draws, text: str, normal: str) -> str:
    return draws.one(_PLACES)


def _of_same_form(draws: _Draws, text: str, normal: str) -> str:
    return "".join(map(draws.like, text))


def _written_as(text: str, made: str) -> str:
    """The letters and digits of ``made`` with the gaps of ``text``; what is too much goes to the end."""
    rest = iter(made)
    return "".join(next(rest, "") if character.isalnum() else character for character in text) + "".join(rest)


_MAKERS: Mapping[str, Callable[..., str]] = {
    "email": _email, "card": _card, "iban": _iban, "ip": _ip, "phone": _phone, "api_key": _token, "private_key": _token,
    "url_secret": _token, "password": _token, "jwt": _web_token, "person": _person, "place": _place,
}  # fmt: skip
