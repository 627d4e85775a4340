"""Simulated gates have the truth that they claim, and the product stops every sabotage."""

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [folder for folder in (str(ROOT),) if folder not in sys.path]

from tiny import tiny_drafter, tiny_target  # noqa: E402

from bench.oracles import sabotages  # noqa: E402
from bench.oracles.simulated_gates import ROLES, Records, gate  # noqa: E402
from pipeline.acceptance import total  # noqa: E402

K = 4


@pytest.fixture(scope="module")
def records():
    """Conversations that differ more than drafters do, whose challenger accepts about twice as much."""
    rng = random.Random(2)
    conversations = []
    for c in range(80):
        ease, replies = rng.uniform(0.7, 1.3), rng.choice([1, 1, 2, 3])
        conversations.append([request(rng, f"{c}-{r}", ease) for r in range(replies)])
    return Records(conversations, "made up")


def request(rng, row_id, ease):
    tokens = rng.randint(30, 120)
    slices = json.dumps({"route": rng.choice(["billing", "returns"])})
    shared = {"prompt_set": "gate", "row_id": row_id, "conversation": row_id, "slices": slices, "weight": 1, "block": 0}
    return {
        role: {"role": role, **shared, "num_tokens": tokens, **steps(rng, tokens - 1, rate * ease), **NO_TIMES}
        for role, rate in (("champion", 0.3), ("challenger", 0.5))
    }


NO_TIMES = {"latency_s": 1.0, "ttft_s": None, "itl_s": [], "finish_reason": "length", "flag": None}


def steps(rng, left, rate):
    drafts, per_pos = 0, [0] * K
    while left > 0:
        drafts, accepted = drafts + 1, 0
        while accepted < K and rng.random() < rate:
            per_pos[accepted] += 1
            accepted += 1
        left -= accepted + 1
    return {"num_drafts": drafts, "num_accepted_tokens": sum(per_pos), "accepted_per_pos": per_pos}


@pytest.mark.parametrize("lift", [0.8, 1.0, 1.05, 2.0])
def test_the_true_lift_is_the_one_asked_for(records, lift):
    tokens_a_step = {role: [0, 0] for role in ROLES}
    for seed in range(60):
        for row in gate(records, num_prompts=300, lift=lift, seed=seed).rows:
            tokens_a_step[row["role"]][0] += row["num_tokens"] - 1
            tokens_a_step[row["role"]][1] += row["num_drafts"]
    (a, b), (c, d) = tokens_a_step["challenger"], tokens_a_step["champion"]
    # 18,000 requests of the pool's: the pool's own spread leaves about half a per cent.
    assert (a / b) / (c / d) == pytest.approx(lift, rel=0.015)


def test_counts_stay_consistent_when_steps_are_rescaled(records):
    for lift in (0.8, 1.0, 1.3):
        for row in gate(records, num_prompts=200, lift=lift, seed=1).rows:
            assert sum(row["accepted_per_pos"]) == row["num_accepted_tokens"] >= 0
            reached = [row["num_drafts"], *row["accepted_per_pos"]]
            assert reached == sorted(reached, reverse=True)
            trimmed = row["num_drafts"] + row["num_accepted_tokens"] - (row["num_tokens"] - 1)
            assert 0 <= trimmed <= K


def test_conversations_are_drawn_whole_and_both_drafters_answer_each_request(records):
    one = gate(records, num_prompts=150, lift=1.1, seed=3)
    sizes = {len(conversation) for conversation in records.conversations}
    by_conversation = {}
    for row in one.rows:
        by_conversation.setdefault(row["conversation"], []).append((row["row_id"], row["role"]))
    assert all(len(found) == len(set(found)) and len(found) / 2 in sizes for found in by_conversation.values())
    assert total([row for row in one.rows if row["role"] == "champion"]).num_requests >= 150


@pytest.fixture(scope="module")
def scene(records, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sabotages")
    target = tiny_target(workdir / "target")
    return sabotages.Scene(records, target, tiny_drafter(workdir / "drafter", target), workdir)


def test_with_nothing_done_to_it_the_better_challenger_is_promoted(scene):
    assert sabotages.control(scene) is None


@pytest.mark.parametrize("name", list(sabotages.ALL))
def test_every_sabotage_is_stopped_for_a_reason_that_names_it(scene, name):
    reason = sabotages.ALL[name](scene)
    assert reason is not None and sabotages.NAMES[name] in reason
