"""vllm bench serve on a real server: exact prompts go in, and its figures are those of our own counting."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_drafter, tiny_target

from serving.bench_serve import LoadGenerator
from serving.errors import LaunchError, LoadError
from serving.launch import VllmServer
from serving.load import drive_sync

sys.path.append(str(Path(__file__).resolve().parents[2]))
from bench.oracles.bench_serve import compare_lengths

FAVOURITE = 433
PROMPTS = [[0, 5, 20 + i, 120 + 3 * i, 40 + 2 * i] for i in range(12)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench_serve")
    target = tiny_target(root / "target", favourite=FAVOURITE)
    drafter = tiny_drafter(root / "drafter", target, proposes=FAVOURITE, block_size=6)
    server = VllmServer(
        model=target,
        drafter=drafter,
        log=root / "server.log",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        num_speculative_tokens=3,  # fewer than a block of 6 holds
        prefix_caching=False,
        token="unused",
        env={"OMP_NUM_THREADS": "1"},
    )
    with LoadGenerator(log=root / "bench_serve.log") as generator:
        generator.start()
        with server:
            yield SimpleNamespace(server=server, generator=generator, url=server.base_url, root=root)


def test_our_acceptance_length_is_that_of_vllm_bench_serve_on_the_same_prompts(served):
    found = compare_lengths(served.url, served.generator, PROMPTS, concurrency=4, max_tokens=24)
    assert found["ratio"] == pytest.approx(1, abs=0.01)
    assert found["num_tokens"] == found["num_tokens_theirs"]
    assert found["num_drafts"] > 20 and found["ours"] > 1.2, "drafts that are never accepted would prove little"


def test_prompts_go_in_as_they_are_and_the_times_are_those_of_every_request(served):
    requests = [{"prompt": p, "max_tokens": 10, "temperature": 0.0, "return_token_ids": True} for p in PROMPTS]
    replies = drive_sync(served.url, requests, concurrency=4)
    load = served.generator.run(served.url, PROMPTS, concurrency=4, max_tokens=10)
    # Other prompts would have other replies, of other lengths and other numbers of steps.
    assert load.num_tokens == sum(len(reply.token_ids) for reply in replies)
    assert load.num_drafts == sum(reply.spec["num_spec_steps"] for reply in replies)
    assert load.num_requests == len(load.ttft_s) == len(PROMPTS)
    steps = load.num_tokens / (load.num_drafts + len(PROMPTS))
    assert steps > 1 and 0 < len(load.itl_s) <= load.num_tokens - len(PROMPTS), "a step's tokens arrive together"
    assert load.figures["output_throughput"] == pytest.approx(load.num_tokens / load.wall_s)
    assert 0 < max(load.ttft_s) < load.wall_s


def test_a_server_speculates_fewer_tokens_than_a_block_and_says_so(served):
    (reply,) = drive_sync(served.url, [{"prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0.0}], concurrency=1)
    assert reply.spec["num_spec_tokens"] == 3 and set(reply.spec["per_step_drafted"]) == {3}


def test_more_tokens_than_a_block_are_refused_by_us_since_vllm_would_draft_them(served):
    server = VllmServer(
        model=served.server.model, drafter=served.server.drafter, log=served.root / "log", num_speculative_tokens=6
    )
    with pytest.raises(LaunchError, match="its blocks hold 1 to 5 draft tokens"):
        server.start()


def test_a_request_that_fails_stops_the_measurement(served):
    with pytest.raises(LoadError, match=r"11 of 12 requests .*Bad Request"):
        served.generator.run(served.url, [*PROMPTS[:11], [5] * 300], concurrency=4, max_tokens=8)


def test_a_server_that_is_gone_is_said_and_the_generator_goes_on(served):
    with pytest.raises(LoadError, match="0 of 12 requests"):
        served.generator.run("http://127.0.0.1:9", PROMPTS, concurrency=4, max_tokens=8)
    assert served.generator.run(served.url, PROMPTS[:1], concurrency=1, max_tokens=2).num_tokens == 2


def test_a_generator_that_dies_says_where_its_log_is(tmp_path):
    generator = LoadGenerator(log=tmp_path / "bench.log")
    generator.start()
    generator._process.kill()
    with pytest.raises(LoadError, match=r"died; the end of .*bench\.log"):
        generator.run("http://127.0.0.1:9", PROMPTS[:1], concurrency=1, max_tokens=2)
    generator.__exit__()
