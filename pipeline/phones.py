"""Phone numbers, by libphonenumber's own rules, where they look like one or are said to be one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import phonenumbers

from pipeline.errors import ConfigError
from pipeline.recognisers import Hit
from pipeline.surrogates import is_made_up

_CANDIDATE = re.compile(r"(?<![A-Za-z0-9_.,/-])\(?(?:\+|\d|\(\+?\d)[\d ().\-/]{5,40}\d(?![A-Za-z0-9_])")
_ENOUGH_DIGITS = re.compile(r"[0-9](?:[ ().\-/]{0,3}[0-9]){6}")
_GAP = r"[ ().\-/]{1,3}"
# Said of a phone, in the languages of the common regions; "number" alone is said of orders too.
_SAID = re.compile(
    r"phone|telef|téléf|fono\b|\btel\b|\bfon\b|mobil|móvil|\bcell|celular|handy|portable|whats ?app|\bsms\b|\bfax\b"
    r"|\bcall(?:ed|ing)?\b|\bring\b|anruf|rufen sie|appel|llám|llama|chiama|ligue|telemóvel|\bgsm\b"
    r"|\bjoindre\b|\bjoignable|\berreich(?:en|bar|st)\b|\breach (?:me|us|him|her|them)\b"
    r"|\b(?:my|meine?r?|mon|mi|meu|mio|mijn) n[uú]m|電話|携帯|电话|手机|телефон|전화",
    re.IGNORECASE,
)
_SAID_AFTER = re.compile(
    r"\W{0,3}(?:mobile|cell|phone|tel|handy|mobil|fax|whatsapp|portable|celular|móvil"
    r"|(?:is|ist|est|es) (?:my|mein|mon|mi|our|unser))",
    re.IGNORECASE,
)
_SAID_WITHIN = 40  # characters before the number
_DATE = re.compile(r"(?:19|20)\d\d[-/. ](?:0?\d|1[0-2])[-/. ]\d{1,2}\b|\d{1,2}[-/.]\d{1,2}[-/.](?:19|20)\d\d\b")
_THOUSANDS = re.compile(r"\d{1,3}(?:\.\d{3})+")  # 356.367.523 is an amount more often than a phone
_MIN_DIGITS, _MIN_GROUPED_DIGITS = 7, 9
_MAX_DIGITS = 18  # of one number: 00, a country code, a 0 in brackets and the rest
# North America's numbers as nothing else is written, given out or not.
_AMERICAN = re.compile(r"(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[.-]\d{4}")
# An area or mobile code with its 0, a gap, and the rest: however its country would group it.
_CODE_AND_REST = rf"0[1-9]\d{{1,3}}{_GAP}\d(?:{_GAP}?\d){{4,}}"


@dataclass(frozen=True)
class PhoneRecogniser:
    """Numbers with a country code anywhere; national ones of the regions where they are grouped as there, or where
    words before them speak of a phone."""

    regions: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.regions) - set(phonenumbers.SUPPORTED_REGIONS)):
            raise ConfigError(
                f"collect.redaction.phone_regions: {', '.join(unknown)} is no region of libphonenumber; expected "
                'two capital letters, for instance ["US", "DE"]'
            )

    def hits(self, text: str, label: str) -> Iterator[Hit]:
        for start, piece in _candidates(text):
            said = _SAID.search(text, max(0, start - _SAID_WITHIN), start) or _SAID.search(label)
            said = said or _SAID_AFTER.match(text, start + len(piece))
            for offset, match in self._matches(piece, said=bool(said)):
                if not said and _THOUSANDS.fullmatch(match.raw_string):
                    continue
                national = phonenumbers.national_significant_number(match.number)
                normal = f"+{match.number.country_code} {national}"
                if not is_made_up("phone", normal):
                    yield Hit(start + offset + match.start, start + offset + match.end, "phone", normal)

    @cached_property
    def _shapes(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """Each region, and what its numbers look like where they are grouped. Asked first: it costs microseconds."""
        return tuple((region, _shape(region)) for region in self.regions)

    def _matches(self, piece: str, *, said: bool) -> list[tuple[int, Any]]:
        """What the first region finds that finds anything: offset, and match from there."""
        if "+" in piece:
            # New ranges are given out all the time: a country code and a length that can be are enough.
            return [(0, m) for m in phonenumbers.PhoneNumberMatcher(piece, None, phonenumbers.Leniency.POSSIBLE)]
        anywhere = said or piece.lstrip("(").startswith("00")
        for region, shape in self._shapes:
            matches = phonenumbers.PhoneNumberMatcher(piece, region) if anywhere else ()
            found = [(0, match) for match in matches] or list(_grouped(piece, region, shape))
            if found:
                return found
        return []


def _grouped(piece: str, region: str, shape: re.Pattern[str]) -> Iterator[tuple[int, Any]]:
    """The numbers that are grouped as the region does it. Longer pieces, as rows of a table, are looked at by parts."""
    whole = sum(map(str.isdigit, piece)) <= _MAX_DIGITS
    for place in shape.finditer(piece):
        offset, part = (0, piece) if whole else (place.start(), place.group())
        american = region in ("US", "CA") and _AMERICAN.search(part)
        leniency = phonenumbers.Leniency.POSSIBLE if american else phonenumbers.Leniency.VALID
        for match in phonenumbers.PhoneNumberMatcher(part, region, leniency):
            if _is_grouped(match):
                yield offset, match
        if whole:
            return


def _candidates(text: str) -> Iterator[tuple[int, str]]:
    """Where enough digits stand together, and those digits; a date before them is none of theirs."""
    if _ENOUGH_DIGITS.search(text) is None:
        return
    at = 0
    while match := _CANDIDATE.search(text, at):
        at = match.end()
        if date := _DATE.match(text, match.start()):
            at = date.end()
        elif sum(map(str.isdigit, match.group())) >= _MIN_DIGITS:
            yield match.start(), match.group()


def _shape(region: str) -> re.Pattern[str]:
    formats = phonenumbers.PhoneMetadata.metadata_for_region(region).number_format
    grouped = [_GAP.join(groups) for one in formats if len(groups := _groups(one.pattern)) > 1]
    return re.compile(rf"(?<!\d)(?:[01]{_GAP}|[01])?(?:{'|'.join([*grouped, _CODE_AND_REST])})(?!\d)")


def _groups(pattern: str) -> list[str]:
    r"""The groups of a format's pattern, such as (\d{3})(\d{3,4}), without what captures them."""
    groups, depth, begun = [], 0, 0
    for place, character in enumerate(pattern):
        if character == "(":
            begun = place + 1 if depth == 0 else begun
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                groups.append(pattern[begun:place])
    return [f"(?:{group})" for group in groups]


def _is_grouped(match: Any) -> bool:
    """Whether a number is written as its country writes it, or as an area code, a gap, and the rest."""
    written = re.findall(r"\d+", match.raw_string)
    if len(written) < 2 or sum(map(len, written)) < _MIN_GROUPED_DIGITS:
        return False
    if match.number.country_code == 1 and _AMERICAN.fullmatch(match.raw_string):
        return True
    usual = re.findall(r"\d+", phonenumbers.format_number(match.number, phonenumbers.PhoneNumberFormat.NATIONAL))
    return written[-len(usual) :] == usual or re.fullmatch(r"0[1-9]\d{1,3}", written[0]) is not None
