"""Where personal data of pattern kinds stands in a text, by Presidio's patterns and checks.

Whole texts are never given to them: each kind has places that it cannot do without (an @, twelve digits, four dotted
numbers), found by a cheap pattern first. That finds what the whole text would, in microseconds where nothing is.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pipeline import presidio_patterns
from pipeline.surrogates import is_made_up


@dataclass(frozen=True, slots=True)
class Hit:
    """A stretch of a text that holds one value of a kind."""

    start: int
    end: int
    kind: str
    normal: str
    """The value in the one form that all its spellings share."""


class Recogniser(Protocol):
    """Finds the values of some kinds."""

    def hits(self, text: str, label: str) -> Iterable[Hit]:
        """The values in a text. ``label`` is what it stands under where that is known: the key of a JSON object."""
        ...


# What a value is taken for where two kinds claim the same characters.
_STRENGTH = ("private_key", "jwt", "api_key", "iban", "card", "email", "ip", "phone", "url_secret", "password")
# Thai, Japanese, Chinese, Korean: words touch the value that follows them.
UNSPACED = r"\u0e00-\u0e7f\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff00-\uffef"
# Each begins with what is rare in prose: a search for a first digit or sign is many times faster than one for a place.
# The host is looked at and not used up: in a list without spaces the next address begins in it.
_MAIL = re.compile(rf"[^\s@{UNSPACED}]{{1,128}}@(?=(?P<host>[^\s@{UNSPACED}]{{3,255}}))")
_URL_LOGIN = re.compile(r"://[^\s/@]{0,128}:\Z")
_SPOKEN_AT = re.compile(r"[\[({]\s?(?:at|ät|@|arroba|chez)\s?[\])}]", re.IGNORECASE)
_SPOKEN_DOT = r"\s?(?:\.|[\[({]\s?(?:dot|punkt|point|punto|ponto|\.)\s?[\])}])\s?"
_SPOKEN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,63}\s?\Z")
_SPOKEN_HOST = re.compile(rf"\s?[A-Za-z0-9-]+(?:{_SPOKEN_DOT}[A-Za-z0-9-]+)+", re.IGNORECASE)
_LONG_NUMBER = re.compile(r"[0-9](?<![A-Za-z0-9_][0-9])(?<![0-9][.,][0-9])(?:[ -]?[0-9]){11,}(?![A-Za-z_])")
_ACCOUNT = re.compile(r"(?<![A-Za-z0-9_-])[A-Za-z]{2}\d\d(?:[ -]?[A-Za-z0-9]{4}){2,7}(?:[ -]?[A-Za-z0-9]{1,3})?")
_ACCOUNT_BEGUN = re.compile(r"[0-9](?<=[A-Za-z]{2}[0-9])[0-9][ -]?[A-Za-z0-9]{4}")
_DOTTED = re.compile(
    r"[0-9](?<![A-Za-z0-9_][0-9])(?<![0-9][.:-][0-9])[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![A-Za-z0-9_]|\.[0-9])"
)
_COLONS = re.compile(r"(?<![A-Za-z0-9_:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:\.\d{1,3}){0,3}(?![\w:]|\.\d)")
_TWO_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_VERSION = re.compile(
    r"(?:version|release|build|firmware|section|chapter|paragraph|clause|article|abschnitt|kapitel|§|\boid)[^\w\n?!]{0,3}\Z",
    re.IGNORECASE,
)
_SMALL = 32  # numbers of a version; all four of an address are below it in 1 of 4,000
_SAID_ADDRESS = re.compile(
    r"(?:ip(?:v4)?|add?ress\w*|host|server|ping|ssh|inet|peer|client|dns)\W{1,4}(?:\w{1,8}\s)?\Z|//\Z|@\Z|\[\Z",
    re.IGNORECASE,
)
_SAID_ADDRESS_AFTER = re.compile(r":\d|/\d|\s-\s\S+\s\[|\s?port\b")
_ISSUED = re.compile(
    r"4\d{15}(?:\d{3})?|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|095|[689]\d)\d{11,16}|35\d{14,17}|(?:50|5[6-9]|6\d)\d{14,17}|1\d{14}"
)
_CARD_GROUPS = {(4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 3), (8, 8), (6, 13)}
# One character for another that looks or counts like it, so that places stay the same: spaces, dashes, wide signs, and
# the digits of other scripts.
_ODD = (
    dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " ")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}
    | {sign: str(int(sign)) for sign in map(chr, range(0x80, 0x10000)) if sign.isdecimal()}
)
_ANY_ODD, _PLAIN = re.compile(f"[{re.escape(''.join(_ODD))}]"), str.maketrans(_ODD)
# What nobody sees, and an @ as URLs, HTML and JSON in a text write it.
_HIDDEN = re.compile(r"[\u00ad\u200b-\u200d\u2060\ufeff]|(?P<at>%40|&(?:#64|#x40|commat);|\\{1,4}u0040)", re.IGNORECASE)
_HIDES = ("%40", "&#", "&commat", "u0040")

Places = Callable[[str], Iterable[tuple[int, str]]]  # text → where it may stand: offset and piece


@dataclass(frozen=True)
class PatternRecogniser:
    """One of Presidio's pattern kinds."""

    kind: str
    places: Places
    normal: Callable[[str, int, int], str | None]
    """Text, start and end → the value's one form; None where it is none after all."""

    def hits(self, text: str, label: str) -> Iterator[Hit]:
        for offset, piece in self.places(text):
            for start, end in self._matches(piece):
                normal = self.normal(text, offset + start, offset + end)
                if normal is not None and not is_made_up(self.kind, normal):
                    yield Hit(offset + start, offset + end, self.kind, normal)

    def _matches(self, piece: str) -> Iterable[tuple[int, int]]:
        return presidio_patterns.matches(self.kind, piece)


class AccountRecogniser(PatternRecogniser):
    """IBANs in fours or closed up, in capitals or not: the first length at which Presidio's check of form and digits
    holds, as words may follow."""

    def _matches(self, piece: str) -> Iterator[tuple[int, int]]:
        check = presidio_patterns.recognisers()["iban"].validate_result
        for place in _ACCOUNT.finditer(piece):
            ends = [n for n, character in enumerate(place.group(), start=1) if character.isalnum()]
            whole = _closed_up(place.group())
            for length in range(15, min(len(whole), 34) + 1):
                if check(whole[:length]):
                    yield place.start(), place.start() + ends[length - 1]
                    break


class SpokenMails:
    """E-mail addresses that are written so that no machine reads them: name (at) host (dot) tld."""

    def hits(self, text: str, label: str) -> Iterator[Hit]:
        for sign in _SPOKEN_AT.finditer(text):
            name = _SPOKEN_NAME.search(text, max(0, sign.start() - 65), sign.start())
            host = _SPOKEN_HOST.match(text, sign.end())
            if name and host:
                plain = re.sub(_SPOKEN_DOT, ".", host.group().strip(), flags=re.IGNORECASE)
                normal = f"{name.group().strip()}@{plain}".casefold()
                if presidio_patterns.matches("email", normal):
                    yield Hit(name.start(), host.end(), "email", normal)


def _everywhere(pattern: re.Pattern[str], begun: re.Pattern[str] | None = None) -> Places:
    """Where a pattern matches, in texts where something has begun that it needs."""

    def places(text: str) -> Iterable[tuple[int, str]]:
        if begun is not None and begun.search(text) is None:
            return ()
        return [(match.start(), match.group()) for match in pattern.finditer(text)]

    return places


def _mails(text: str) -> Iterator[tuple[int, str]]:
    if "@" in text:
        yield from ((match.start(), match.group() + match["host"]) for match in _MAIL.finditer(text))


def _colons(text: str) -> Iterator[tuple[int, str]]:
    for offset, piece in _everywhere(_COLONS, _TWO_COLONS)(text):
        if _is_written_out(piece):
            yield offset, piece


def _closed_up(text: str) -> str:
    return "".join(filter(str.isalnum, text)).upper()


def _mail(text: str, start: int, end: int) -> str | None:
    """The address; none where the @ follows the password of a URL, or the one name by which all use a git server."""
    value = text[start:end].casefold()
    return None if value.startswith("git@") or _URL_LOGIN.search(text, max(0, start - 130), start) else value


def _card(text: str, start: int, end: int) -> str | None:
    """The digits where an issuer gives out such numbers and they are grouped as on cards, or not at all."""
    digits = _closed_up(text[start:end])
    gaps = {character for character in text[start:end] if not character.isdigit()}
    sizes = tuple(map(len, re.split("[ -]", text[start:end])))
    sound = _ISSUED.fullmatch(digits) and len(gaps) <= 1 and sizes in _CARD_GROUPS | {(len(digits),)}
    return digits if sound else None


def _address(text: str, start: int, end: int) -> str | None:
    """The address, unless it is one of this machine, a mask, a group, or the standards' own; or no address at all."""
    value = text[start:end]
    address = ipaddress.ip_interface(value.partition("%")[0]).ip
    if address.version == 4 and _is_version(text, start, end, address):
        return None
    if address.version == 6 and not _is_written_out(value):
        return None
    # On its link, IPv6 names a machine by a number of its own, unless that was given by hand: fe80::1.
    on_link = address.is_link_local and (address.version == 4 or int(address) & 0xFFFF_FFFF_FFFF_0000 == 0)
    inside = address.is_loopback or address.is_unspecified or address.is_multicast or on_link
    is_mask = address.version == 4 and int(address) >= 0xF0000000
    return None if inside or is_mask else str(address)


def _is_version(text: str, start: int, end: int, address: ipaddress.IPv4Address) -> bool:
    """Whether four dotted numbers are said to be a version, or are all as small as a version's in the midst of a text
    that doesn't speak of an address."""
    if address.packed[0] == 0 or _VERSION.search(text, max(0, start - 20), start):
        return True
    alone = start == 0 and end == len(text)
    if alone or address.is_private or max(address.packed) >= _SMALL:
        return False
    return not (_SAID_ADDRESS.search(text, max(0, start - 20), start) or _SAID_ADDRESS_AFTER.match(text, end))


def _is_written_out(value: str) -> bool:
    """Whether it is more than what code writes: x[::2], a::b, std::dead::beef."""
    groups = [group for group in value.split(":") if group]
    return len(groups) >= 3 and any(len(group) >= 3 for group in groups) and any(map(str.isdigit, value))


def pattern_recognisers(places: Places | None = None) -> tuple[Recogniser, ...]:
    """E-mail addresses, payment cards, IBANs and IP addresses; ``places`` in place of where each kind is looked for."""
    return (
        PatternRecogniser("email", places or _mails, _mail),
        PatternRecogniser("card", places or _everywhere(_LONG_NUMBER), _card),
        SpokenMails(),
        AccountRecogniser(
            "iban", places or _everywhere(_ACCOUNT, _ACCOUNT_BEGUN), lambda text, a, b: _closed_up(text[a:b])
        ),
        PatternRecogniser("ip", places or _everywhere(_DOTTED), _address),
        PatternRecogniser("ip", places or _colons, _address),
    )


def in_plain_signs(text: str) -> str:
    """The text with the same number of characters, its spaces, dashes and wide signs as ASCII has them."""
    return text if text.isascii() or _ANY_ODD.search(text) is None else text.translate(_PLAIN)


def as_read(text: str) -> tuple[str, list[tuple[int, int]] | None]:
    """The text as a reader takes it, and where each of its characters stands in the other one; None: where it is."""
    plain = in_plain_signs(text)
    if (text.isascii() and not any(sign in text for sign in _HIDES)) or _HIDDEN.search(plain) is None:
        return plain, None
    pieces, spans, at = [], [], 0
    for match in _HIDDEN.finditer(plain):
        pieces.append(plain[at : match.start()])
        spans += ((place, place + 1) for place in range(at, match.start()))
        if match["at"]:
            pieces.append("@")
            spans.append(match.span())
        at = match.end()
    spans += ((place, place + 1) for place in range(at, len(plain)))
    return "".join([*pieces, plain[at:]]), spans


def placed(hits: Iterable[Hit], spans: Sequence[tuple[int, int]] | None) -> Iterator[Hit]:
    """Hits in a text as it is read, where they stand in the text that ``as_read`` was given."""
    for hit in hits:
        if spans is None:
            yield hit
        elif hit.start < hit.end:
            yield replace(hit, start=spans[hit.start][0], end=spans[hit.end - 1][1])


def merged(hits: Iterable[Hit], text: str) -> list[Hit]:
    """The hits in order, none over another: of those that share characters one stays, over all that they cover.

    The longest gives the kind; of equally long ones the one of the stronger kind.
    """
    kept: list[Hit] = []
    for hit in sorted(hits, key=lambda hit: (hit.start, -hit.end, hit.kind)):
        if not kept or hit.start >= kept[-1].end:
            kept.append(hit)
            continue
        winner = max(kept[-1], hit, key=_claim)
        start, end = kept[-1].start, max(kept[-1].end, hit.end)
        covers = (winner.start, winner.end) == (start, end)
        kept[-1] = winner if covers else Hit(start, end, winner.kind, text[start:end])
    return kept


def _claim(hit: Hit) -> tuple[int, int, str]:
    rank = _STRENGTH.index(hit.kind) if hit.kind in _STRENGTH else len(_STRENGTH)
    return hit.end - hit.start, -rank, hit.kind
