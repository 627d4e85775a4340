"""The states of requests in flight, in host memory, by position.

On a GPU the engine's stream is never waited for: a forward pass's states are gathered into a buffer of their own on
that stream (a graph's replay overwrites the originals), another stream copies them into pinned memory, and they are
dealt out to their requests once an event says that the copy is over. (That half has not been run on a GPU yet.) On a
CPU they are dealt out at once.

Shapes: T rows of a forward pass, L layers, H hidden size, n positions.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from serving.engine.runners import ForwardPass


@dataclass
class Row:
    """One request's states so far."""

    capture_id: str
    capacity: int
    """Positions that the request can ever emit; drafts beyond are never part of a reply."""
    num_layers: int | None
    """So many of the engine's layers; None: every one, and in float32, for the capture check."""
    words: torch.Tensor | None = None  # [capacity, L, H]; pages that nobody writes cost nothing
    written: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # [capacity]

    @property
    def exact(self) -> bool:
        """In the engine's own precision, not rounded to bf16."""
        return self.num_layers is None

    def write(self, states: torch.Tensor, first: int) -> None:  # [n, L, H], from position ``first`` on
        """Keep them. In one forward pass a request's positions follow each other; the last write of one stands."""
        states = states[:, : self.num_layers]
        if self.words is None:
            dtype = torch.float32 if self.exact else torch.bfloat16
            self.words = torch.empty((self.capacity, *states.shape[1:]), dtype=dtype)
            self.written = np.zeros(self.capacity, bool)
        end = min(first + len(states), self.capacity)
        if first < end:
            self.words[first:end] = states[: end - first]
            self.written[first:end] = True


@dataclass
class _Copy:
    """A forward pass's states on their way to the host."""

    spans: list[tuple[Row, int, int]]  # whose rows start and end where
    states: torch.Tensor  # [T, L, H], on the host
    positions: torch.Tensor  # [T], on the host
    device: tuple[torch.Tensor, ...] = ()
    """What is copied; held until the copy is over, so that its memory is not given to another pass."""
    event: Any = None

    def settle(self) -> None:
        """Deal the states out."""
        positions = self.positions.numpy()
        for row, start, end in self.spans:
            row.write(self.states[start:end], int(positions[start]))


class KeptStates:
    """Every captured request's states. Not thread-safe: the engine's worker calls it."""

    def __init__(self, num_layers: int):
        self._num_layers = num_layers
        self._requests: dict[str, Row] = {}  # by the engine's own request id, while it may still run
        self._rows: dict[str, Row] = {}  # by the caller's id, until taken
        self._copies: deque[_Copy] = deque()
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._rows)

    def want(self, request_id: str, capture_id: str, *, capacity: int, exact: bool) -> None:
        """Keep this request's states from now on. Once more for one that was preempted changes nothing."""
        row = self._rows.setdefault(capture_id, Row(capture_id, capacity, None if exact else self._num_layers))
        self._requests[request_id] = row

    def finish(self, request_id: str) -> None:
        """Expect nothing more of this request."""
        self._requests.pop(request_id, None)

    def keep(self, found: ForwardPass) -> None:
        """Take over what this forward pass computed for the requests that are wanted."""
        spans = []
        for index, request_id in enumerate(found.request_ids):
            row, start, end = self._requests.get(request_id), int(found.starts[index]), int(found.starts[index + 1])
            if row is not None and start < end:
                spans.append((row, start, end))
        if spans:
            exact = any(row.exact for row, _, _ in spans)
            layers = found.states if exact else found.states[: self._num_layers]
            self._copies.append(self._copy(spans, layers, found.positions, exact))
        while self._copies and (self._copies[0].event is None or self._copies[0].event.query()):
            self._copies.popleft().settle()

    def take(self, capture_id: str, num_states: int) -> tuple[np.ndarray | None, list[int]]:
        """A row's states and the positions that were never computed; then there are none. The row is forgotten.

        uint16 [num_states, L, H], raw bf16 words; float32 for an exact row.
        """
        while self._copies:
            copy = self._copies.popleft()
            if copy.event is not None:
                copy.event.synchronize()
            copy.settle()
        self._requests = {name: row for name, row in self._requests.items() if row.capture_id != capture_id}
        row = self._rows.pop(capture_id, None)
        if row is None or row.words is None:
            return None, list(range(num_states))
        holes = np.flatnonzero(~row.written[:num_states]).tolist()
        holes += range(len(row.written), num_states)
        if holes:
            return None, holes
        words = row.words[:num_states]
        return (words.numpy() if row.exact else words.view(torch.int16).numpy().view(np.uint16)), []

    def drop(self) -> int:
        """Forget every request; the count of those that nobody took."""
        dropped = len(self._rows)
        self._requests.clear()
        self._rows.clear()
        self._copies.clear()
        return dropped

    def _copy(self, spans: list, layers: Any, positions: torch.Tensor, exact: bool) -> _Copy:
        first, last = spans[0][1], spans[-1][2]
        shape = (last - first, len(layers), layers[0].shape[-1])
        dtype, device = (torch.float32 if exact else torch.bfloat16), layers[0].device
        states = torch.empty(shape, dtype=dtype, device=device)
        for index, layer in enumerate(layers):
            states[:, index] = layer[first:last]  # rounded on the way, without another copy
        positions = positions[first:last].clone()
        spans = [(row, start - first, end - first) for row, start, end in spans]
        if device.type == "cpu":
            return _Copy(spans, states, positions)
        return self._copy_to_host(spans, states, positions)

    def _copy_to_host(self, spans: list, states: torch.Tensor, positions: torch.Tensor) -> _Copy:
        if self._stream is None:
            self._stream = torch.cuda.Stream(states.device)
        self._stream.wait_stream(torch.cuda.current_stream(states.device))
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (states, positions)]
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for host, tensor in zip(hosts, (states, positions), strict=True):
                host.copy_(tensor, non_blocking=True)
            event.record()
        return _Copy(spans, *hosts, device=(states, positions), event=event)
