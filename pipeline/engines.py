"""What stages ask of a running target. ``jobs/engines.py`` answers with vLLM on Ray; rows are told apart by id."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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


@dataclass(frozen=True)
class Reply:
    """The exact ids that the engine emitted, or why there are none."""

    row_id: str
    ids: tuple[int, ...] = ()
    finish_reason: str = ""
    error: str | None = None


@dataclass(frozen=True)
class CaptureRequest:
    """One row to run through the target; its states are those of ``ids[:-1]``."""

    row_id: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """Where a row's states are in the file of its batch, or the fault that keeps them out."""

    row_id: str
    states_batch: int = -1
    digest: str = ""
    """Of the last position's states (pipeline/states.py)."""
    reason: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class Engines(Protocol):
    """One or several engines of one target. Batches come back as they finish, each with its number."""

    def info(self) -> EngineInfo:
        """The engines' common settings."""

    def generate(self, batches: Iterable[tuple[int, Sequence[GenerateRequest]]]) -> Iterator[tuple[int, list[Reply]]]:
        """Every request's reply."""

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        """One prompt's captured states against a reference forward pass (pipeline/capture_check.py)."""

    def capture(
        self, batches: Iterable[tuple[int, Sequence[CaptureRequest], Path]], typical_norms: Sequence[float]
    ) -> Iterator[tuple[int, list[Captured]]]:
        """Every row's states, written to the batch's file by the engine's own process."""
