"""At temperature, speculation draws from the target's own probabilities: accept and reject on a real engine.

The oracle is a forward pass of the target in transformers, exact over the whole vocabulary; the engine's samples are
counted against it. Each test also shows that it would notice a sampler that is wrong.
"""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chi2
from tiny import VOCAB_SIZE, tiny_drafter, tiny_target

from serving.engine.cpu_sampling import repair_cpu_sampling

FAVOURITE = 433  # the target says it often, the drafter always proposes it
NUM_SAMPLES = 2000
NOT_NOTICED, NOTICED = 1e-3, 1e-9  # p-values


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from transformers import AutoModelForCausalLM
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    repair_cpu_sampling()  # as the worker extension of our servers does
    root = tmp_path_factory.mktemp("sampling")
    target = tiny_target(root / "target", favourite=FAVOURITE)
    drafter = tiny_drafter(root / "drafter", target, proposes=FAVOURITE)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    llm = LLM(
        str(target),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        kv_cache_memory_bytes=1 << 28,
        speculative_config={"method": "dflash", "model": str(drafter), "num_speculative_tokens": 3},
    )
    yield SimpleNamespace(llm=llm, model=model, prompt=contested_prompt(model))
    del llm
    cleanup_dist_env_and_memory()


def contested_prompt(model):
    """A prompt whose second token is the drafted one about as often as not: both ways of the rejection are taken."""
    for i in range(16):
        prompt = [0, 20 + i, 120 + 2 * i, 40 + 3 * i]
        first = next_token(model, [prompt])[0]
        rows = next_token(model, [[*prompt, token] for token in range(VOCAB_SIZE)])
        if 0.4 < float((first @ rows)[FAVOURITE]) < 0.6:
            return prompt
    raise AssertionError("the toy target has changed: no prompt is contested")


@torch.inference_mode()
def next_token(model, rows, *, top_k=VOCAB_SIZE):
    """[rows, vocabulary] probabilities at temperature 1; outside the top k they are 0."""
    logits = torch.cat([model(part).logits[:, -1] for part in torch.tensor(rows).split(256)]).double()
    least = logits.topk(top_k).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf).softmax(-1)


def openings(model, prompt, *, length, top_k):
    """The probability of every possible opening of a reply."""
    found = {(): 1.0}
    for _ in range(length):
        rows = next_token(model, [[*prompt, *opening] for opening in found], top_k=top_k)
        found = {
            (*opening, token): before * float(row[token])
            for (opening, before), row in zip(found.items(), rows, strict=True)
            for token in row.nonzero().flatten().tolist()
        }
    return found


def sample(engine, *, top_k=-1):
    """The first four tokens of many replies, and the share of the drafts' first tokens that was accepted."""
    from vllm import SamplingParams

    before = counters(engine.llm)
    params = SamplingParams(max_tokens=4, temperature=1.0, top_k=top_k, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": engine.prompt}] * NUM_SAMPLES
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    drafts, accepted = (b - a for a, b in zip(before, counters(engine.llm), strict=True))
    return [tuple(output.outputs[0].token_ids) for output in outputs], accepted / drafts


def counters(llm):
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec")}
    per_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return found["vllm:spec_decode_num_drafts"].value, per_position[0]


def p_value(counts, probabilities):
    """Pearson's chi-square; outcomes expected fewer than five times are taken together."""
    expected = {outcome: NUM_SAMPLES * p for outcome, p in probabilities.items()}
    bins = [(counts[outcome], n) for outcome, n in expected.items() if n >= 5]
    rest = NUM_SAMPLES - sum(n for _, n in bins)
    bins.append((NUM_SAMPLES - sum(count for count, _ in bins), rest))
    bins = [(count, n) for count, n in bins if n >= 1 or count > 1]
    return float(chi2.sf(sum((count - n) ** 2 / max(n, 1e-9) for count, n in bins), len(bins) - 1))


def as_outcomes(probabilities):
    return dict(enumerate(probabilities.tolist()))


def test_over_the_whole_vocabulary_the_first_token_after_a_draft_has_the_targets_probabilities(engine):
    replies, accepted = sample(engine)
    assert 0.1 < accepted < 0.9, "both ways of the rejection have to be taken"
    first = next_token(engine.model, [engine.prompt])[0]
    rows = next_token(engine.model, [[*engine.prompt, token] for token in range(VOCAB_SIZE)])
    counts = Counter(reply[1] for reply in replies)
    assert p_value(counts, as_outcomes(first @ rows)) > NOT_NOTICED

    # After a rejection, drawn from the target's probabilities as they are instead of from what is left of them.
    rejected = 1 - rows[:, FAVOURITE : FAVOURITE + 1]
    redrawn = rejected * rows
    redrawn[:, FAVOURITE] += rows[:, FAVOURITE]
    assert p_value(counts, as_outcomes(first @ redrawn)) < NOTICED


def test_with_top_k_whole_openings_have_the_targets_probabilities(engine):
    replies, accepted = sample(engine, top_k=5)
    assert 0.1 < accepted < 0.95
    exact = openings(engine.model, engine.prompt, length=4, top_k=5)
    assert sum(exact.values()) == pytest.approx(1)
    counts = Counter(replies)
    assert p_value(counts, exact) > NOT_NOTICED
    # A draft's later tokens accepted by the probabilities of its first: openings of one token repeated are too many.
    tilted = {opening: p * 1.3 ** opening[1:].count(FAVOURITE) for opening, p in exact.items()}
    total = sum(tilted.values())
    assert p_value(counts, {opening: p / total for opening, p in tilted.items()}) < NOTICED


def test_a_greedy_request_beside_sampled_ones_keeps_its_tokens(engine):
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    sampled = SamplingParams(max_tokens=12, temperature=1.0, top_k=5, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*engine.prompt, 100 + i]} for i in range(8)]
    alone = engine.llm.generate(prompts, greedy, use_tqdm=False)
    among = engine.llm.generate([p for p in prompts for _ in range(2)], [greedy, sampled] * 8, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in among[::2]] == [o.outputs[0].token_ids for o in alone]
