"""Scripted engines behind pipeline.engines.Engines: replies and states as a test dictates, in any order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines import Captured, CaptureRequest, EngineInfo, GenerateRequest, Reply
from pipeline.states import StatesWriter, find_fault, last_state_digest

HIDDEN = 4


class ScriptedEngines:
    """``reply(request)`` and ``states(request)`` decide; results come back in reverse order."""

    def __init__(
        self,
        reply: Callable[[GenerateRequest], Reply | None] | None = None,
        states: Callable[[CaptureRequest], np.ndarray] | None = None,
        check: dict[str, float] | None = None,
    ):
        self._reply, self._states, self._check = reply, states, check or {}
        self.requests: list[Any] = []

    def info(self) -> EngineInfo:
        return EngineInfo(2048, 512, HIDDEN, "float32", 1, 0.0, "0")

    def generate(self, batches: Iterable[tuple[int, Sequence[GenerateRequest]]]) -> Iterator[tuple[int, list[Reply]]]:
        for index, batch in batches:
            self.requests += batch
            replies = [self._reply(request) for request in batch]
            yield index, [reply for reply in reversed(replies) if reply is not None]

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        return self._check

    def capture(
        self, batches: Iterable[tuple[int, Sequence[CaptureRequest], Path]], typical_norms: Sequence[float]
    ) -> Iterator[tuple[int, list[Captured]]]:
        for index, batch, path in batches:
            self.requests += batch
            results = []
            with StatesWriter(path, num_layers=len(typical_norms), hidden_size=HIDDEN) as writer:
                for request in batch:
                    words = self._states(request)
                    num_states = len(request.ids) - 1
                    if fault := find_fault(words, num_states=num_states, typical_norms=typical_norms):
                        results.append(Captured(request.row_id, reason=fault.reason, detail=fault.detail))
                    else:
                        batch_number = writer.append(words)
                        results.append(Captured(request.row_id, batch_number, last_state_digest(words)))
            yield index, results[::-1]
