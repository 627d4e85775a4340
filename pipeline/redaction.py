"""Redaction: personal data in a served request becomes made-up data, before anything else reads the text.

What is found by patterns, secrets' rules and models (recognisers, phones, credentials, named_entities, own_patterns)
is replaced by surrogates wherever a record holds text (record_walk).
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any

from pipeline.collect_config import RedactionConfig
from pipeline.credentials import Credentials
from pipeline.errors import Rejected
from pipeline.named_entities import named_entities
from pipeline.own_patterns import OwnPatterns
from pipeline.phones import PhoneRecogniser
from pipeline.recognisers import Hit, Recogniser, in_plain_signs, merged, pattern_recognisers
from pipeline.record_walk import RecordWalk, without_ids
from pipeline.split import SplitKey
from pipeline.surrogates import Surrogates

_LIBRARIES = ("presidio_analyzer", "phonenumbers", "kingfisher-secret-scanner", "tldextract", "regex")
_VERSION = 2
_SHORTEST = 5  # characters that can hold a value of the pattern kinds
_REMEMBERED = 8192  # characters of a text whose findings are kept for the next time


@dataclass(frozen=True)
class Redacted:
    """A record without what was found in it."""

    body: dict[str, Any]
    found: Counter[str] = field(default_factory=Counter)
    """Kind → values found; never the values."""
    changed: bool = False


class Redactor:
    """Redacts records by the settings. Raises: ConfigError where names are to be found and no model is given."""

    def __init__(self, settings: RedactionConfig, key: SplitKey):
        self._key, self._settings = key, settings
        self._recognisers: tuple[Recogniser, ...] = (
            *pattern_recognisers(),
            PhoneRecogniser(settings.phone_regions),
            Credentials(),
        )
        self._own = OwnPatterns(settings.custom, timeout_s=settings.pattern_timeout_s)
        self._names = named_entities(settings.names)
        # System prompts, roles and the earlier turns of a conversation come again and again.
        self._remembered = lru_cache(maxsize=4096)(self._hits)

    @property
    def meaning(self) -> dict[str, Any]:
        """What decides how a text is redacted: the settings, and the versions of what finds the values."""
        libraries = {name: metadata.version(name) for name in _LIBRARIES}
        return {"version": _VERSION, "libraries": libraries, **self._settings.model_dump(mode="json")}

    def redact(self, body: Mapping[str, Any], conversation: str) -> Redacted:
        """The record with made-up values in place of personal ones, alike in all that is of one conversation.

        Token ids of the reply are left out where anything changed, since they are of the text as it was, and where the
        record doesn't hold their text.

        Raises: Rejected with personal_data_in_settings, pattern_timeout, not_unicode or nested_too_deep.
        """
        walk = RecordWalk(self, Surrogates(self._key, conversation), Surrogates(self._key, "groups"))
        try:
            made = walk.record(body)
        except UnicodeEncodeError:
            raise Rejected("not_unicode")
        except RecursionError:
            raise Rejected("nested_too_deep")
        changed = made != body
        return Redacted(without_ids(made) if changed or not _is_in_words(body) else made, walk.found, changed)

    def hits(self, text: str, label: str = "", *, names: bool = True) -> list[Hit]:
        """What is found in a text, in order, none over another; without ``names``, no people and places."""
        find = self._remembered if len(text) < _REMEMBERED else self._hits
        return find(text, label, names)

    def _hits(self, text: str, label: str, names: bool) -> list[Hit]:
        plain = in_plain_signs(text)
        hits = [*self._own.hits(text, label)]
        if len(text) >= _SHORTEST:
            hits += (hit for one in self._recognisers for hit in one.hits(plain, label))
        if names:
            hits += (hit for one in self._names for hit in one.hits(text, label))
        return merged(hits, plain)


def _is_in_words(body: Mapping[str, Any]) -> bool:
    """Whether the text of a reply's token ids is all there to be read: not where reasoning was left out of it."""
    params = body["params"] if isinstance(body.get("params"), dict) else body
    response = body.get("response")
    choices = response.get("choices") if isinstance(response, dict) else None
    return params.get("include_reasoning") is not False and all(
        isinstance(choice, dict) and (choice.get("message") or choice.get("text"))
        for choice in (choices if isinstance(choices, list) else ())
    )


def conversation_of(body: Mapping[str, Any]) -> str:
    """What a record's made-up values are alike in: its subject and conversation, else how it began.

    Raises: Rejected with nested_too_deep.
    """
    named = [f"{name}:{body[name]}" for name in ("subject", "conversation", "conversation_id") if body.get(name)]
    if named:
        return "\0".join(named)
    messages = body.get("messages")
    opening = []
    for message in messages if isinstance(messages, list) else [body.get("prompt")]:
        opening.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            break
    try:
        return f"opening:{json.dumps(opening, sort_keys=True, ensure_ascii=False)}"
    except RecursionError:
        raise Rejected("nested_too_deep")
