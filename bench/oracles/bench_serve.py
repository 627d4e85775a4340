"""Are our counts right? Against a hand count of every step, and against vLLM's own load generator.

The hand count knows two things that our counting never sees: what the drafter drafted at every step, read from the
engine's proposer, and what the target says alone, from an engine without speculation. A step accepts the drafts that
the target would have said, up to the first that it wouldn't, and adds one token of its own.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.oracles.real_drafts import Recorder, close_engine, greedy, open_engine
from pipeline.acceptance import count_reply, total
from serving.bench_serve import LoadGenerator
from serving.launch import VllmServer
from serving.load import drive_sync

FAVOURITE = 433  # a token that the toy target says often, and that the toy drafter proposes
NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Asked:
    """One request of the hand count, and what the target alone goes on to say past its end."""

    prompt_ids: list[int]
    max_tokens: int
    stop_ids: list[int]
    plain: list[int]


@dataclass(frozen=True)
class HandCount:
    """One reply's counts, in the words of pipeline.acceptance, as a person would count them."""

    num_tokens: int
    num_drafts: int
    num_accepted_tokens: int
    accepted_per_pos: tuple[int, ...]
    num_accepted_and_emitted: int
    ended_inside: bool
    """The last step had accepted drafts, or its own token, that the reply has no room for."""

    @property
    def counts(self) -> dict[str, Any]:
        """What our counting has to find too."""
        return {name: value for name, value in self.__dict__.items() if name != "ended_inside"}


def counts_by_hand(workdir: Path, *, num_requests: int = 50) -> dict[str, Any]:
    """Requests whose counts are the hand count's, of a real engine; ends inside an accepted run are among them."""
    from tiny import tiny_drafter, tiny_target

    target = tiny_target(workdir / "target", favourite=FAVOURITE)
    drafter = tiny_drafter(workdir / "drafter", target, proposes=FAVOURITE, block_size=NUM_DRAFT_TOKENS + 1)
    asked = _asked(target, num_requests)
    recorder, different, inside, steps = Recorder(), [], 0, 0
    llm = open_engine(target, drafter, num_draft_tokens=NUM_DRAFT_TOKENS, request_metrics="detailed")
    llm.collective_rpc(recorder.install)
    for index, one in enumerate(asked):
        recorder.clear()
        token_ids, metrics = _reply(llm, one)
        drafts = {draft.anchor: draft.logits.argmax(-1).tolist() for draft in recorder.drafts}
        hand, ours = _by_hand(one, token_ids, drafts), _ours(metrics, token_ids)
        if ours != hand.counts:
            different.append({"request": index, "by_hand": hand.counts, "ours": ours})
        inside, steps = inside + hand.ended_inside, steps + hand.num_drafts
    del llm
    close_engine()
    return {
        "num_requests": num_requests,
        "num_equal": num_requests - len(different),
        "num_ended_inside": inside,
        "num_steps": steps,
        "different": different,
    }


def _asked(target: Path, num_requests: int) -> list[Asked]:
    """Requests that end at a limit or, every other one, at a stop token of their own."""
    numbers = random.Random(5)
    llm = open_engine(target, None)
    asked = []
    for index in range(num_requests):
        prompt_ids = [numbers.randrange(6, 512) for _ in range(numbers.randrange(4, 12))]
        max_tokens = numbers.randrange(6, 30)
        plain = greedy(llm, prompt_ids, max_tokens=max_tokens + NUM_DRAFT_TOKENS + 1)
        first_seen = [i for i, token in enumerate(plain[:max_tokens]) if i and token not in plain[:i]]
        stop_ids = [plain[numbers.choice(first_seen)]] if index % 2 and first_seen else []
        asked.append(Asked(prompt_ids, max_tokens, stop_ids, plain))
    del llm
    close_engine()
    return asked


def _reply(llm: Any, one: Asked) -> tuple[list[int], dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=one.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, stop_token_ids=one.stop_ids
    )
    (output,) = llm.generate([{"prompt_token_ids": one.prompt_ids}], params, use_tqdm=False)
    completion = output.outputs[0]
    return list(completion.token_ids), completion.spec_decode_metrics.to_dict()


def _ours(metrics: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    counted = count_reply(metrics, token_ids, max_repeat_share=1.0)
    if counted.flag:
        return {"flag": counted.flag}
    counts = {name: value for name, value in counted.__dict__.items() if name != "flag"}
    return {**counts, "num_accepted_and_emitted": total([counted.__dict__]).num_accepted_and_emitted}


def _by_hand(one: Asked, token_ids: Sequence[int], drafts: Mapping[int, Sequence[int]]) -> HandCount:
    """``drafts``: by the position of the last known token. The reply's first token is the prefill's."""
    assert list(token_ids) == one.plain[: len(token_ids)], "speculation changed a greedy reply"
    known, runs, emitted = 0, [], []
    while known < len(token_ids) - 1:
        drafted = drafts[len(one.prompt_ids) + known]
        run = 0
        while run < len(drafted) and drafted[run] == one.plain[known + 1 + run]:
            run += 1
        runs.append(run)
        emitted.append(min(run, len(token_ids) - 1 - known))
        known += run + 1
    return HandCount(
        num_tokens=len(token_ids),
        num_drafts=len(runs),
        num_accepted_tokens=sum(runs),
        accepted_per_pos=tuple(sum(run > k for run in runs) for k in range(NUM_DRAFT_TOKENS)),
        num_accepted_and_emitted=sum(emitted),
        ended_inside=known > len(token_ids) - 1,
    )


def acceptance_length_against_bench_serve(
    workdir: Path,
    *,
    target: Path,
    drafter: Path,
    prompts: Sequence[Sequence[int]],
    dtype: str = "float32",
    concurrency: int = 4,
    max_tokens: int = 48,
) -> dict[str, float]:
    """Our acceptance length and ``vllm bench serve``'s own, of the same prompts on one server, one after the other."""
    log = workdir / "bench_serve.log"
    server = VllmServer(
        model=target, drafter=drafter, log=workdir / "server.log", dtype=dtype, prefix_caching=False, token="unused"
    )
    with LoadGenerator(log=log) as generator, server:
        return compare_lengths(server.base_url, generator, prompts, concurrency=concurrency, max_tokens=max_tokens)


def compare_lengths(
    base_url: str, generator: LoadGenerator, prompts: Sequence[Sequence[int]], *, concurrency: int, max_tokens: int
) -> dict[str, float]:
    """The same on a server that runs; every reply counts, loops too, since the load generator counts them."""
    shared = {"max_tokens": max_tokens, "temperature": 0.0, "return_token_ids": True}
    requests = [{"prompt": list(prompt), **shared} for prompt in prompts]
    replies = drive_sync(base_url, requests, concurrency=concurrency)
    counted = [count_reply(reply.spec, reply.token_ids, max_repeat_share=1.0) for reply in replies]
    if flags := [one.flag for one in counted if one.flag]:
        raise ValueError(f"{len(flags)} of {len(counted)} replies cannot be counted: {sorted(set(flags))}")
    ours = total([one.__dict__ for one in counted])
    theirs = generator.run(base_url, prompts, concurrency=concurrency, max_tokens=max_tokens)
    return {
        "ours": ours.acceptance_length,
        "theirs": theirs.figures["spec_decode_acceptance_length"],
        "ratio": ours.acceptance_length / theirs.figures["spec_decode_acceptance_length"],
        "num_requests": ours.num_requests,
        "num_drafts": ours.num_drafts,
        "num_drafts_theirs": theirs.num_drafts,
        "num_tokens": ours.num_tokens,
        "num_tokens_theirs": theirs.num_tokens,
    }
