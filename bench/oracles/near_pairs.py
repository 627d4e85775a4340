"""Are the near-duplicates found that an exact comparison of all pairs finds, and what does finding them cost?

The oracle cuts plain strings into sets of five characters, counts what every two records share with a sparse matrix,
and knows nothing of hashes, signatures or bands.
"""

import json
import random
import resource
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.figures import Figure, at_least, shown
from pipeline.near_duplicates import near_duplicates, near_pairs
from pipeline.shingles import Boilerplate, find_boilerplate, sampled_prompts
from pipeline.sketches import NUM_PERM, Sketches, Sketching, sketch, sketch_batch, write_sketches
from pipeline.split import SplitKey

_KEY = SplitKey(b"the key of a bench, long enough")
_KINDS = ("latin", "han", "code")


def records(count: int, seed: int) -> list[str]:
    """Made-up texts, and altered copies of them at all similarities; a third each in words, Han and code-like lines."""
    dice = random.Random(seed)
    words = {
        "latin": ["".join(dice.choices("abcdefghijklmnopqrstuvwxyzäéß", k=dice.randint(2, 10))) for _ in range(4000)],
        "han": ["".join(chr(dice.randrange(0x4E00, 0x8E00)) for _ in range(dice.randint(1, 3))) for _ in range(4000)],
        "code": [f"{''.join(dice.choices('abcdxyz_', k=6))}({dice.randrange(999)});\n" for _ in range(4000)],
    }
    texts: list[str] = []
    while len(texts) < count:
        kind = dice.choice(_KINDS)
        first = dice.choices(words[kind], k=round(dice.lognormvariate(3.2, 0.8)) + 1)
        separator = " " if kind == "latin" else ""
        texts.append(separator.join(first))
        for _ in range(dice.choice([0, 0, 1, 3, 6])):
            share = dice.random() ** 2 * 0.6
            copy = [dice.choice(words[kind]) if dice.random() < share else word for word in first]
            if dice.random() < 0.3:  # said again with more around it
                copy = [*copy, *dice.choices(words[kind], k=dice.randint(1, 6))]
            texts.append(separator.join(copy))
    texts = texts[:count]
    dice.shuffle(texts)
    return texts


def exact_pairs(texts: Sequence[str], similarity: float) -> dict[tuple[int, int], float]:
    """All pairs of at least this Jaccard similarity, by sets of five characters, and how similar they are."""
    from scipy import sparse

    sets = [_five(text) for text in texts]
    columns = {piece: column for column, piece in enumerate(sorted(set().union(*sets)))}
    indices = [columns[piece] for pieces in sets for piece in pieces]
    offsets = np.cumsum([0, *map(len, sets)])
    matrix = sparse.csr_array((np.ones(len(indices), np.int32), indices, offsets), shape=(len(sets), len(columns)))
    shared = (matrix @ matrix.T).tocoo()
    found = {}
    for one, other, both in zip(shared.row.tolist(), shared.col.tolist(), shared.data.tolist(), strict=True):
        if one < other:
            value = both / (len(sets[one]) + len(sets[other]) - both)
            if value >= similarity:
                found[one, other] = value
    return found


def found_pairs(texts: Sequence[str], similarity: float, folder: Path) -> set[tuple[int, int]]:
    """The pairs that the collector's search finds among as many single-turn prompts."""
    sketches = sketches_of(texts, folder)
    pairs = near_pairs(sketches, similarity=similarity, scratch=folder)
    return {(min(pair), max(pair)) for pair in pairs}


def sketches_of(texts: Sequence[str], folder: Path, *, groups: Sequence[str] = (), per_file: int = 2000) -> Sketches:
    """The sketches of texts as prompts of users of their own; with ``groups``, without what each group shares."""
    rows = [
        {
            "row_id": f"row {number}",
            "conversation": f"user {number}",
            "split": "train",
            "group": groups[number] if groups else "",
            "messages": json.dumps([{"role": "user", "content": text}]),
        }
        for number, text in enumerate(texts)
    ]
    plain = Sketching(_KEY, Boilerplate())
    sketching = Sketching(_KEY, _boilerplate(rows, plain.seed)) if groups else plain
    paths = []
    for first in range(0, len(rows), per_file):
        paths.append(folder / f"sketches-{first}.arrow")
        write_sketches(paths[-1], sketch(rows[first : first + per_file], sketching))
    return Sketches(paths)


def near_duplicate_figures(*, count: int = 5000, similarity: float = 0.8, seed: int = 0) -> dict[str, Figure]:
    """Recall and precision of pairs, overall and of those well above the limit; and the same under templates."""
    texts = records(count, seed)
    truth = exact_pairs(texts, similarity)
    with tempfile.TemporaryDirectory() as folder:
        found = found_pairs(texts, similarity, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        templated = _templated(texts, similarity, truth, Path(folder))
    at_limit = [pair for pair, value in truth.items() if value < similarity + 0.05]
    above = [pair for pair, value in truth.items() if value >= similarity + 0.05]
    on = f"{count} records, {len(truth)} near pairs"
    return {
        "near_recall": at_least(_share(truth, found), 0.95, n=len(truth), on=on),
        "near_precision": at_least(_share(found, truth), 0.95, n=len(found), on=on),
        "near_recall_at_the_limit": at_least(_share(at_limit, found), 0.95, n=len(at_limit)),
        "near_recall_above_the_limit": at_least(_share(above, found), 0.99, n=len(above)),
        **templated,
    }


def cost_figures(counts: Sequence[int] = (100_000, 1_000_000), *, similarity: float = 0.8) -> dict[str, Figure]:
    """Seconds and peak memory of the search among made-up sketches: 30% have near copies, splits as configured.

    Each count runs in a process of its own, so that its peak is its own.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    figures: dict[str, Figure] = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                paths = pool.submit(_write_made_up, count, Path(folder)).result()
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                seconds, peak, counted = pool.submit(_search, paths, similarity, Path(folder)).result()
        figures[f"near_us_a_row_{count}"] = shown(seconds / count * 1e6, seconds=round(seconds, 1), **counted)
        figures[f"near_peak_gib_{count}"] = shown(peak / 2**30)
    return figures


def _search(paths: list[Path], similarity: float, folder: Path) -> tuple[float, int, dict[str, int]]:
    started = time.perf_counter()
    found = near_duplicates(Sketches(paths), similarity=similarity, scratch=folder)
    seconds = time.perf_counter() - started
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, found.counts()


def _write_made_up(count: int, folder: Path) -> list[Path]:
    """Files of sketches of about 400 random pieces each; three in ten are altered copies of an earlier one."""
    dice = np.random.default_rng(1)
    paths = []
    for first in range(0, count, 10_000):
        size = min(10_000, count - first)
        pieces: list[np.ndarray] = []
        for number in range(size):
            fresh = dice.integers(0, 2**32, int(dice.integers(100, 700)), dtype=np.uint32)
            if number and dice.random() < 0.3:
                copied = pieces[int(dice.integers(0, number))]
                fresh = np.concatenate([copied, fresh[: int(len(copied) * dice.random() * 0.5)]])
            pieces.append(np.unique(fresh))
        columns = {
            "row_id": [f"{first + number:032x}" for number in range(size)],
            "rank": dice.integers(0, 2**64, size, dtype=np.uint64),
            "thread": dice.integers(0, 2**64, size, dtype=np.uint64),
            "split": dice.choice(3, size, p=[0.65, 0.1, 0.25]).astype(np.uint8),
        }
        paths.append(folder / f"made-up-{first}.arrow")
        write_sketches(paths[-1], sketch_batch(columns, _signatures(pieces), pieces))
    return paths


def _signatures(pieces: list[np.ndarray]) -> np.ndarray:
    from pipeline.sketches import signatures

    signed = signatures(pieces)
    assert signed.shape == (len(pieces), NUM_PERM)
    return signed


def _templated(
    texts: Sequence[str], similarity: float, truth: dict[tuple[int, int], float], folder: Path
) -> dict[str, Figure]:
    """The same texts, each wrapped in its route's long template: near is what was near without it."""
    templates = ["".join(_frame(route)) for route in range(4)]
    routes = [number % 4 for number in range(len(texts))]
    wrapped = [templates[route] + text for route, text in zip(routes, texts, strict=True)]
    sketches = sketches_of(wrapped, folder, groups=[f"route {route}" for route in routes])
    found = {(min(p), max(p)) for p in near_pairs(sketches, similarity=similarity, scratch=folder)}
    long = {n for n, text in enumerate(texts) if len(_five(text)) >= 64}  # of shorter ones the template's ends matter
    near = {pair for pair, value in truth.items() if set(pair) <= long and value >= similarity + 0.05}
    far_ones = {pair for pair in found if set(pair) <= long}
    clear = exact_pairs(texts, similarity - 0.1)
    return {
        "near_recall_under_templates": at_least(_share(near, found), 0.95, n=len(near)),
        "near_precision_under_templates": at_least(_share(far_ones, clear), 0.95, n=len(far_ones)),
    }


def _frame(route: int) -> Iterator[str]:
    dice = random.Random(1000 + route)
    for _ in range(300):
        yield "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 10))) + " "


def _boilerplate(rows: Sequence[dict[str, str]], seed: int) -> Boilerplate:
    """As the collector finds it, by rows in an order of their own."""
    groups = np.array([row["group"] for row in rows])
    ranks = np.random.default_rng(2).permutation(len(rows))
    samples: dict[str, list[str]] = {}
    for row in sampled_prompts(groups, np.arange(len(rows)), ranks).tolist():
        samples.setdefault(rows[row]["group"], []).append(rows[row]["messages"])
    return find_boilerplate(samples, seed=seed)


def _five(text: str) -> set[str]:
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return {plain[start : start + 5] for start in range(max(1, len(plain) - 4))}


def _share(these: object, those: object) -> float:
    mine, theirs = set(these), set(those)  # type: ignore[call-overload]
    return len(mine & theirs) / len(mine) if mine else float("nan")
