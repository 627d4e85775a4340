"""One vLLM engine, shared by several callers at once: whoever waits steps it, and hands others what they asked for.

So the next part's requests fill the batch while the last part's tail is still running.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from pipeline.errors import StageError


@dataclass(frozen=True)
class Finished:
    """A request that the engine is done with."""

    key: str
    completion: Any
    """vLLM's CompletionOutput."""
    taken: Mapping[str, Any] | None
    """What the worker kept of a captured request: ``states``, ``holes``, ``error`` (serving/engine/capture.py)."""


@dataclass(frozen=True)
class Asked:
    """A request on its way to the engine."""

    key: str
    prompt_ids: Sequence[int]
    params: Any
    """vLLM's SamplingParams."""
    captured: bool = False


class FairLock:
    """A lock that is given to whoever has waited longest: one caller's steps cannot keep another out."""

    def __init__(self):
        self._guard = threading.Lock()
        self._queue: deque[threading.Event] = deque()

    def __enter__(self) -> Self:
        turn = threading.Event()
        with self._guard:
            self._queue.append(turn)
            if self._queue[0] is turn:
                turn.set()
        turn.wait()
        return self

    def __exit__(self, *error: object) -> None:
        with self._guard:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()


class SharedEngine:
    """vLLM's engine behind a lock."""

    def __init__(self, llm: Any):
        self._llm = llm
        self._turn = FairLock()
        self._numbers = itertools.count()
        self._owners: dict[str, tuple[Call, bool]] = {}  # key → whose it is, and whether it is captured

    @contextmanager
    def call(self) -> Iterator["Call"]:
        """One caller's requests. What it leaves unfinished is aborted, and its states are forgotten."""
        call = Call(self)
        try:
            yield call
        finally:
            if call.running:
                self._abort(call)

    def new_key(self) -> str:
        """A request id that this engine never had."""
        return f"slipstream-{next(self._numbers)}"

    def ask_worker(self, method: str, *args: Any) -> Any:
        """The answer of the one rank that has one (the others answer None)."""
        with self._turn:
            return self._ask_worker(method, *args)

    def add(self, call: "Call", requests: Sequence[Asked]) -> dict[str, str]:
        """Hand requests to the engine; what is wrong with those that it refuses, by key."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        refused = {}
        with self._turn:
            for request in requests:
                try:
                    prompt = tokens_input(list(request.prompt_ids))
                    self._llm.llm_engine.add_request(request.key, prompt, request.params)
                except (VLLMClientError, ValueError, TypeError) as error:
                    refused[request.key] = f"{type(error).__name__}: {error}"[:300]
                else:
                    self._owners[request.key] = (call, request.captured)
                    call.running.add(request.key)
        return refused

    def step_for(self, call: "Call") -> None:
        """One step of the engine, unless this caller's turn came with something finished already.

        Raises: StageError when the engine has lost this caller's requests.
        """
        with self._turn:
            if call.finished:
                return
            if not self._llm.llm_engine.has_unfinished_requests():
                raise StageError(f"the engine lost {len(call.running)} requests; nothing of them is kept, run it again")
            for output in self._llm.llm_engine.step():
                if output.finished:
                    self._deliver(output)

    def _deliver(self, output: Any) -> None:
        if output.request_id not in self._owners:
            return
        call, captured = self._owners.pop(output.request_id)
        completion, taken = output.outputs[0], None
        if captured:
            # The last token is never an input, so it has no states.
            num_states = len(output.prompt_token_ids) + len(completion.token_ids) - 1
            taken = self._ask_worker("take_states", output.request_id, num_states)
        # In this order: its caller looks at both without the lock, and must not find neither.
        call.finished.append(Finished(output.request_id, completion, taken))
        call.running.discard(output.request_id)

    def _abort(self, call: "Call") -> None:
        with self._turn:
            self._llm.llm_engine.abort_request(list(call.running))
            for key in call.running:
                if self._owners.pop(key)[1]:
                    self._ask_worker("take_states", key, 0)
            call.running.clear()

    def _ask_worker(self, method: str, *args: Any) -> Any:
        answers = self._llm.collective_rpc(method, args=args)
        return next((answer for answer in answers if answer is not None), None)


class Call:
    """One caller's requests among everybody's."""

    def __init__(self, shared: SharedEngine):
        self._shared = shared
        self.running: set[str] = set()
        self.finished: deque[Finished] = deque()

    def new_key(self) -> str:
        """A request id that this engine never had."""
        return self._shared.new_key()

    def add(self, requests: Sequence[Asked]) -> dict[str, str]:
        """Hand requests to the engine; what is wrong with those that it refuses, by key."""
        return self._shared.add(self, requests)

    def results(self) -> Iterator[Finished]:
        """This caller's requests as they finish, those among them that are added meanwhile."""
        while self.running or self.finished:
            if self.finished:
                yield self.finished.popleft()
            else:
                self._shared.step_for(self)
