"""Keys, tokens and passwords: Kingfisher's rules for vendors, and what a name before it gives away.

Scanning is offline: nothing that is found is tried out anywhere.
"""

import base64
import binascii
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from pipeline.recognisers import Hit
from pipeline.surrogates import is_made_up

# Vendors' shapes that Kingfisher has no rule for, or one only beside a second value. Each needs its piece in the text.
_MORE_KEYS = tuple(
    (pieces.split(), re.compile(pattern))
    for pieces, pattern in {
        "AKIA ASIA ABIA ACCA": r"(?<![A-Za-z0-9])A(?:KI|SI|BI|CC)A[A-Z2-7]{16}(?![A-Za-z0-9])",
        "ghp_ gho_ ghs_ ghu_ ghr_": r"(?<![A-Za-z0-9])gh[opsur]_[A-Za-z0-9]{36}",
        "github_pat_": r"github_pat_[A-Za-z0-9_]{82}",
        "k_test_ k_live_": r"(?<![A-Za-z0-9])[rsp]k_(?:test|live)_[A-Za-z0-9]{10,250}",
        "sk-": r"(?<![A-Za-z0-9_-])sk-[A-Za-z0-9_-]{20,250}",
        "hf_": r"(?<![A-Za-z0-9_])hf_[A-Za-z]{34}(?![A-Za-z0-9_])",
        "GOCSPX-": r"GOCSPX-[A-Za-z0-9_-]{28}",
        "AIza": r"AIza[A-Za-z0-9_-]{35}",
        "ya29.": r"ya29\.[A-Za-z0-9_-]{20,250}",
        "whsec_": r"whsec_[A-Za-z0-9]{24,64}",
        "sq0": r"sq0(?:csp|atp|idp)-[A-Za-z0-9_-]{22,43}",
        "key-": r"(?<![A-Za-z0-9_-])key-[0-9a-f]{32}(?![0-9a-f])",
        ":AA": r"(?<!\d)\d{8,10}:AA[A-Za-z0-9_-]{33}",
        "xox xapp-": r"(?<![A-Za-z0-9])(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{20,250}",
    }.items()
)
_JWT = re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{2,}\.[A-Za-z0-9_-]*")
_SENT_ALONG = re.compile(r"\b(?:Bearer|Basic|Token)\s+(?P<value>[A-Za-z0-9._~+/-]{16,2048}=*)", re.IGNORECASE)
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?)-----")
_BLOCK_REST = re.compile(  # lines of base64, and their headers; the words of a sentence are shorter
    r"(?:(?:\s|\\[nr])*(?:(?:Proc-Type|DEK-Info|Comment|Version):[^\n\\]*|[A-Za-z0-9+/=]{16,}))*"
    r"(?:(?:\s|\\[nr])*[A-Za-z0-9+/]{1,15}={1,2})?"
)
_MIN_KEY_CHARACTERS = 16
_IN_URL = re.compile(
    r"(?:://(?P<user>[^\s/:@\"'<>]{0,128}):(?P<login>[^\s/@\"'<>]{3,256})@)"
    r"|[?&](?:[\w.-]*(?:token|secret|passw|signature|(?:api|access)[_-]?key)[\w.-]*|sig|key|auth|pwd)"
    r"=(?P<query>[^\s&#\"'<>]{6,2048})",
    re.IGNORECASE,
)
# What a secret is called: how the name begins, and how it goes on. A key needs to be said to be more than a key.
_NAMES = {
    **dict.fromkeys(
        "kennwort pwd psk senha wachtwoord hasło haslo 密码 パスワード secret token key schlüssel".split(), ""
    ),
    **{
        "pass": r"w(?:or)?d|wort|phrase|wd|(?<=[_.\"'-]pass)(?![A-Za-z])",
        "contrase": "[nñ]a",
        "mot de passe": "",
        "парол": "[ья]",
        "credential": "s?",
    },
}
_IN_QUERY = re.compile(r"[?&][\w.-]*\Z")
_BEFORE_KEY = re.compile(
    r"(?:api|access|auth|private|account|secret|service|client|db|license|storage|encryption|signing|master)[_ -]?\Z"
)
_PUBLIC = re.compile(r"public[_ -]?(?:key)?[_ -]?\Z")
# Quotes may be escaped: JSON is often the text of a tool's result.
_VALUES = (
    r"\\{0,3}\"(?P<double>[^\"\\\n]{6,512})\\{0,3}\"|'(?P<single>[^'\\\n]{6,512})'|`(?P<tick>[^`\n]{6,512})`"
    r"|(?P<bare>[^\s\"'`,;)}\]\\]{6,512})"
)
_ASSIGNED = (
    r"\w{0,20}\\{0,3}[\"'`]?\]?"
    r"(?:\s{0,3}(?::=|=>|={1,3}|:|\b(?:is|ist|lautet|est|es)\b)|[,\s]{1,20}\\{0,3}[\"']?value\\{0,3}[\"']?\s?[:=])\s{0,3}"
)
_ELEMENT = r"\w{0,20}(?:\s[^<>\n]{0,80})?>(?P<element>[^<>\s]{6,512})</"
_NAMED = {
    begun: re.compile(rf"{begun}(?:{rest})(?:{_ASSIGNED}(?:{_VALUES})|{_ELEMENT})", re.IGNORECASE)
    for begun, rest in _NAMES.items()
}
# Where a password stands on a command line or in a statement, with no sign between its name and itself.
_OPTIONS = r"\b[^\n|;&]{0,200}?\s"
_COMMANDS = {
    piece: re.compile(rf"{before}(?:{_VALUES})", re.IGNORECASE)
    for piece, before in {
        "--": r"--[\w-]{0,20}(?:passw(?:or)?d|pass|pwd|token|secret|api-?key)[ \t]+",
        "requirepass": r"\brequirepass[ \t]+",
        "masterauth": r"\bmasterauth[ \t]+",
        "identified": r"\bidentified\s+by\s+(?:password\s+)?",
        " password '": r"\b(?:with|encrypted)\s+password\s+(?=')",
        "login": r"\blogin\s+\S{1,128}\s+password\s+",  # .netrc
        "sshpass": rf"\bsshpass{_OPTIONS}-p\s*",
        "login -": rf"\b(?:docker|podman|oras|registry) login{_OPTIONS}-p\s*",
        "mysql": rf"\bmysql(?:dump|admin)?{_OPTIONS}-p(?=\S)",
        "mariadb": rf"\bmariadb(?:-dump|-admin)?{_OPTIONS}-p(?=\S)",
        "mongo": rf"\bmongo(?:sh|dump|restore|import|export)?{_OPTIONS}-p[ \t]*",
        "redis-cli": rf"\bredis-cli{_OPTIONS}-a[ \t]*",
        "curl": rf"\bcurl{_OPTIONS}(?:-u|--user)[ =]?[\"']?[^\s:\"']{{1,64}}:",
    }.items()
}
_PLACEHOLDER = re.compile(
    r"<.*|\$\{.*|\$\(.*|(?-i:\$[A-Z_][A-Z0-9_]*)|%\w+%|%\(.*|\{.*|\(.*\)|\[.*\]|\W+|x+|.*example.*"
    r"|null|none|true|false|undefined|(?:your|my|dein|ihr|votre|tu|sample|dummy|test|change|insert|replace)[\W_a-z]\D*"
    r"|(?:self|os|process|env|config|settings|secrets|vars)\..*",
    re.IGNORECASE,
)
_CODE = re.compile(r"[A-Za-z_][\w.]*(?:\(|\[|\.[A-Za-z_]\w*\Z|\Z)")
_DOCUMENTED = re.compile("EXAMPLE")  # how vendors' own pages end a key
_ANYONE = frozenset("user username admin root git oauth2 x-access-token token postgres mysql redis default".split())
_MIN_BITS = 3.0  # of entropy a character, for a value without digits


class Credentials:
    """Keys and tokens of vendors, JSON web tokens, private keys, and what URLs and names of passwords give away."""

    def hits(self, text: str, label: str) -> Iterator[Hit]:
        for hit in self._candidates(text, label):
            if hit.end > hit.start and not is_made_up(hit.kind, hit.normal) and not _DOCUMENTED.search(hit.normal):
                yield hit

    def _candidates(self, text: str, label: str) -> Iterator[Hit]:
        yield from _by_vendors(text)
        for pieces, pattern in _MORE_KEYS:
            if any(piece in text for piece in pieces):
                yield from (_hit("api_key", text, *match.span()) for match in pattern.finditer(text))
        if "PRIVATE KEY" in text:
            yield from _private_keys(text)
        if "eyJ" in text:
            yield from (_hit("jwt", text, *m.span()) for m in _JWT.finditer(text) if _is_web_token(m.group()))
        if "=" in text or "://" in text:
            yield from _in_urls(text)
        for match in _SENT_ALONG.finditer(text):
            if _is_random(match["value"]):
                yield _hit("api_key", text, *match.span("value"))
        yield from _by_name(text, label)


def _hit(kind: str, text: str, start: int, end: int) -> Hit:
    return Hit(start, end, kind, text[start:end])


@cache
def _scanner() -> Any:
    """Kingfisher's scanner (0.3 s with its cache of compiled rules, 4 s without)."""
    from kingfisher_sdk import Rules, Scanner

    return Scanner(Rules(), base64=False)


def _by_vendors(text: str) -> Iterator[Hit]:
    raw = text.encode()
    for finding in _scanner().scan(raw):
        if finding.visible:
            start, end = finding.location["start_offset"], finding.location["end_offset"]
            if len(raw) != len(text):
                start, end = len(raw[:start].decode()), len(raw[:end].decode())
            yield from _of_rule(finding.rule_id, text, start, end)


def _of_rule(rule: str, text: str, start: int, end: int) -> Iterator[Hit]:
    if "private-key" in rule or "jwt" in rule:
        return  # found below, by their form
    value = text[start:end]
    if (host := value.find("://")) < 0:
        yield _hit("url_secret" if "uri" in rule else "api_key", text, start, end)
    elif (path := value.find("/", host + 3)) > 0 and "@" not in value[:path]:
        yield _hit("url_secret", text, start + path + 1, end)


def _private_keys(text: str) -> Iterator[Hit]:
    """What stands between the lines that begin and end a key; where the end is missing, all that looks like key."""
    endless, done = set(), 0
    for match in _BLOCK.finditer(text):
        if match.start() < done:
            continue
        kind = match.group(1)
        end = -1 if kind in endless else text.find(f"-----END {kind}-----", match.end())
        if end < 0:
            endless.add(kind)  # never looked for again: a text may begin thousands
            end = _BLOCK_REST.match(text, match.end()).end()
        done = end
        if sum(map(str.isalnum, text[match.end() : end])) >= _MIN_KEY_CHARACTERS:
            yield _hit("private_key", text, match.end(), end)


def _is_web_token(text: str) -> bool:
    head = text.partition(".")[0]
    try:
        return "alg" in json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except (ValueError, binascii.Error, TypeError):
        return False


def _in_urls(text: str) -> Iterator[Hit]:
    for match in _IN_URL.finditer(text):
        group = "login" if match["login"] is not None else "query"
        if not _PLACEHOLDER.fullmatch(match[group]) and (group == "login" or _is_random(match[group])):
            yield _hit("url_secret", text, *match.span(group))
            if match["user"] and match["user"].lower() not in _ANYONE:
                yield _hit("url_secret", text, *match.span("user"))


def _by_name(text: str, label: str) -> Iterator[Hit]:
    if label and " " not in text and any(_names(label.lower())) and _is_secret(text, quoted=True):
        yield _hit("password", text, 0, len(text))
    lowered = text.lower()
    if len(lowered) != len(text):  # a few capitals have small letters of two characters
        lowered = "".join(small if len(small := character.lower()) == 1 else character for character in text)
    for begun, at in _names(lowered):
        match = _NAMED[begun].match(text, at)
        if match and not _IN_QUERY.search(text, max(0, at - 40), at):
            yield from _of_match(text, match)
    for piece, pattern in _COMMANDS.items():
        if piece in lowered:
            for match in pattern.finditer(text):
                yield from _of_match(text, match)


def _of_match(text: str, match: re.Match[str]) -> Iterator[Hit]:
    group = match.lastgroup
    start, end = match.span(group)
    if group == "bare":
        end = start + len(text[start:end].rstrip(".!?:"))
    if _is_secret(text[start:end], quoted=group != "bare"):
        yield _hit("password", text, start, end)


def _names(lowered: str) -> Iterator[tuple[str, int]]:
    """Where the name of a secret begins, and which."""
    for begun in _NAMES:
        at = lowered.find(begun)
        while at >= 0:
            said = begun != "key" or _BEFORE_KEY.search(lowered, max(0, at - 11), at)
            if said and not _PUBLIC.search(lowered, max(0, at - 11), at):
                yield begun, at
            at = lowered.find(begun, at + 1)


def _is_secret(value: str, *, quoted: bool) -> bool:
    """Whether a value under such a name is one: no placeholder, no code, no word of a language."""
    if _PLACEHOLDER.fullmatch(value) or (not quoted and _CODE.match(value) and not _is_random(value)):
        return False
    return len(value) >= 6 and " " not in value and _is_random(value)


def _is_random(value: str) -> bool:
    """Digits among letters, or letters as unevenly mixed as no word is."""
    if any(map(str.isdigit, value)) and any(map(str.isalpha, value)):
        return True
    counts = Counter(value)
    bits = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    mixed = any(map(str.islower, value)) and any(map(str.isupper, value[1:]))
    return len(value) >= 12 and bits > _MIN_BITS and mixed
