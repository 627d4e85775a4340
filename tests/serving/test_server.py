"""One real server: swapped under load, tapped, deployed to and rolled back through its HTTP routes alone."""

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_drafter, tiny_target

from jobs.served import ServedDrafters
from pipeline import collect
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.on_record import served_reply
from pipeline.plan import plan
from pipeline.render import Renderer
from pipeline.rendering_check import require_same_rendering
from pipeline.schemas import PROMPTS
from pipeline.shards import read_tables
from serving.deploy import engine, run_probe, status, swap_replica
from serving.engine.settings import flags_of
from serving.errors import DeployError, LaunchError
from serving.fleet.change import ByEndpoint
from serving.fleet.controller import Controller, Fleet, Orders
from serving.fleet.replicas import Drafter, static
from serving.fleet.rollout import Policy, Rollout
from serving.launch import VllmServer
from serving.load import Driver, drive_sync
from serving.preflight import sha256_file
from serving.replica import call

sys.path.append(str(Path(__file__).resolve().parents[2]))
from bench.oracles.swap_under_load import Version, measure_swaps, prompts

TOKEN = "test token"
RETURN_IDS = {"return_token_ids": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    target = tiny_target(root / "target", favourite=433)
    folders = {
        "1": tiny_drafter(root / "versions" / "1", target, seed=1),
        "2": tiny_drafter(root / "versions" / "2", target, seed=2, proposes=433),
    }
    server = VllmServer(
        model=target,
        drafter=folders["1"],
        version="1",
        port=free_port(),
        log=root / "server.log",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        token=TOKEN,
        drafter_roots=[root / "versions"],
        tap_dir=root / "traffic",
        tap_consent="header:X-Consent=yes",
        tap_subject_header="X-Subject",
        extra_args=["--enable-prompt-tokens-details"],
        env={
            "OMP_NUM_THREADS": "1",
            "SLIPSTREAM_TAP_TARGET": "f00d",
            "SLIPSTREAM_TAP_OPT_OUT": "X-Never",
            "SLIPSTREAM_TAP_WITHOUT_SUBJECT": "one_request",
        },
    )
    with server:
        print(f"\nserver start {server.start_s} s")
        yield SimpleNamespace(server=server, url=server.base_url, root=root, folders=folders, target=target)


def order(fleet, version, expected, **changes):
    folder = fleet.folders[version]
    sha256 = sha256_file(folder / "model.safetensors")
    probe = prompts("target", count=2, max_tokens=16)
    return {
        "folder": folder,
        "version": version,
        "sha256": sha256,
        "expected_version": expected,
        "probe": probe,
    } | changes


def test_swaps_under_load_fail_no_request_and_change_no_output(fleet):
    versions = [Version(name, fleet.folders[name]) for name in ("1", "2")]
    figures = measure_swaps(fleet.server, versions, prompts("target"), clients=4, swaps=2)
    print(json.dumps(figures))
    assert (figures["failed_requests"], figures["changed_outputs"]) == (0, 0)
    assert len(figures["pause_s"]) == 2 and max(figures["pause_s"]) <= 1.5
    assert figures["num_replies"] >= 32
    before, during, after = figures["acceptance_length"]
    assert during > before == after
    assert status(fleet.url, TOKEN)["version"] == "1"


def test_a_verified_swap_reports_what_changed_and_goes_back(fleet):
    there = swap_replica(fleet.url, TOKEN, **order(fleet, "2", "1", prefix_cache="clear"))
    back = swap_replica(fleet.url, TOKEN, **order(fleet, "1", "2"))
    assert (there.changed_outputs, back.changed_outputs) == (0, 0)
    assert there.live_fingerprint != there.previous_live_fingerprint == back.live_fingerprint
    assert there.after.acceptance_length > there.before.acceptance_length
    assert there.prefix_cache_reset, "an idle server holds no blocks"


def test_status_tells_how_and_since_when_and_reads_the_live_weights_when_asked(fleet):
    known = status(fleet.url, TOKEN)
    assert known["swap"] == {"in_place": True, "how": "replace", "reason": None, "restart": False}
    assert (known["door"], known["paused"]) == ("open", False)
    assert 0 < time.time() - known["since"] < 3600
    assert call(fleet.url, TOKEN, "status?verify=1", None, 60.0)["status"] == "ok"
    other = swap_replica(fleet.url, TOKEN, **order(fleet, "2", "1"))
    back = swap_replica(fleet.url, TOKEN, **order(fleet, "1", "2", pause="drain"))
    assert other.closed_s > other.pause_s > 0 and back.how == "in_place"
    now = status(fleet.url, TOKEN)
    assert now["since"] > known["since"] and now["epoch"] != known["epoch"]


def test_a_swap_keeps_the_prefix_cache_unless_it_is_to_be_cleared_or_salted(fleet):
    # Two blocks of 128 tokens, which vLLM's CPU build caches.
    request = {"prompt": [0, *range(10, 300)], "max_tokens": 2, "temperature": 0, "ignore_eos": True} | RETURN_IDS

    def cached():
        (reply,) = drive_sync(fleet.url, [request], concurrency=1)
        return reply.usage["prompt_tokens_details"]["cached_tokens"], reply.token_ids

    first, warm = cached(), cached()
    assert (first[0] or 0) == 0 and warm[0] >= 128 and first[1] == warm[1]
    found = []
    for i, prefix_cache in enumerate(("keep", "salt", "clear")):
        old, new = ("1", "2") if i % 2 == 0 else ("2", "1")
        swap_replica(fleet.url, TOKEN, **order(fleet, new, old, prefix_cache=prefix_cache))
        found.append(cached())
    swap_replica(fleet.url, TOKEN, **order(fleet, "1", "2"))
    assert found[0][0] >= 128, "stale drafter keys cost acceptance alone"
    assert [(hit or 0) for hit, _ in found[1:]] == [0, 0], "as cold as the first"
    assert {tuple(ids) for _, ids in [first, *found]} == {tuple(first[1])}


def test_refusals_say_why_and_leave_the_old_version(fleet, tmp_path):
    before = status(fleet.url, TOKEN)
    for changes, reason in (
        ({"expected_version": "2"}, "version 1 serves, the caller expected 2"),
        ({"folder": tmp_path}, "not under an allowed folder"),
        ({"sha256": "0" * 64}, "sha256"),
    ):
        with pytest.raises(DeployError, match=reason):
            swap_replica(fleet.url, TOKEN, **order(fleet, "2", "1", **changes))
    with pytest.raises(DeployError, match="token"):
        status(fleet.url, "another token")
    assert status(fleet.url, TOKEN) == before


def test_a_version_that_fails_its_probe_is_put_back(fleet, monkeypatch):
    monkeypatch.setattr("serving.deploy._problem", lambda *_: "the probe prompts ran without one draft")
    with pytest.raises(DeployError, match="without one draft; version 1 serves there again"):
        swap_replica(fleet.url, TOKEN, **order(fleet, "2", "1"))
    assert status(fleet.url, TOKEN)["version"] == "1"


class Written:
    """A ledger in memory."""

    def __init__(self):
        self.saved = []

    def save(self, rollout):
        json.dumps(rollout.as_dict())
        self.saved.append(rollout)

    def orders(self):
        return Orders()


def rolled_out(fleet, urls, version, base, **policy):
    """The end of a rollout over these replicas, as `slipstream deploy` drives it, and all its states."""
    target, old = (
        Drafter(one, str(fleet.folders[one]), sha256_file(fleet.folders[one] / "model.safetensors"))
        for one in (version, base)
    )
    probe, ledger = prompts("target", count=2, max_tokens=16), Written()
    way = ByEndpoint(TOKEN, probe, timeout_s=120)
    replicas = Fleet(static(urls), TOKEN, probe, in_place=way, restart=way)
    policy = Policy(tick_s=0.05, dead_after_s=0.5, **policy)
    return Controller(replicas, ledger, policy=policy, name=lambda: None).run(Rollout(target, old)), ledger.saved


def test_a_rollout_that_loses_a_replica_puts_the_others_back(fleet):
    nobody = f"http://127.0.0.1:{free_port()}"
    ended, saved = rolled_out(fleet, [fleet.url, nobody], "2", "1", max_unavailable=2)
    assert (ended.phase, "not reachable" in ended.why) == ("stopped", True)
    assert [one.state for one in ended.replicas] == ["serving", "waiting"]
    there_and_back = [
        state.goal(state.replicas[0]).version
        for state in saved
        if state.replicas and state.replicas[0].state == "changing"
    ]
    assert there_and_back == ["2", "1"] and status(fleet.url, TOKEN)["version"] == "1"


def test_a_rollout_swaps_the_engine_and_tells_what_it_cost(fleet):
    ended, _ = rolled_out(fleet, [fleet.url], "2", "1")
    (record,) = ended.replicas
    assert (ended.phase, record.version, record.change["changed_outputs"]) == ("converged", "2", 0)
    assert record.change["pause_s"] > 0 and record.counts.num_drafts > 0
    assert status(fleet.url, TOKEN)["version"] == "2"
    assert rolled_out(fleet, [fleet.url], "1", "2")[0].phase == "converged"


def test_replies_carry_exact_ids_and_the_engines_counts_streamed_or_whole(fleet):
    (request,) = prompts("target", count=1, max_tokens=12)
    streamed = request | {"stream": True, "stream_options": {"include_usage": True}}
    whole, events = drive_sync(fleet.url, [request, streamed], concurrency=1)
    assert whole.ok and events.ok, (whole.error, events.error)
    assert whole.token_ids == events.token_ids and len(whole.token_ids) == 12
    assert whole.prompt_token_ids == events.prompt_token_ids
    assert whole.text == events.text
    assert whole.spec["num_spec_steps"] == events.spec["num_spec_steps"] > 0
    assert events.ttft_s < events.latency_s and whole.ttft_s is None
    (failed,) = drive_sync(fleet.url, [request | {"max_tokens": -1}], concurrency=1)
    assert (failed.ok, failed.status) == (False, 400)


def test_the_engine_names_the_flags_that_another_server_needs_to_be_its_like(fleet):
    found = engine(fleet.url, TOKEN)
    assert (found["dtype"], found["max_model_len"], found["max_num_seqs"]) == ("float32", 512, 8)
    assert found["speculation"]["num_speculative_tokens"] == 3
    flags = flags_of(found)
    assert flags[flags.index("--max-model-len") + 1] == "512"
    assert "--enable-prefix-caching" in flags
    with pytest.raises(DeployError, match="token"):
        engine(fleet.url, "another token")


def test_a_streams_tokens_have_times(fleet):
    request = {"prompt": [0, 9, 10, 11], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    (reply,) = drive_sync(fleet.url, [request | {"return_token_ids": True}], concurrency=1)
    assert len(reply.token_ids) == 12
    assert 0 < reply.ttft_s <= reply.latency_s
    assert reply.ttft_s + sum(reply.itl_s) <= reply.latency_s
    assert 0 < len(reply.itl_s) < 12


def test_an_evaluation_refuses_a_replica_that_others_use(fleet, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTROL_TOKEN", TOKEN)
    config = Config(root=fleet.root, target={"model": fleet.target}, evaluate={"server_url": fleet.url})
    request = {"prompt": [0, 9, 10, 11], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with ServedDrafters(config, folders=[]) as served:
        assert [len(reply.token_ids) for reply in served.answer([request | RETURN_IDS] * 2, concurrency=2)] == [8, 8]
        assert served.settings()["max_model_len"] == 512
        with Driver(fleet.url, [request | {"max_tokens": 64}], concurrency=4) as driver:
            driver.wait_for(1)
            with pytest.raises(StageError, match="requests of others"):
                for _ in range(20):
                    served.answer([request], concurrency=1)


def test_the_tap_writes_what_the_gateway_allowed_and_nothing_else(fleet):
    request, other = prompts("target", count=2, max_tokens=8)
    consent = {"X-Consent": "yes", "X-Subject": "anna"}
    streamed = request | {"stream": True}
    replies = drive_sync(fleet.url, [request, streamed, other], concurrency=1, headers=[consent, consent, {}])
    assert all(reply.ok for reply in replies)
    _, lines = logged(fleet, "anna", count=2)
    assert len(lines) == 2, "the first test's load and the third request carried no consent"
    assert {line["subject"] for line in lines} == {"anna"}
    assert [line["response"]["text"] for line in lines] == [replies[0].text, replies[1].text]
    assert lines[0]["response"]["choices"][0]["token_ids"] == replies[0].token_ids
    assert lines[0]["drafter_version"] == "1"
    spec = replies[0].spec
    expected = {"num_drafts": spec["num_spec_steps"], "num_accepted_tokens": spec["num_accepted_draft_tokens"]}
    assert expected.items() <= lines[0]["acceptance"].items()


def logged(fleet, subject, *, count):
    """The traffic log and its records, once there are so many of a subject's: a thread of the server's writes them."""
    deadline = time.monotonic() + 30
    while True:
        for log in (fleet.root / "traffic").glob("*.jsonl"):
            lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if sum(line["subject"] == subject for line in lines) >= count:
                return log, lines
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_chats_exact_ids_are_on_record_are_those_rendered_here_and_are_used_again(fleet, tmp_path):
    ask = {"model": fleet.server.served_name, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    whole = ask | RETURN_IDS | {"max_tokens": 9}
    streamed = whole | {"stream": True, "stream_options": {"include_usage": True}}
    silent = ask | {"max_tokens": 9}
    consent = {"X-Consent": "yes", "X-Subject": "ben"}
    replies = drive_sync(fleet.url, [whole, streamed, silent], concurrency=1, headers=consent)
    assert all(reply.ok for reply in replies), [reply.error for reply in replies]
    log, lines = logged(fleet, "ben", count=3)
    found = [served_reply(line) for line in lines if line["subject"] == "ben"]
    assert found[0] == found[1] == found[2] is not None, "the engine's ids are there without having been asked for"
    assert (list(found[0].ids), found[0].target) == (replies[0].token_ids, "f00d")
    renderer = Renderer(fleet.target)
    assert list(found[0].prompt_ids) == renderer.prompt_ids(ask["messages"])
    config = Config(
        root=tmp_path,
        target={"model": fleet.target, "max_model_len": 512},
        collect={
            "sources": (log.parent,),
            "redaction": "none",
            "max_reject_share": 1,
            "served_models": {line["model"] for line in lines},
        },
        regenerate={"rendering_url": fleet.url, "reuse": "exact", "max_tokens": 9},
    )
    require_same_rendering(config, renderer, None)
    prompts = collect.run(config)
    rows = read_tables(prompts.folder, prompts.manifest.shards, PROMPTS).to_pylist()
    (row,) = [row for row in rows if json.loads(row["messages"]) == ask["messages"]]
    train = {**row, "split": "train"}
    reused = plan(config, train, renderer.row_ids(row), target_id="f00d", end_ids=renderer.end_ids)
    assert list(reused.reply.ids) == replies[0].token_ids


def test_the_probe_prompts_tokens_are_those_of_any_client(fleet):
    requests = prompts("target", count=2, max_tokens=16)
    probe = run_probe(fleet.url, requests)
    assert [list(ids) for ids in probe.token_ids] == [
        r.token_ids for r in drive_sync(fleet.url, requests, concurrency=1)
    ]


def test_a_server_that_cannot_start_says_why(tmp_path):
    server = VllmServer(model=tmp_path / "no-target", drafter=None, port=free_port(), log=tmp_path / "log")
    with pytest.raises(LaunchError, match="before it was healthy") as caught:
        server.start()
    assert str(tmp_path / "log") in str(caught.value) and server.pid is None
