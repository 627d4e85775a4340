"""What a prompt says, as a set of short pieces: what two prompts have in common is told from these sets.

A piece is five characters in a row, not a few words: Chinese, Japanese and Thai write no spaces, code and JSON have
few, and a text of three words has enough pieces to be told from its neighbour. Case, width and runs of white space
make no difference.

Pieces are hashed under a secret seed. Whoever has the seed can still spell the text from them, so what is written
with them is as private as the text itself.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

NUM_CHARACTERS = 5
_FRAME = ("system", "developer")
_MIN_OWN = 16  # pieces: with fewer of its own, nothing but its boilerplate is left to compare a prompt by
_MIN_CONVERSATIONS = 20  # of fewer, nobody can tell what a group shares from what its few members happen to say
_SHARED_BY = 0.2  # of a group's conversations
SAMPLED_CONVERSATIONS = 200  # of each group: enough to tell a fifth of it

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_HALF = np.uint64(33)
_HIGH = np.uint64(32)


@dataclass(frozen=True, eq=False)
class Boilerplate:
    """The pieces that a group's prompts share: its system prompt, its templates. They say nothing about a request."""

    pieces: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))  # uint32, sorted, each once
    groups: frozenset[str] = frozenset()
    """The groups that have conversations enough to tell."""


def prompt_shingles(messages: str, group: str, *, boilerplate: Boilerplate, seed: int) -> np.ndarray:
    """The pieces that a prompt is compared by: uint32, sorted, each once, never empty.

    They are of all its messages without the boilerplate. Of a group too small to tell, the system prompt is left out
    instead: it is the application's word, and with it in, every request of a route with a long one would be near all
    others. A prompt that says next to nothing else is compared by the whole of its other messages.
    """
    frame, words = prompt_texts(messages)
    known = group in boilerplate.groups
    whole = shingles(f"{frame}\n{words}" if known and frame else words, seed=seed)
    own = whole[~are_in(whole, boilerplate.pieces)]
    if len(own) >= _MIN_OWN:
        return own
    return shingles(words, seed=seed) if known and frame else whole


def find_boilerplate(samples: Mapping[str, Sequence[str]], *, seed: int) -> Boilerplate:
    """What the prompts of each group share. ``samples``: group → messages of one prompt a conversation.

    See ``sampled_prompts`` for which; the result depends on these alone, in any order.
    """
    found, told = [np.empty(0, np.uint32)], []
    for group, prompts in samples.items():
        if len(prompts) < _MIN_CONVERSATIONS:
            continue
        told.append(group)
        pieces = np.concatenate([shingles("\n".join(prompt_texts(messages)), seed=seed) for messages in prompts])
        values, counts = np.unique(pieces, return_counts=True)
        found.append(values[counts >= _SHARED_BY * len(prompts)])
    return Boilerplate(np.unique(np.concatenate(found)), frozenset(told))


def sampled_prompts(groups: np.ndarray, threads: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The rows to find boilerplate by: of each group the conversations of lowest rank, one prompt each.

    All three have an entry a row. One prompt a conversation, since its turns repeat each other.
    """
    order = np.lexsort((ranks, threads, groups))
    group, thread = groups[order], threads[order]
    first = order[np.r_[True, (group[1:] != group[:-1]) | (thread[1:] != thread[:-1])]] if len(order) else order
    first = first[np.lexsort((ranks[first], groups[first]))]
    group = groups[first]
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]]) if len(first) else np.empty(0, np.int64)
    place = np.arange(len(first)) - np.repeat(starts, np.diff(np.r_[starts, len(first)]))
    return first[place < SAMPLED_CONVERSATIONS]


def prompt_texts(messages: str) -> tuple[str, str]:
    """The text of the system prompt, and that of all other messages, their tool calls and reasoning included.

    ``messages`` is the JSON of schemas.PROMPTS. Tools are left out, as the system prompt they are the application's.
    """
    frame: list[str] = []
    words: list[str] = []
    for message in json.loads(messages):
        (frame if message["role"] in _FRAME else words).extend(_texts(message))
    return "\n".join(filter(None, frame)), "\n".join(filter(None, words))


def opening(messages: str) -> str:
    """What the first user said: two turns of one conversation have it in common, as canonical JSON."""
    first = next((message for message in json.loads(messages) if message["role"] == "user"), {})
    return json.dumps(first.get("content"), ensure_ascii=False, sort_keys=True)


def shingles(text: str, *, seed: int) -> np.ndarray:
    """The hashed pieces of a text: uint32, sorted, each once. A text shorter than a piece is one piece."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), np.dtype("<u4")).astype(np.uint64)
    if len(codes) < NUM_CHARACTERS:
        codes = np.pad(codes, (0, NUM_CHARACTERS - len(codes)))
    last = len(codes) - NUM_CHARACTERS + 1
    multiplier = _multiplier(seed)
    hashes = codes[:last]
    for place in range(1, NUM_CHARACTERS):
        hashes = hashes * multiplier + codes[place : place + last]
    pieces = np.sort((_mixed(hashes) >> _HIGH).astype(np.uint32))
    return pieces[np.r_[True, pieces[1:] != pieces[:-1]]]


def are_in(pieces: np.ndarray, others: np.ndarray) -> np.ndarray:  # bool [pieces]
    """Which of some pieces are among others; both sorted."""
    if not len(others):
        return np.zeros(len(pieces), bool)
    places = np.searchsorted(others, pieces)
    return others[np.minimum(places, len(others) - 1)] == pieces


@lru_cache(maxsize=8)
def _multiplier(seed: int) -> np.uint64:
    """An odd number with bits all over, whatever the seed: hashing is by it."""
    return _mixed(np.array([seed % 2**64], np.uint64) ^ _GOLDEN)[0] | np.uint64(1)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of the value. Source: MurmurHash3's 64-bit finalizer."""
    for factor in _MIX:
        values = (values ^ (values >> _HALF)) * factor
    return values ^ (values >> _HALF)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part.get("text"), str))
    elif isinstance(content, str):
        yield content
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str):
            yield message[name]
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        for name in ("name", "arguments") if isinstance(function, dict) else ():
            value = function.get(name)
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
