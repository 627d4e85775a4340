"""A scripted engine behind pipeline.engines: replies and states as a test dictates, in any order."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from pipeline.engines import Captured, CaptureRequest, EngineInfo, GenerateRequest, PartDone, Reply, StatesSink, Work
from pipeline.render import Renderer

HIDDEN = 4


class ScriptedEngines:
    """One engine in this process, and the pool of it: it does the parts in order, and its results are in reverse.

    ``reply(request)`` makes a reply or None; ``states(row_id, ids)`` makes a row's words, or names the reason why there
    are none. ``in_pass(row_id)`` says whether the states of a reply are taken in the pass, or have holes.
    """

    def __init__(
        self,
        reply: Callable[[GenerateRequest], Reply | None] | None = None,
        states: Callable[[str, Sequence[int]], np.ndarray] | None = None,
        *,
        check: dict[str, float] | None = None,
        in_pass: Callable[[str], bool] = lambda row_id: True,
        model: Any = None,
    ):
        self._reply, self._states, self._check, self._in_pass = reply, states, check or {}, in_pass
        self._renderer = Renderer(model) if model else None
        self.requests: list[Any] = []
        """Every GenerateRequest and CaptureRequest, as they came."""
        self.checked: list[list[int]] = []
        """The prompts of capture checks."""

    def run(self, work: Work, parts: Sequence[int]) -> Generator[PartDone, None, None]:
        begun = work.begin(self) if parts else None
        for index in parts:
            yield work.part(self, index, begun)

    def info(self) -> EngineInfo:
        return EngineInfo(2048, 512, HIDDEN, "float32", 1, 0.0, "0")

    def generate(
        self, requests: Sequence[GenerateRequest], *, states: StatesSink | None = None
    ) -> tuple[list[Reply], list[Captured]]:
        self.requests += requests
        replies = [reply for request in requests if (reply := self._reply(request)) is not None]
        captured = []
        prompts = {request.row_id: request.prompt_ids for request in requests}
        for reply in replies if states is not None else []:
            if not reply.ids:
                continue
            if self._in_pass(reply.row_id):
                captured.append(self._take(reply.row_id, (*prompts[reply.row_id], *reply.ids), states))
            else:
                captured.append(Captured(reply.row_id, reason="holes"))
        return replies[::-1], captured

    def prefill(self, requests: Sequence[CaptureRequest], *, states: StatesSink) -> list[Captured]:
        self.requests += requests
        return [self._take(request.row_id, request.ids, states) for request in requests][::-1]

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        self.checked.append(list(ids))
        return self._check

    def rendered_ids(self, messages: str, *, tools: str | None, template_args: str) -> list[int]:
        return self._renderer.row_ids({"messages": messages, "tools": tools, "template_args": template_args})

    def asked(self, kind: type) -> list[str]:
        """The row ids of the requests of one kind, as they came."""
        return [request.row_id for request in self.requests if isinstance(request, kind)]

    def _take(self, row_id: str, ids: Sequence[int], states: StatesSink) -> Captured:
        return states.add(row_id, self._states(row_id, ids), num_states=len(ids) - 1)
