"""The capture check in a running engine: one prompt's states, before rounding, against what they must be."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.engine_calls import Asked, SharedEngine
from jobs.engine_rows import RowStates, capture_args
from jobs.engine_sampling import reply_params
from pipeline.capture_check import compare_head, compare_reference, compare_runs
from pipeline.engines import Captured, GenerateRequest
from pipeline.errors import StageError

# Tokens that the engine answers the checked prompt with.
NEW_TOKENS = 16
# Above this many bytes of weights, a plain forward pass in float32 beside the engine is too much to ask for.
MAX_REFERENCE_BYTES = 4 << 30
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class Probe:
    """Runs the checked prompt through the engine: answered, read alone, read among others."""

    def __init__(self, shared: SharedEngine, layer_ids: Sequence[int]):
        self._shared = shared
        self._num_layers = len(layer_ids)

    def answer(self, ids: Sequence[int], *, num_new: int) -> tuple[tuple[int, ...], list[float], np.ndarray]:
        """The greedy reply, the engine's log probability of each of its tokens, and the states [n, L or L + 1, H]."""
        from vllm import SamplingParams

        with self._shared.call() as call:
            key = call.new_key()
            request = GenerateRequest("probe", tuple(ids), num_new, 0.0, 1.0, 0, '{"ignore_eos": true}')
            params = reply_params(request, SamplingParams(logprobs=0), capture=capture_args(key, exact=True))
            refused = call.add([Asked(key, ids, params, captured=True)])
            if refused:
                raise StageError(f"capture check: the engine refuses the prompt ({refused[key]})")
            (done,) = call.results()
        reply = tuple(done.completion.token_ids)
        logprobs = [step[token].logprob for step, token in zip(done.completion.logprobs, reply, strict=True)]
        return reply, logprobs, _states_of(done.taken)

    def read(self, ids: Sequence[int], others: Sequence[Sequence[int]] = ()) -> np.ndarray:  # float32 [n, L, H]
        """The prompt's states, read among others."""
        sink = _Exact()
        with self._shared.call() as call:
            rows = RowStates(call, sink, exact=True)
            rows.read([*((f"other-{n}", other) for n, other in enumerate(others)), ("probe", ids)])
            for done in call.results():
                rows.was_read(done.key, done.taken)
        if "probe" not in sink.states:
            found = rows.captured["probe"]
            raise StageError(f"capture check: the prompt's states could not be taken ({found.reason}: {found.detail})")
        return sink.states["probe"][:, : self._num_layers]

    def rebuild(self, states: np.ndarray, tokens: Sequence[int]) -> Mapping[str, Any]:  # float32 [n, H]
        """What the engine's own final norm and head make of last-layer states. Raises: StageError."""
        found = self._shared.ask_worker("rebuilt_logprobs", np.ascontiguousarray(states), list(tokens))
        if found["error"]:
            raise StageError(
                f"capture check: the target's own norm and head do not take its states ({found['error']}); "
                'set capture.check = "reference"'
            )
        return found


class _Exact:
    """A sink that keeps float32 states in memory."""

    def __init__(self):
        self.states: dict[str, np.ndarray] = {}

    def add(self, row_id: str, words: np.ndarray, *, num_states: int) -> Captured:
        self.states[row_id] = words
        return Captured(row_id)


def check_by_reference(
    probe: Probe, model: Path, layer_ids: Sequence[int], ids: Sequence[int], others: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The states against a plain forward pass of the folder's weights in float32."""
    from serving.engine.reference import reference_states

    reply, _, answered = probe.answer(ids, num_new=NEW_TOKENS)
    whole = (*ids, *reply)
    alone = probe.read(whole)
    found = compare_runs(alone, probe.read(whole, others), answered[:, : len(layer_ids)], layer_ids)
    try:
        expected = reference_states(model, whole[:-1], layer_ids=layer_ids)
    except Exception as error:  # another library's model code, on weights that it may not know, such as quantized ones
        raise StageError(
            f"capture check: {model} cannot be run plainly to compare with ({type(error).__name__}: {error}"[:400]
            + '); set capture.check = "head"'
        )
    return found | compare_reference(alone, expected, layer_ids)


def check_by_head(
    probe: Probe, shared: SharedEngine, layer_ids: Sequence[int], ids: Sequence[int], others: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The last decoder layer's states, through the engine's own norm and head, against its own next tokens."""
    if refusal := shared.ask_worker("give_last_layer", True):
        raise StageError(f'capture check: {refusal}; or set capture.check = "reference"')
    try:
        reply, logprobs, answered = probe.answer(ids, num_new=NEW_TOKENS)
    finally:
        shared.ask_worker("give_last_layer", False)
    whole = (*ids, *reply)
    found = compare_runs(probe.read(whole), probe.read(whole, others), answered[:, : len(layer_ids)], layer_ids)
    rebuilt = probe.rebuild(answered[len(ids) - 1 :, -1], reply)
    return found | compare_head(rebuilt["tokens"], rebuilt["best"], logprobs)


def choose_check(check: str, model: Path) -> str:
    """reference or head: what is asked for, or by the bytes of weights in the folder."""
    if check != "auto":
        return check
    size = sum(file.stat().st_size for pattern in WEIGHTS for file in Path(model).glob(pattern))
    return "reference" if size <= MAX_REFERENCE_BYTES else "head"


def _states_of(taken: Mapping[str, Any] | None) -> np.ndarray:
    if taken is None or taken["states"] is None:
        reason = "this engine captures nothing" if taken is None else taken["error"]
        raise StageError(f"capture check: the prompt's states could not be taken ({reason})")
    return taken["states"]
