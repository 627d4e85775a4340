"""Which distinct prompts are kept under a budget, and with what probability each was.

Of every stratum the rows of lowest keyed hash are kept (bottom-k). That is a simple random sample of it to everybody
who hasn't got the key, and has three properties that a drawn one lacks: it is the same whatever order the rows come in;
the samples of parts merge into that of the whole; and a larger budget keeps all that a smaller one kept.

A stratum of N rows of which k are kept gives each the inclusion probability k / N, so sums over kept rows divided by it
are unbiased for sums over all rows. k depends on the sizes of strata and on the budgets. Only under a budget of tokens
does it depend on the rows themselves, by where that budget ends: a bias of the order of 1 / k, the price of never
exceeding it.

Train, validation and gate are sampled apart: no row of one set says which rows of another are kept. The budgets are
dealt to the sets by their configured shares, and what one set has too few rows for goes to the others.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import StageError
from pipeline.slices import UNKNOWN, length_of

DIMENSIONS = ("tenant", "route", "language", "length", "acceptance")
Dimension = Literal["tenant", "route", "language", "length", "acceptance"]
Allocation = Literal["proportional", "equal"]

Key = tuple[str, ...]
"""A stratum: its split, then a value for every dimension."""

_ACCEPTED = (0.5, 1.0, 2.0, 4.0)  # accepted drafts a step: upper ends of the buckets
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Stratum:
    """How much there is of a stratum, and its rows of lowest rank, in order."""

    num_rows: int
    num_tokens: int
    ranks: np.ndarray  # uint64 [k], ascending
    rows: np.ndarray  # [k], whatever names a row
    tokens: np.ndarray  # int64 [k]


Strata = Mapping[Key, Stratum]


@dataclass(frozen=True)
class Sample:
    """The kept rows and the probability that each of them had."""

    rows: np.ndarray  # [kept], as they were named
    probabilities: np.ndarray  # float64 [kept], of the sampling alone
    num_tokens: int
    strata: dict[Key, tuple[int, int]]
    """Stratum → rows there were, rows kept: for the report."""
    num_dimensions: int
    """Of those asked for, the first so many tell strata apart: with more there would be strata without a row."""


def stratum_of(
    split: str, slices: str, *, num_tokens: int, accepted_per_step: float | None, by: Sequence[Dimension]
) -> Key:
    """A row's stratum by its slices (canonical JSON), the tokens of its prompt, and the accepted drafts a step of its
    served reply, where they are on record."""
    known = json.loads(slices)
    found = {
        **{name: str(known.get(name, UNKNOWN)) for name in ("tenant", "route", "language")},
        "length": length_of(num_tokens),
        "acceptance": UNKNOWN if accepted_per_step is None else _accepted(accepted_per_step),
    }
    return (split, *(found[name] for name in by))


def estimated_tokens(*texts: str | None) -> int:
    """About how many tokens a prompt has that was never tokenized: one for four bytes of UTF-8."""
    return max(1, math.ceil(sum(len(text.encode(errors="replace")) for text in texts if text) / _BYTES_PER_TOKEN))


def bottom(
    keys: Sequence[Key], ranks: np.ndarray, rows: np.ndarray, tokens: np.ndarray, *, limit: int | None
) -> dict[Key, Stratum]:
    """The strata of some rows, each with no more than ``limit`` of them: what one part of the data has to tell.

    ``limit`` is the budget of prompts: no stratum can have more of it.
    """
    places: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    found = {}
    for key, here in places.items():
        every = np.array(here)
        lowest = every[np.argsort(ranks[every], kind="stable")][:limit]
        found[key] = Stratum(len(every), int(tokens[every].sum()), ranks[lowest], rows[lowest], tokens[lowest])
    return found


def merged(parts: Iterable[Strata], *, limit: int | None) -> dict[Key, Stratum]:
    """The strata of all parts together: those of all rows, had they been one part."""
    gathered: dict[Key, list[Stratum]] = {}
    for part in parts:
        for key, stratum in part.items():
            gathered.setdefault(key, []).append(stratum)
    return {key: _merge(found, limit) for key, found in gathered.items()}


def draw(
    strata: Strata,
    *,
    shares: Mapping[str, float],
    allocation: Allocation,
    max_prompts: int | None,
    max_prompt_tokens: int | None,
) -> Sample:
    """The rows to keep. ``shares``: split → its share of the budgets.

    Proportional: every stratum keeps the same share of its rows, one at least. Equal: every stratum keeps as many as
    any other, or all it has. Where the budgets are too small for a row of every stratum, the last dimensions don't
    count.

    Raises: StageError when the token budget is smaller than the first prompt.
    """
    strata, num_dimensions = _affordable(strata, shares, max_prompts, max_prompt_tokens)
    keys = sorted(strata)
    stratum = np.repeat(np.arange(len(keys)), [len(strata[key].rows) for key in keys])
    tokens = np.concatenate([np.empty(0, np.int64), *(strata[key].tokens for key in keys)])
    order = _seats(keys, strata, stratum, shares, allocation)
    fits = np.ones(len(order), bool)
    if max_prompt_tokens is not None:
        fits &= np.cumsum(tokens[order]) <= max_prompt_tokens
    kept = order[: min(int(fits.sum()), max_prompts if max_prompts is not None else len(order))]
    if len(order) and not len(kept):
        raise StageError(
            f"collect: no prompt fits into collect.max_prompts = {max_prompts} and collect.max_prompt_tokens = "
            f"{max_prompt_tokens}; the first one has {int(tokens[order[0]])} tokens. Raise the budget"
        )
    kept = np.sort(kept)
    taken = np.bincount(stratum[kept], minlength=len(keys))
    sizes = np.array([strata[key].num_rows for key in keys], np.int64)
    rows = np.concatenate([strata[key].rows for key in keys])[kept] if keys else np.empty(0, np.int64)
    return Sample(
        rows=rows,
        probabilities=(taken / sizes)[stratum[kept]] if keys else np.empty(0),
        num_tokens=int(tokens[kept].sum()),
        strata={key: (strata[key].num_rows, int(count)) for key, count in zip(keys, taken, strict=True)},
        num_dimensions=num_dimensions,
    )


def inclusion_probability(weight: int, served: float, sampled: float) -> float:
    """The one probability by which a kept row's weight is to be divided, to count the requests that were served.

    ``weight``: the records it stands for; ``served``: the sum over them of 1 / the tap's own probability; ``sampled``:
    the probability of the sampling here. With one tap probability for all records it is the product of the two.
    """
    return sampled * weight / served


def _seats(
    keys: Sequence[Key], strata: Strata, stratum: np.ndarray, shares: Mapping[str, float], allocation: Allocation
) -> np.ndarray:
    """All rows in the order in which a growing budget takes them: a smaller one keeps the beginning.

    Rows lie stratum by stratum, by rank. Within a split the order is Webster's (the next row goes to the stratum that
    is furthest behind its share), after a first row for every stratum; and so it is among the splits.
    """
    first_of = np.searchsorted(stratum, np.arange(len(keys)))
    place = np.arange(len(stratum)) - first_of[stratum]
    sizes = np.array([strata[key].num_rows for key in keys], np.int64)[stratum]
    behind = (place + 0.5) / sizes if allocation == "proportional" else place.astype(float)
    within = np.lexsort((stratum, behind, place > 0))
    splits = sorted({key[0] for key in keys})
    split = np.array([splits.index(key[0]) for key in keys], np.int64)[stratum]
    due = np.empty(len(stratum))
    for index, name in enumerate(splits):
        mine = within[split[within] == index]
        due[mine] = (np.arange(len(mine)) + 0.5) / max(shares.get(name, 0.0), 1e-9)
    return np.lexsort((split, due))


def _affordable(
    strata: Strata, shares: Mapping[str, float], max_prompts: int | None, max_prompt_tokens: int | None
) -> tuple[Strata, int]:
    """The strata by as many dimensions as the budgets have a row for in every stratum, on average of tokens."""
    num_rows = sum(stratum.num_rows for stratum in strata.values())
    num_tokens = sum(stratum.num_tokens for stratum in strata.values())
    limits = [] if max_prompts is None else [float(max_prompts)]
    if max_prompt_tokens is not None and num_tokens:
        limits.append(max_prompt_tokens * num_rows / num_tokens)
    seats = min(limits, default=math.inf)
    num_dimensions = max((len(key) for key in strata), default=1) - 1
    while num_dimensions:
        in_split = [key[0] for key in strata]
        if all(in_split.count(split) <= seats * shares.get(split, 0.0) for split in set(in_split)):
            break
        num_dimensions -= 1
        strata = merged(({key[: num_dimensions + 1]: one} for key, one in strata.items()), limit=max_prompts)
    return strata, num_dimensions


def _merge(found: Sequence[Stratum], limit: int | None) -> Stratum:
    ranks = np.concatenate([one.ranks for one in found])
    lowest = np.argsort(ranks, kind="stable")[:limit]
    return Stratum(
        num_rows=sum(one.num_rows for one in found),
        num_tokens=sum(one.num_tokens for one in found),
        ranks=ranks[lowest],
        rows=np.concatenate([one.rows for one in found])[lowest],
        tokens=np.concatenate([one.tokens for one in found])[lowest],
    )


def _accepted(accepted_per_step: float) -> str:
    return next((f"≤{end:g}" for end in _ACCEPTED if accepted_per_step <= end), f">{_ACCEPTED[-1]:g}")
