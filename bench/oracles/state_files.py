"""What states files cost: written against plain files of the same bytes, read against a copy in memory."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from drafter.dataset import read_part
from pipeline.faults import find_fault
from pipeline.schemas import CACHE
from pipeline.shards import commit_part, write_table
from pipeline.states import StateShards, StatesWriter

LAYERS, HIDDEN = 5, 576


def rows_of_words(num_rows: int, num_positions: int) -> list[np.ndarray]:
    """States of made-up rows: bf16 words of normal numbers, uint16 [n, L, H]."""
    values = np.random.default_rng(0).standard_normal((num_positions, LAYERS, HIDDEN), dtype=np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    return [np.roll(words, number, axis=0) for number in range(num_rows)]


def written(rows: list[np.ndarray], folder: Path, *, pairs: int) -> dict[str, float]:
    """Seconds of a plain write over those of a states file, hashing left out; rates in MB/s; each made durable."""
    num_bytes = sum(words.nbytes for words in rows)
    ratios, hashing = [], []
    for number in range(pairs):
        taken = {}
        for name in ("plain", "states") if number % 2 else ("states", "plain"):
            path = folder / f"{name}-{number}"
            started = time.perf_counter()
            hash_seconds = _write_plain(path, rows) if name == "plain" else _write_states(path, rows)
            taken[name] = time.perf_counter() - started - hash_seconds
            hashing += [hash_seconds] if name == "states" else []
            path.unlink()
        ratios.append(taken["plain"] / taken["states"])
    judging = _seconds(
        lambda: [find_fault(words, num_states=len(words), typical_norms=[1.0] * LAYERS) for words in rows]
    )
    rate = num_bytes / 1e6
    return {
        "ratio": statistics.median(ratios),
        "spread": max(ratios) - min(ratios),
        "hash_mb_per_s": rate / statistics.median(hashing),
        "judge_mb_per_s": rate / judging,
    }


def copied(rows: list[np.ndarray], folder: Path, *, pairs: int) -> dict[str, float]:
    """Seconds of a copy in memory over those of the training reader's copy into torch; and what a mapped read takes.

    The reader's files are open and mapped, as from the second step on; ``fresh_ratio`` has it open everything anew.
    """
    _commit(folder, rows)
    source = [torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).flatten(1) for words in rows]
    into = torch.zeros(len(source), *source[0].shape, dtype=torch.bfloat16)
    cached = read_part(folder, 0)

    def from_memory() -> None:
        for number, states in enumerate(source):
            into[number].copy_(states)

    def from_cache() -> None:
        for number, row in enumerate(cached):
            row.states.copy_into(into[number])

    def fresh() -> None:
        for number, row in enumerate(read_part(folder, 0)):
            row.states.copy_into(into[number])

    def mapped() -> None:
        for row in read_part(folder, 0):
            row.states.mapped()

    from_cache()
    if not all(torch.equal(found, expected) for found, expected in zip(into, source, strict=True)):
        raise AssertionError("what was read is not what was written")
    taken: dict[str, list[float]] = {f.__name__: [] for f in (from_memory, from_cache, fresh, mapped)}
    for number in range(pairs):
        order = (from_memory, from_cache, fresh, mapped)
        for f in order if number % 2 else order[::-1]:
            taken[f.__name__].append(_seconds(f))
    ratios = [memory / cache for memory, cache in zip(taken["from_memory"], taken["from_cache"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "spread": max(ratios) - min(ratios),
        "fresh_ratio": statistics.median(m / f for m, f in zip(taken["from_memory"], taken["fresh"], strict=True)),
        "mapped_ms": statistics.median(taken["mapped"]) * 1e3,
        "mb": sum(words.nbytes for words in rows) / 1e6,
    }


def _commit(folder: Path, rows: list[np.ndarray]) -> None:
    """The rows as a committed part of a cache."""
    table = []
    with StateShards(folder, 0, num_layers=LAYERS, hidden_size=HIDDEN) as shards:
        for number, words in enumerate(rows):
            kept = shards.add(f"row-{number}", words, num_states=len(words))
            table.append(
                {
                    **dict.fromkeys(("conversation", "split", "slice"), "bench"),
                    "row_id": kept.row_id,
                    "weight": 1,
                    "ids": [0] * (len(words) + 1),
                    "num_prompt_tokens": 1,
                    "num_states": len(words),
                    "states_file": kept.states_file,
                    "states_batch": kept.states_batch,
                    "digest": kept.digest,
                }
            )
        written_rows = pa.Table.from_pylist(table, schema=CACHE)
        commit_part(folder, 0, {**shards.files(), "rows-00000.parquet": (len(table), write_table(written_rows))})


def _write_plain(path: Path, rows: list[np.ndarray]) -> float:
    with open(path, "wb", buffering=0) as file:
        for words in rows:
            file.write(words)
        os.fsync(file.fileno())
    return 0.0


def _write_states(path: Path, rows: list[np.ndarray]) -> float:
    """Seconds that hashing took."""
    writer = StatesWriter(path, num_layers=LAYERS, hidden_size=HIDDEN)
    for words in rows:
        writer.append(writer.batch(words))
    writer.close()
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return writer.hash_seconds


def _seconds(f: Callable[[], object]) -> float:
    started = time.perf_counter()
    f()
    return time.perf_counter() - started
