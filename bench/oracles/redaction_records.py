"""Served requests with and without personal data in them, labelled, to measure a redactor by.

Sentences, places and formats are drawn by a seed and know nothing of how a redactor looks for values. A label is a
value and the part of it of which nothing may be left; around it, everything has to stay. Clean records hold what
resembles such values: order and version numbers, dates, ISBNs, commits, prices, coordinates, code, card numbers that
fail their check digit.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.oracles.redaction_clean import clean_text
from bench.oracles.redaction_values import KINDS, Value

Body = dict[str, Any]
PER_KIND, NUM_CLEAN = 50, 800


@dataclass(frozen=True)
class Labelled:
    """A record, the value in it, and the words around the value, which must stay as they are."""

    body: Body
    value: Value
    around: tuple[str, ...]
    place: str


_SENTENCES = {
    "email": (
        "Please write to {} about the refund.", "Meine Adresse ist {}, danke!", "Contactez-moi à {} svp.",
        "Mi correo es {}.", "from: {}\nsubject: late parcel", "<{}> said the door was open", "mailto:{}",
        "メールは{} です。", "Cc {}; the others know already",
    ),
    "phone": (
        "Call me at {} after six.", "Meine Telefonnummer: {} (abends)", "Mon numéro est le {}, merci",
        "Mi teléfono es {}.", "Tel. {}", "You reach my mother on {}, she is deaf in one ear", "WhatsApp {}",
        "Bitte rufen Sie mich unter {} zurück.", "Il mio cellulare: {}", "phone={}", "Meu celular é {}",
    ),
    "card": (
        "I paid with card {} yesterday.", "Meine Kreditkarte {} wurde zweimal belastet.", "carte bancaire {} refusée",
        "la tarjeta {} no funciona", "card number: {}, exp 09/29", "{}", "Charged twice: {}.",
    ),
    "iban": (
        "Please refund to {}.", "Überweisen Sie es bitte auf {}, danke.", "Mon IBAN: {}", "Mi cuenta es {}.",
        "IBAN {} at my bank", "{}", "pay into {} by Friday",
    ),
    "ipv4": (
        "Our server {} is down.", "Die Adresse {} antwortet nicht.", "ssh root@{} hangs", "GET / from {} - 403",
        "L'adresse {} est bloquée", "ping {} times out", "http://{}/admin is open",
    ),
    "ipv6": (
        "Our server {} is down.", "Die Adresse {} antwortet nicht.", "ping6 {} times out", "AAAA {}",
        "L'adresse {} est bloquée", "http://[{}]:8080/admin is open",
    ),
    "private_key": ("My key:\n{}\nWhy is it refused?", "Warum geht dieser Schlüssel nicht?\n{}", "{}"),
    "password": (
        "Why does this fail?\n{}\n", "In meiner Datei steht\n{}\nund es geht nicht", "My config has {} in it",
        "# settings\n{}\nDEBUG=1",
    ),
}  # fmt: skip
_SECRET_SENTENCES = (
    "Why does {} not work any more?", "Ich habe {} in den Code geschrieben, ist das schlimm?",
    "curl -H 'X-Key: {}' ...",
    "Mon jeton est {}.", 'client = Client("{}")', "KEY={}", "la clave {} caducó", "Authorization: Bearer {}",
    "I pasted {} into the chat, sorry", "{}",
)  # fmt: skip


def _user(text: str, **more: Any) -> Body:
    return {"messages": [{"role": "user", "content": text}], **more}


def _in_content(rng: random.Random, before: str, value: str, after: str) -> Body:
    return _user(f"{before}{value}{after}")


def _in_prompt(rng: random.Random, before: str, value: str, after: str) -> Body:
    return {"prompt": f"{before}{value}{after}"}


def _in_earlier_turn(rng: random.Random, before: str, value: str, after: str) -> Body:
    turns = [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", f"{before}{value}{after}"),
        ("user", "thanks, and?"),
    ]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def _in_system(rng: random.Random, before: str, value: str, after: str) -> Body:
    return {
        "messages": [{"role": "system", "content": f"{before}{value}{after}"}, {"role": "user", "content": "hello"}]
    }


def _in_second_part(rng: random.Random, before: str, value: str, after: str) -> Body:
    parts = [{"type": "text", "text": "Read this first. "}, {"type": "text", "text": f"{before}{value}{after}"}]
    return {"messages": [{"role": "user", "content": parts}]}


def _over_two_parts(rng: random.Random, before: str, value: str, after: str) -> Body:
    cut = len(value) // 2
    parts = [before + value[:cut], value[cut:] + after]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]}


def _in_arguments(rng: random.Random, before: str, value: str, after: str) -> Body:
    arguments = json.dumps({"note": f"{before}{value}{after}", "copies": 2}, ensure_ascii=rng.random() < 0.5)
    call = {"id": "call_1", "type": "function", "function": {"name": "save_note", "arguments": arguments}}
    turns = [{"role": "user", "content": "save it"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return {"messages": [*turns, {"role": "tool", "tool_call_id": "call_1", "content": "saved"}]}


def _in_tool_result(rng: random.Random, before: str, value: str, after: str) -> Body:
    body = _in_arguments(rng, "a", "b", "c")
    body["messages"][-1]["content"] = json.dumps({"rows": [{"text": f"{before}{value}{after}"}]}, ensure_ascii=False)
    return body


def _in_reply(rng: random.Random, before: str, value: str, after: str) -> Body:
    message = {"role": "assistant", "content": f"{before}{value}{after}"}
    return _user("What did they say?", response={"choices": [{"message": message, "finish_reason": "stop"}]})


def _in_code(rng: random.Random, before: str, value: str, after: str) -> Body:
    return _user(f"Explain:\n```python\ndef main():\n    # {before}{value}{after}\n    return 0\n```\n")


Place = Callable[[random.Random, str, str, str], Body]
_PLACES: tuple[Place, ...] = (_in_content, _in_content, _in_content, _in_prompt, _in_earlier_turn, _in_system, _in_code,
                              _in_second_part, _over_two_parts, _in_arguments, _in_tool_result, _in_reply)  # fmt: skip


def labelled(*, seed: int = 0, per_kind: int = PER_KIND) -> Iterator[Labelled]:
    """So many records of every kind."""
    rng = random.Random(f"labelled {seed}")
    for kind, make in KINDS.items():
        for number in range(per_kind):
            value = make(rng)
            before, after = rng.choice(_SENTENCES.get(kind, _SECRET_SENTENCES)).split("{}")
            place = rng.choice(_PLACES)
            body = place(rng, before, value.text, after)
            body["conversation"] = f"{kind} {number}"
            yield Labelled(body, value, tuple(part.strip() for part in (before, after)), place.__name__.strip("_"))


def clean(*, seed: int = 0, count: int = NUM_CLEAN) -> Iterator[Body]:
    """So many records without personal data, in the same places."""
    rng = random.Random(f"clean {seed}")
    places = [place for place in _PLACES if place is not _over_two_parts]
    for number in range(count):
        yield {**rng.choice(places)(rng, "", clean_text(rng), ""), "conversation": f"clean {number}"}


def texts(value: Any) -> Iterator[str]:
    """Every text in a record; of a tool call's arguments, the texts of their JSON. Parts of one message also joined."""
    if isinstance(value, str):
        yield value
        if value.startswith(("{", "[")):
            try:
                yield from texts(json.loads(value))
            except ValueError:
                return
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        if value and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
            yield "".join(part["text"] for part in value)
        for item in value:
            yield from texts(item)


def left_over(body: Body, value: Value) -> bool:
    """Whether the value, or its core with the digits closed up, is still in a text of the record."""
    found = list(texts({key: item for key, item in body.items() if key != "conversation"}))
    needles = {value.text, value.core, json.dumps(value.core, ensure_ascii=False)[1:-1]}
    if any(needle.casefold() in text.casefold() for needle in needles for text in found):
        return True
    if value.kind not in ("phone", "card", "iban"):
        return False
    return any(value.core in "".join(filter(str.isalnum, text)) for text in found)
