"""A served record with made-up values where personal ones were found, place by place.

Every text of a record is looked at, wherever it stands: what is not known to be harmless is redacted. A finding in a
place that cannot be written anew (a schema, an id, the key of an object) rejects the record.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

from pipeline.errors import Rejected
from pipeline.recognisers import Hit, merged
from pipeline.surrogates import Surrogates

# Of the record itself: never part of a row's text, or hashed before they are written.
_HASHED = frozenset(("subject", "conversation", "conversation_id"))
# Of the record itself, and alike for all of one value: they name groups of requests.
_GROUPS = frozenset(("id", "slice", "route", "slices", "tenant"))
# What is an id or one of a few words everywhere.
_FIXED = frozenset(("id", "tool_call_id", "call_id", "role", "type", "model", "finish_reason", "tool_choice"))
# What a reply must fit: to change it would be to ask for something else.
_SETTINGS = frozenset(
    ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
     "guided_whitespace_pattern")
)  # fmt: skip
# What texts became: never read, and dropped where a text was changed.
_IDS = frozenset(("token_ids", "prompt_token_ids", "logprobs", "prompt_logprobs"))
# Where a number may be somebody's: what calls and templates are given.
_CARRIES = frozenset(("arguments", "chat_template_kwargs"))
_SHORTEST_NUMBER = 5  # digits; fewer are counts, years and prices
_PROSE = frozenset(("description", "title"))  # in a tool's schema


class Finder(Protocol):
    """What finds personal data (pipeline/redaction.py)."""

    def hits(self, text: str, label: str = "", *, names: bool = True) -> list[Hit]:
        """What is in a text that stands under this label."""
        ...


class RecordWalk:
    """One record on its way through."""

    def __init__(self, finder: Finder, surrogates: Surrogates, groups: Surrogates):
        self._finder, self._surrogates, self._groups = finder, surrogates, groups
        self.found: Counter[str] = Counter()

    def record(self, body: Mapping[str, Any]) -> dict[str, Any]:
        made = {}
        for name, value in body.items():
            self._require_clean_name(name)
            if name in _HASHED:
                made[name] = value
            elif name in _GROUPS:
                own, self._surrogates = self._surrogates, self._groups
                made[name] = self._value(value, label=name)
                self._surrogates = own
            else:
                made[name] = self._item(name, value)
        return made

    def _item(self, name: str, value: Any) -> Any:
        """The value under a name of an object."""
        if value is None or name in _IDS:
            return value
        if name in _FIXED or name in _SETTINGS:
            self._require_clean(value)
            return value
        if name in ("tools", "functions"):
            return self._inside_json(value, self._tools) if isinstance(value, str) else self._tools(value)
        if name == "arguments" and isinstance(value, str):
            return self._inside_json(value, lambda parsed: self._value(parsed, label="", numbers=True))
        return self._value(value, label=name, numbers=name in _CARRIES)

    def _value(self, value: Any, *, label: str, numbers: bool = False) -> Any:
        if isinstance(value, str):
            return self._text(value, label)
        if isinstance(value, list):
            if _is_of_texts(value):
                made = self._texts([part["text"] for part in value])
                return [{**part, "text": text} for part, text in zip(value, made, strict=True)]
            return [self._value(item, label=label, numbers=numbers) for item in value]
        if isinstance(value, dict):
            for name in value:
                self._require_clean_name(name)
            if numbers:
                return {name: self._value(item, label=name, numbers=True) for name, item in value.items()}
            return {name: self._item(name, item) for name, item in value.items()}
        if numbers and (digits := _digits(value)):
            made = self._text(digits, label)
            if made != digits:
                return int(made) if made.isdigit() and made[0] != "0" else made
        return value

    def _text(self, text: str, label: str) -> str:
        (made,) = self._texts([text], label)
        return made

    def _texts(self, texts: Sequence[str], label: str = "") -> list[str]:
        """Texts that follow each other, each alone and joined: a value may begin in one and end in the next."""
        alone = [self._finder.hits(text, label) for text in texts]
        if len(texts) == 1:
            return [self._replaced(texts[0], alone[0])]
        whole, starts = "".join(texts), [0, *accumulate(map(len, texts))]
        placed = [
            Hit(hit.start + start, hit.end + start, hit.kind, hit.normal)
            for start, hits in zip(starts, alone, strict=False)
            for hit in hits
        ]
        hits = merged([*placed, *self._finder.hits(whole, label)], whole)
        return [self._piece(whole, hits, start, end) for start, end in pairwise(starts)]

    def _replaced(self, text: str, hits: Iterable[Hit]) -> str:
        pieces, done = [], 0
        for hit in hits:
            pieces += [text[done : hit.start], self._made_up(text, hit)]
            done = hit.end
        return "".join([*pieces, text[done:]]) if done else text

    def _piece(self, whole: str, hits: Iterable[Hit], start: int, end: int) -> str:
        """One of several texts: a made-up value goes where its value began."""
        pieces, done = [], start
        for hit in hits:
            if start <= hit.start < end:
                pieces += [whole[done : hit.start], self._made_up(whole, hit)]
            if start < hit.end and hit.start < end:
                done = min(hit.end, end)
        return "".join([*pieces, whole[done:end]])

    def _made_up(self, text: str, hit: Hit) -> str:
        self.found[hit.kind] += 1
        return self._surrogates.of(hit.kind, text[hit.start : hit.end], hit.normal)

    def _inside_json(self, text: str, redact: Callable[[Any], Any]) -> str:
        """JSON that is written as a text, with its own spacing where that can be told; else the text as a text."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return self._text(text, "")
        made = redact(parsed)
        if made == parsed:
            return text
        for ascii_only in (True, False):
            for separators in ((", ", ": "), (",", ":")):
                if json.dumps(parsed, ensure_ascii=ascii_only, separators=separators) == text:
                    return json.dumps(made, ensure_ascii=ascii_only, separators=separators)
        return json.dumps(made, ensure_ascii=False)

    def _tools(self, value: Any) -> Any:
        """A tool's descriptions are prose; the rest of its schema is what a call must fit."""
        if isinstance(value, list):
            return [self._tools(item) for item in value]
        if not isinstance(value, dict):
            self._require_clean(value)
            return value
        for name in value:
            self._require_clean_name(name)
        return {
            name: self._text(item, name) if name in _PROSE and isinstance(item, str) else self._tools(item)
            for name, item in value.items()
        }

    def _require_clean_name(self, name: str) -> None:
        # Words of a schema are taken for names too easily: "Paris" among the values of a setting names nobody.
        if self._finder.hits(name, names=False):
            raise Rejected("personal_data_in_settings")

    def _require_clean(self, value: Any) -> None:
        if text := value if isinstance(value, str) else _digits(value):
            self._require_clean_name(text)
        elif isinstance(value, dict):
            for name, item in value.items():
                self._require_clean_name(name)
                self._require_clean(item)
        elif isinstance(value, list):
            for item in value:
                self._require_clean(item)


def _digits(value: Any) -> str | None:
    """A number's digits, as a text may have them, where they are enough to be somebody's."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    digits = str(abs(value))
    return digits if len(digits) >= _SHORTEST_NUMBER else None


def _is_of_texts(value: Sequence[Any]) -> bool:
    return len(value) > 0 and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value)


def without_ids(value: Any) -> Any:
    """The same without token ids and their probabilities, at any depth."""
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name not in _IDS}
    return [without_ids(item) for item in value] if isinstance(value, list) else value
