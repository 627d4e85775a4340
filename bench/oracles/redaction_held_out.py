"""Records with labelled values, and clean ones, that were written without a look at any pattern of the redaction.

Random values of the shapes their makers describe, in texts as people paste them. The same seed gives the same records.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.oracles import redaction_held_out_texts as texts
from bench.oracles.redaction_held_out_clean import TRAPS, clean_value, uuid
from bench.oracles.redaction_held_out_clean import date as clean_date
from bench.oracles.redaction_held_out_clean import price as clean_price
from bench.oracles.redaction_held_out_keys import NAMED_TOKENS, TOKENS, private_key
from bench.oracles.redaction_held_out_values import FIRST, LAST, VALUES, Maker

NUM_LABELLED = 1200
NUM_CLEAN = 720
SEED = 20_011
_PIECE = 8  # characters of a secret that tell something of it
TOOL_ARGUMENTS = frozenset(texts.split(texts.TOOL_ARGUMENTS))
MAKERS = {**VALUES, **TOKENS, **{kind: make for kind, (_, make) in NAMED_TOKENS.items()}, "private_key": private_key}
SLOT = re.compile(r"«([a-z0-9_A-Z=]+)(/json)?»")
FILLERS: dict[str, Maker] = {
    "order": lambda r: str(r.randint(10_000, 9_999_999)),
    "name": lambda r: f"{r.choice(FIRST).title()} {r.choice(LAST).title()}",
    "login": lambda r: r.choice(["app", "svc_orders", "deploy", "crm_rw", "root", "backup-bot"]),
    "pid": lambda r: str(r.randint(300, 40_000)),
    "date": clean_date,
    "price": clean_price,
    "uuid": uuid,
    "time": lambda r: f"{r.randint(0, 23):02}:{r.randint(0, 59):02}",
    "iso": lambda r: (
        f"2025-0{r.randint(1, 9)}-1{r.randint(0, 9)}T0{r.randint(0, 9)}:{r.randint(10, 59)}:07.{r.randint(100, 999)}Z"
    ),
    "clf": lambda r: f"1{r.randint(0, 9)}/Mar/2025:0{r.randint(0, 9)}:{r.randint(10, 59)}:03 +0000",
    "syslog": lambda r: f"Mar 1{r.randint(0, 9)} 0{r.randint(0, 9)}:{r.randint(10, 59)}:41",
}


@dataclass(frozen=True)
class Labelled:
    """A value that has to go."""

    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class HeldOutRecord:
    """What one person sent, or what a model called a tool with."""

    text: str
    values: tuple[Labelled, ...]
    tool_arguments: bool = False
    """The text is JSON, the arguments of a tool call."""

    def body(self, conversation: str) -> dict[str, Any]:
        """The request that it is part of."""
        turn: dict[str, Any] = {"role": "user", "content": self.text}
        if self.tool_arguments:
            call = {"id": "call_1", "type": "function", "function": {"name": "do_it", "arguments": self.text}}
            turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [turn], "conversation": conversation}


def left_over(body: dict[str, Any], value: Labelled) -> bool:
    """Whether the value is still in a record: a number however it is grouped, of a secret a piece of its last half."""
    message = body["messages"][0]
    text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    if value.text.casefold() in text.casefold():
        return True
    if value.kind.startswith(("phone", "card", "iban")):
        return "".join(filter(str.isalnum, value.text)) in "".join(filter(str.isalnum, text))
    if value.kind in ("email", "ipv4", "ipv6"):
        return False
    secret = value.text.partition("-----END")[0]
    places = range(len(secret) // 2, len(secret) - _PIECE + 1)
    return any(secret[place : place + _PIECE] in text for place in places)


def rendered(template: str, value: Callable[[str], str | None], filler: Callable[[str], str]) -> HeldOutRecord:
    """The template with every slot filled, and where the labelled values came to stand."""
    text, values, at = "", [], 0
    for slot in SLOT.finditer(template):
        text += template[at : slot.start()]
        at = slot.end()
        made = value(slot[1])
        if made is not None:
            made = json.dumps(made)[1:-1] if slot[2] else made
            values.append(Labelled(slot[1], made, len(text), len(text) + len(made)))
        text += filler(slot[1]) if made is None else made
    return HeldOutRecord(text + template[at:], tuple(values), template in TOOL_ARGUMENTS)


def token_templates(rng: Random) -> Iterator[str]:
    """Every key's kind in every carrier that suits it, over and over."""
    carriers = {kind: texts.split(texts.TOKEN_CARRIERS) for kind in TOKENS}
    carriers |= {kind: texts.split(texts.NAMED_TOKEN_CARRIERS) for kind in NAMED_TOKENS}
    for turn in range(NUM_LABELLED):
        for number, (kind, suited) in enumerate(carriers.items()):
            names = NAMED_TOKENS.get(kind, ((f"{kind.upper()}_TOKEN", "API_KEY", f"{kind}_key"),))[0]
            carrier = suited[(turn + 3 * number) % len(suited)]
            yield carrier.replace("«variable»", rng.choice(names)).replace("«token»", f"«{kind}»")


def labelled_records() -> Iterator[HeldOutRecord]:
    """The records with values: a third each mails and tool calls, machines' texts, and keys."""
    rng = Random(SEED)
    people, machines = texts.split(texts.MAILS) + texts.split(texts.TOOL_ARGUMENTS), texts.split(texts.SYSTEMS)
    keys = token_templates(rng)
    for number in range(NUM_LABELLED // 3):
        for template in (people[number % len(people)], machines[number % len(machines)], next(keys)):
            yield rendered(
                template,
                lambda kind: MAKERS[kind](rng) if kind in MAKERS else None,
                lambda kind: FILLERS[kind](rng),
            )


def clean_records() -> Iterator[HeldOutRecord]:
    """The records with nothing to find."""
    rng, traps = Random(SEED + 1), texts.split(TRAPS)
    for number in range(NUM_CLEAN):
        yield rendered(traps[number % len(traps)], lambda _: None, lambda kind: clean_value(rng, kind))
