"""What stages ask of a running target. ``jobs/engines.py`` answers with vLLM on Ray Data; rows are told apart by id.

A stage's rows are dealt into parts. A ``Work`` is the plain function that does one part wherever an engine is: it reads
the part's rows, has the engine answer or read them, and commits the part's files itself, so that neither tokens nor
states pass through a driver.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says about itself."""

    max_model_len: int
    vocab_size: int
    hidden_size: int
    dtype: str
    num_threads: int
    load_seconds: float
    vllm_version: str


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt, as ids, and how to answer it. None takes what the target's own server would."""

    row_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int
    sampling: str = "{}"
    """Further sampling settings as canonical JSON (pipeline/sampling.py)."""


@dataclass(frozen=True)
class Reply:
    """The exact ids that the engine emitted, or why there are none."""

    row_id: str
    ids: tuple[int, ...] = ()
    finish_reason: str = ""
    error: str | None = None
    accepted_per_step: tuple[int, ...] | None = None
    """Accepted drafts of each verification step, where a drafter speculated."""


@dataclass(frozen=True)
class CaptureRequest:
    """One row to run through the target; its states are those of ``ids[:-1]``."""

    row_id: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """Where a row's states are, or the fault that keeps them out."""

    row_id: str
    states_file: str = ""
    """The states shard, by its final name in the cache's folder."""
    states_batch: int = -1
    """The record batch in it."""
    digest: str = ""
    """Of the last position's states (pipeline/states.py)."""
    reason: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartDone:
    """A part that is committed, and what it took."""

    index: int
    rows: int
    tokens: int
    rejects: Mapping[str, int] = field(default_factory=dict)
    """Reason → rows."""
    tries: int = 1
    """Engines that began it: more than one when some died over it."""
    seconds: float = 0.0
    """From its beginning to its commit, the loading of an engine left out; 0 where nobody measured."""


class StatesSink(Protocol):
    """Takes the states of rows as they come."""

    def add(self, row_id: str, words: np.ndarray, *, num_states: int) -> Captured:  # uint16 [n, L, H]
        """Judge one row's raw bf16 words and write them; where they are, or the fault that keeps them out."""


class Engine(Protocol):
    """One engine of the target, in the process of whoever calls it. Several parts may call it at once."""

    def info(self) -> EngineInfo:
        """Its settings."""

    def generate(
        self, requests: Sequence[GenerateRequest], *, states: StatesSink | None = None
    ) -> tuple[list[Reply], list[Captured]]:
        """Every request's reply; with ``states`` also where its states are, taken in the same pass."""

    def prefill(self, requests: Sequence[CaptureRequest], *, states: StatesSink) -> list[Captured]:
        """The states of rows whose ids are known already."""

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        """One prompt's captured states against what they must be (pipeline/capture_check.py)."""

    def rendered_ids(self, messages: str, *, tools: str | None, template_args: str) -> list[int]:
        """The prompt ids that this engine's own server makes of a conversation (canonical JSON, as in PROMPTS)."""


class Work(Protocol):
    """What is done to each part; it is pickled and runs in the engine's process."""

    def begin(self, engine: Engine) -> Any:
        """Once for each engine of a run, before its first part. What it returns is handed to every ``part``.

        Raises: StageError to stop the run.
        """

    def part(self, engine: Engine, index: int, begun: Any) -> PartDone:
        """Do one part and commit it; a part that is committed already is left as it is."""


class Engines(Protocol):
    """One or several engines of one target."""

    def run(self, work: Work, parts: Sequence[int]) -> Generator[PartDone, None, None]:
        """The parts as they are done, in any order; what an engine died over is done by another. Closing it ends them.

        Raises: StageError when an engine cannot start, or a part takes down one engine after another.
        """
