"""One part of the cache in the making: its rows' states as an engine hands them over, until they are committed.

Shapes: n positions, L layers, H hidden size.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from pipeline.capture_check import judge, typical_norms, worst_error
from pipeline.config import CaptureConfig
from pipeline.engines import Captured, CaptureRequest, Engine
from pipeline.errors import StageError
from pipeline.quantize import as_float32
from pipeline.schemas import CACHE
from pipeline.shards import Part, commit_part, part_path, write_table
from pipeline.states import StateShards
from pipeline.storage import move_part

logger = logging.getLogger("slipstream")

CHECK_TOKENS = 48
CHECK_OTHERS = 3


@dataclass(frozen=True)
class CachePlan:
    """Where a cache's parts go and how they are made; it travels to the engines."""

    folder: Path
    layer_ids: tuple[int, ...]
    settings: CaptureConfig
    storage: str | None = None
    """Where states files go as soon as their part is committed; None leaves them in the folder."""

    def check(self, engine: Engine, rows: Iterable[Sequence[int]]) -> dict[str, float]:
        """The capture check of this engine on the first of these rows' ids, alone and among the next ones.

        Raises: StageError when the engine's states are not the target's, or there is nothing to check with.
        """
        found = []
        for ids in rows:
            if len(ids) > 1:
                found.append(list(ids))
            if len(found) > CHECK_OTHERS:
                break
        if not found:
            raise StageError("capture: no row to check the engine's states with; run collect on some prompts first")
        first, *others = found
        check = engine.check_capture(first[:CHECK_TOKENS], others)
        judge(check, layer_ids=self.layer_ids, max_error=self.settings.max_check_error)
        logger.info("capture: check passed, largest error %.6f (bf16 noise is about 0.03)", worst_error(check))
        return check

    def begin(self, engine: Engine, index: int, check: Mapping[str, float]) -> "CachePart":
        """A part to hand rows to, and then to commit; close it in any case."""
        return CachePart(self, engine, index, check)

    def is_done(self, index: int) -> bool:
        """Whether a part is committed."""
        return part_path(self.folder, index).exists()


class CachePart:
    """The StatesSink of one part. In every ``check_every``-th part one row is read again alone before the commit."""

    def __init__(self, plan: CachePlan, engine: Engine, index: int, check: Mapping[str, float]):
        self._plan, self._engine, self._index, self._check = plan, engine, index, check
        settings = plan.settings
        self._shards = StateShards(
            plan.folder,
            index,
            num_layers=len(plan.layer_ids),
            hidden_size=engine.info().hidden_size,
            states_format=settings.states_format,
            shard_bytes=settings.shard_bytes,
            typical_norms=typical_norms(check, plan.layer_ids),
        )
        self._sample = _Sample() if index % settings.check_every == 0 else None

    def add(self, row_id: str, words: np.ndarray, *, num_states: int) -> Captured:  # uint16 [n, L, H]
        """Judge one row's states and write them; where they are, or the fault that keeps them out."""
        captured = self._shards.add(row_id, words, num_states=num_states)
        if self._sample and not captured.reason:
            self._sample.offer(row_id, words)
        return captured

    def commit(self, rows: Sequence[Mapping[str, Any]], captured: Iterable[Captured]) -> Part:
        """Commit the states of these responses, found by id, never by their order.

        Raises: StageError when a row that is read again alone has other states.
        """
        sampled, fault = self._sampled(rows)
        table, rejects = cache_rows(rows, (fault if fault and c.row_id == fault.row_id else c for c in captured))
        check = {**self._check, **sampled}
        name = f"rows-{self._index:05d}.parquet"
        files = {**self._shards.files(), name: (len(table), write_table(table))}
        counts = {"rows": len(table), "states": sum(table.column("num_states").to_pylist())}
        part = commit_part(self._plan.folder, self._index, files, rejects=rejects, counts=counts, check=check)
        if self._plan.storage is None:
            return part
        try:
            return move_part(self._plan.folder, self._index, self._plan.storage)
        except StageError as error:  # tried several times; the part is safe here, and the stage's end tries again
            logger.warning("capture: part %d stays on this disk for now: %s", self._index, error)
            return part

    def __enter__(self) -> Self:
        self._shards.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._shards.__exit__(*error)

    def _sampled(self, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Captured | None]:
        """The error of the row that is read again alone, and its fault, if it has one at some of its positions.

        A few positions may differ and be right: in half precision a near-tie sends a token to another expert.

        Raises: StageError when most positions differ.
        """
        if self._sample is None or self._sample.words is None:
            return {}, None
        row_id = self._sample.row_id
        (ids,) = [ids_of(row) for row in rows if row["row_id"] == row_id] or [None]
        if ids is None:  # its reply was refused after all
            return {}, None
        again = _Sample()
        self._engine.prefill([CaptureRequest(row_id, tuple(ids))], states=again)
        errors = np.array([np.inf]) if again.words is None else position_errors(self._sample.words, again.words)
        largest, typical, allowed = float(errors.max()), float(np.median(errors)), self._plan.settings.max_check_error
        if not typical <= allowed:  # also when it is no number
            raise StageError(
                f"capture: row {row_id} of part {self._index}, read again alone, has other states: relative error "
                f"{typical:.4f} at half of its positions (allowed: capture.max_check_error = {allowed}). This part is "
                "not committed. Check vLLM's version and the engine's log; parts before it passed their checks"
            )
        figures = {"sampled_error": typical, "sampled_largest_error": largest}
        if largest <= allowed:
            return figures, None
        detail = {"positions": int((~(errors <= allowed)).sum()), "largest_error": round(largest, 4)}
        logger.warning("capture: row %s, read again alone, differs at some positions: %s", row_id, detail)
        return figures, Captured(row_id, reason="differs_when_read_alone", detail=detail)


class _Sample:
    """A sink that keeps the states of one row: of all that are offered, the one whose id has the smallest hash."""

    def __init__(self) -> None:
        self.row_id, self.words, self._mark = "", None, ""

    def offer(self, row_id: str, words: np.ndarray) -> None:
        mark = hashlib.sha256(row_id.encode()).hexdigest()
        if self.words is None or mark < self._mark:
            self.row_id, self.words, self._mark = row_id, words.copy(), mark

    def add(self, row_id: str, words: np.ndarray, *, num_states: int) -> Captured:
        self.offer(row_id, words)
        return Captured(row_id)


def cache_rows(
    rows: Sequence[Mapping[str, Any]], captured: Iterable[Captured]
) -> tuple[pa.Table, list[dict[str, Any]]]:
    """The cache's rows of these responses, and the records of those that are kept out."""
    by_id = {result.row_id: result for result in captured}
    kept, rejects = [], []
    for row in rows:
        result = by_id.get(row["row_id"]) or Captured(row["row_id"], reason="no_result")
        if result.reason:
            rejects.append({"row_id": row["row_id"], "reason": result.reason, **result.detail})
        else:
            kept.append(_cache_row(row, result))
    return pa.Table.from_pylist(kept, schema=CACHE), rejects


def _cache_row(row: Mapping[str, Any], result: Captured) -> dict[str, Any]:
    ids = ids_of(row)
    return {
        **{name: row[name] for name in ("row_id", "conversation", "split", "slice", "weight")},
        "ids": ids,
        "num_prompt_tokens": len(row["prompt_ids"]),
        "num_states": len(ids) - 1,
        "states_file": result.states_file,
        "states_batch": result.states_batch,
        "digest": result.digest,
    }


def ids_of(row: Mapping[str, Any]) -> list[int]:
    """The ids of a response's prompt and reply."""
    return row["prompt_ids"] + row["response_ids"]


def position_errors(words: np.ndarray, expected: np.ndarray) -> np.ndarray:  # uint16 [n, L, H] -> [n]
    """The relative error of each position, all layers together; one that is infinite where the lengths differ."""
    if words.shape != expected.shape:
        return np.array([np.inf])
    found, expected = (as_float32(w).reshape(len(w), -1) for w in (words, expected))
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
