"""A workload's prompts, the target's answers and its states, made once and found again: no Ray, one engine a need."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.oracles.one_engine import TimedEngine, answer, engine_process, read
from pipeline import capture, collect, regenerate
from pipeline.artifacts import HiddenStateCache, PromptSet, ResponseSet
from pipeline.config import Config
from pipeline.engines import Engine, PartDone, Work
from pipeline.errors import ConfigError
from pipeline.stages import Artifact

# Where the text of a prompt stands in the files of public sets.
_TEXT_KEYS = ("prompt", "question", "text")


@dataclass(frozen=True)
class Captured:
    """What the loop has of a workload before it trains."""

    prompts: Artifact[PromptSet]
    responses: Artifact[ResponseSet]
    states: Artifact[HiddenStateCache]


class _EngineNeeded(Exception):
    pass


class _NoEngine:
    """Engines that are never started: what is complete needs none."""

    def run(self, work: Work, parts: Sequence[int]) -> Iterator[PartDone]:
        """Never: something is left to do."""
        raise _EngineNeeded


def captured(config: Config, layers: Sequence[int], *, num_threads: int) -> Captured:
    """Prompts, answers and states of a configuration; an engine is started only where a part is missing."""
    prompts = collect.run(config)
    try:
        return _through(config, prompts, layers, lambda stage, *more: stage(*more))
    except _EngineNeeded:
        with _engine_of(config, layers, num_threads) as engine:
            return _through(config, prompts, layers, lambda stage, *more: engine(_in_engine, stage, *more))


def last_layer(config: Config, found: Captured, layer: int, *, num_threads: int) -> Artifact[HiddenStateCache]:
    """The outputs of the target's last layer for the same answers, which a peer's teacher logits are made from."""
    try:
        return capture.run(config, found.responses, engines=_NoEngine(), target_layer_ids=(layer,))
    except _EngineNeeded:
        with _engine_of(config, (layer,), num_threads) as engine:
            states, _ = engine(read, config, found.responses, (layer,))
        return states


def write_requests(path: Path, requests: Iterable[Mapping[str, Any]]) -> Path:
    """A traffic file of these requests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(request, sort_keys=True) + "\n" for request in requests))
    return path


def requests_of(path: Path, *, limit: int, max_tokens: int) -> list[dict[str, Any]]:
    """The first requests of a file of prompts: JSON lines with messages, or with a text of one of the usual names.

    Raises: ConfigError naming the keys of a line that has neither.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines()[:limit]):
        record = json.loads(line)
        messages = record.get("messages")
        text = next((record[key] for key in _TEXT_KEYS if record.get(key)), None) or (record.get("turns") or [None])[0]
        if not messages and not text:
            raise ConfigError(
                f"{path}:{number + 1}: found the keys {sorted(record)}, expected messages or one of {_TEXT_KEYS}"
            )
        found.append(
            {
                "conversation": f"{path.stem}-{number:05d}",
                "slice": str(record.get("category", path.stem)),
                "messages": messages or [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": 0.0,
            }
        )
    return found


def _through(config: Config, prompts: Artifact[PromptSet], layers: Sequence[int], call: Callable[..., Any]) -> Captured:
    responses = call(_answered, config, prompts, layers)
    return Captured(prompts, responses, call(_states, config, responses, layers))


def _answered(config: Config, prompts: Any, layers: Sequence[int], engine: Engine | None = None) -> Any:
    if engine is not None:
        return answer(engine, config, prompts, layers)[0]
    return regenerate.run(config, prompts, engines=_NoEngine(), target_layer_ids=layers)


def _states(config: Config, responses: Any, layers: Sequence[int], engine: Engine | None = None) -> Any:
    engines = TimedEngine(engine) if engine is not None else _NoEngine()
    return capture.run(config, responses, engines=engines, target_layer_ids=layers)


def _in_engine(engine: Engine, stage: Callable[..., Any], *arguments: Any) -> Any:
    return stage(*arguments, engine=engine)


@contextmanager
def _engine_of(config: Config, layers: Sequence[int], num_threads: int) -> Iterator[Callable[..., Any]]:
    settings = {
        "dtype": config.target.dtype,
        "max_model_len": config.target.max_model_len,
        "max_num_seqs": config.regenerate.max_num_seqs,
        "num_threads": num_threads,
    }
    with engine_process(config.target.model, target_layer_ids=layers, **settings) as engine:
        yield engine
