"""Rows whose states are wanted: handed to a sink as they come, and read again where positions are missing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.engine_calls import Asked, Call
from jobs.engine_sampling import read_params
from pipeline.engines import Captured, StatesSink

# How often a row is run before it is given up because its states have holes.
CAPTURE_TRIES = 2


def capture_args(key: str, *, exact: bool = False) -> dict[str, Any]:
    """What tells the worker to keep a request's states; ``exact``: in float32, with the last layer if it is given."""
    from serving.engine.capture import EXACT_KEY, REQUEST_KEY

    return {REQUEST_KEY: key} | ({EXACT_KEY: True} if exact else {})


class RowStates:
    """The rows of one call, their states' way to the sink, and what became of them."""

    def __init__(self, call: Call, sink: StatesSink, *, exact: bool = False):
        self._call = call
        self._sink = sink
        self._exact = exact
        self._reading: dict[str, tuple[str, tuple[int, ...], int]] = {}  # key → row, its ids, tries so far
        self.captured: dict[str, Captured] = {}

    def read(self, rows: Iterable[tuple[str, Sequence[int]]], *, tries: int = 1) -> None:
        """Run rows whose ids are known through the target."""
        asked = []
        for row_id, ids in rows:
            if len(ids) < 2:
                self.captured[row_id] = Captured(row_id, reason="too_short", detail={"ids": len(ids)})
                continue
            key = self._call.new_key()
            self._reading[key] = (row_id, tuple(ids), tries)
            # The last token is never an input, so the others are the prompt.
            asked.append(Asked(key, ids[:-1], read_params(capture_args(key, exact=self._exact)), captured=True))
        for key, error in self._call.add(asked).items():
            row_id, _, _ = self._reading.pop(key)
            self.captured[row_id] = Captured(row_id, reason="refused", detail={"error": error})

    def was_read(self, key: str, taken: Mapping[str, Any] | None) -> bool:
        """Whether a finished request was one of ``read``; its row is then dealt with."""
        if key not in self._reading:
            return False
        row_id, ids, tries = self._reading.pop(key)
        self.take(row_id, ids, taken, tries=tries)
        return True

    def take(self, row_id: str, ids: Sequence[int], taken: Mapping[str, Any] | None, *, tries: int = 1) -> None:
        """Hand a row's states to the sink; one with holes is run again at once, CAPTURE_TRIES times in all."""
        if taken is not None and taken["states"] is not None:
            self.captured[row_id] = self._sink.add(row_id, taken["states"], num_states=len(ids) - 1)
        elif taken is None:
            detail = {"error": "this engine captures nothing: it was started without target_layer_ids"}
            self.captured[row_id] = Captured(row_id, reason="refused", detail=detail)
        elif tries < CAPTURE_TRIES:
            self.read([(row_id, ids)], tries=tries + 1)
        else:
            detail = {"error": taken["error"], "holes": len(taken["holes"]), "positions": taken["holes"][:8]}
            self.captured[row_id] = Captured(row_id, reason="holes", detail=detail)
