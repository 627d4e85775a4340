"""What states files cost: written against plain files of the same bytes, read against a copy in memory."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipeline.states import StatesFile, StatesWriter, find_fault

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


def copied(rows: list[np.ndarray], path: Path, *, pairs: int) -> dict[str, float]:
    """Seconds of a copy in memory over those of a copy out of the mapped file into torch; and the mapped read alone."""
    _write_states(path, rows)
    source = [torch.from_numpy(words.view(np.int16)) for words in rows]
    into = torch.zeros(len(source), *source[0].shape, dtype=torch.int16)
    ratios, mapped = [], []

    def from_memory() -> None:
        for number, words in enumerate(source):
            into[number].copy_(words)

    def from_file() -> None:
        file = StatesFile(path)
        for batch in range(len(file)):
            into[batch].copy_(torch.from_numpy(file.words(batch).view(np.int16)))

    def without_copy() -> None:
        file = StatesFile(path)
        for batch in range(len(file)):
            torch.from_numpy(file.words(batch).view(np.int16))

    from_file()  # into the page cache
    for number in range(pairs):
        order = (from_memory, from_file) if number % 2 else (from_file, from_memory)
        taken = {f.__name__: _seconds(f) for f in order}
        ratios.append(taken["from_memory"] / taken["from_file"])
        mapped.append(_seconds(without_copy))
    num_bytes = sum(words.nbytes for words in rows)
    return {
        "ratio": statistics.median(ratios),
        "spread": max(ratios) - min(ratios),
        "mapped_ms": statistics.median(mapped) * 1e3,
        "mb": num_bytes / 1e6,
    }


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
