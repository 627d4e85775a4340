"""What goes wrong in the middle of a swap, scripted: the old drafter serves, or the replica is started again."""

import asyncio
import json
import signal

import pytest

from serving.kept_drafter import KEEP_ENV, SUPERVISOR_ENV, Kept, KeptDrafter, Supervised, read_kept
from tests.serving.scripted_engine import IN_PLACE, ask, build, call, order, steps, until

GENERATE = ("POST", "/v1/chat/completions")


def test_new_requests_wait_until_the_probes_have_passed(served):
    async def scenario():
        served.engine.swap_gate = asyncio.Event()
        swap = asyncio.create_task(call(served, "POST", "/slipstream/swap", body=order(served)))
        await until(lambda: "slipstream_swap" in served.engine.calls)
        asked = asyncio.create_task(call(served, *GENERATE, body={}))
        seen = await call(served, "GET", "/health")
        await asyncio.sleep(0.05)
        waiting, calls_so_far = not asked.done(), steps(served)
        served.engine.swap_gate.set()
        return await swap, await asked, seen, waiting, calls_so_far

    swap, asked, seen, waiting, calls_so_far = asyncio.run(scenario())
    assert waiting and calls_so_far.count("probe") == 2
    assert (swap.status_code, asked.status_code, seen.status_code) == (200, 204, 204)


@pytest.mark.parametrize("fault", ["other tokens", "no drafts", "probe fails"])
def test_a_drafter_that_fails_its_probes_is_put_back_before_anyone_reaches_it(served, fault):
    if fault == "other tokens":
        served.engine.replies["2"] = [7, 8, 9, 9, 9, 9, 9, 9]
    elif fault == "no drafts":
        served.engine.drafts = False
    else:
        served.engine.replies["2"] = [7]
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 500 and "version 1 serves again on every worker" in reply.json()["reason"]
    assert [w["version"] for w in served.engine.workers] == ["1", "1"]
    assert not served.engine.paused and ask(served, *GENERATE, body={}).status_code == 204


def test_in_half_precision_probes_may_move(served):
    served.engine.vllm_config.model_config.dtype = "torch.bfloat16"
    served.engine.replies["2"] = [7, 8, 9, 9, 9, 9, 9, 9]
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 200 and reply.json()["probe"]["changed_outputs"] == 2
    strict = order(served, "1", "2") | {"allow_changed_outputs": False}
    assert ask(served, "POST", "/slipstream/swap", body=strict).status_code == 500


def test_an_engine_that_cannot_answer_with_the_old_drafter_is_not_swapped(served):
    served.engine.replies["1"] = []
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 409 and "with the old drafter already" in reply.json()["reason"]
    assert "pause" not in steps(served)


def test_a_drain_lets_requests_end_and_one_that_takes_too_long_is_refused(served, monkeypatch, drafters):
    assert ask(served, "POST", "/slipstream/swap", body=order(served) | {"pause": "drain"}).status_code == 200
    assert "pause wait" in steps(served) and "pause" not in steps(served)
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "0.1")
    slow = build(drafters)
    slow.engine.swap_gate = asyncio.Event()
    reply = ask(slow, "POST", "/slipstream/swap", body=order(slow) | {"pause": "drain"})
    assert reply.status_code == 500 and "did not end in 0.1 s" in reply.json()["reason"]
    assert not slow.engine.paused and slow.engine.workers[0]["version"] == "1"
    assert "slipstream_swap" not in slow.engine.calls


def test_an_answer_to_an_earlier_call_is_no_answer(supervised):
    # After a failed call the other ranks' replies stay queued in vLLM's executor, and the next call reads them.
    supervised.engine.left_behind = {"status": "ok", **supervised.engine.workers[1], "rank": 1, "call": "earlier"}

    async def scenario():
        reply = await call(supervised, "GET", "/slipstream/status")
        await until(lambda: supervised.restarts)
        return reply, await call(supervised, *GENERATE, body={}), await call(supervised, "GET", "/health")

    reply, asked, health = asyncio.run(scenario())
    assert reply.status_code == 503 and "earlier call" in reply.json()["reason"]
    assert (asked.status_code, health.status_code) == (503, 503)
    assert asked.headers["retry-after"] == "5"


def test_a_swap_call_that_fails_after_some_workers_swapped_is_found_out_and_put_back(served):
    swap = served.engine._swap

    def break_after_the_first(rank, worker, *order):
        answer = swap(rank, worker, *order)
        if rank == 0 and order[1] == "2":
            raise RuntimeError("connection lost")
        return answer

    served.engine._swap = break_after_the_first
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 500 and "connection lost" in reply.json()["reason"]
    assert [w["version"] for w in served.engine.workers] == ["1", "1"] and not served.engine.paused


def test_a_worker_that_hangs_has_the_replica_started_again_with_the_old_drafter(supervised, drafters, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "0.1")
    slow = build(drafters)

    async def scenario():
        slow.engine.swap_gate = asyncio.Event()
        reply = await call(slow, "POST", "/slipstream/swap", body=order(slow))
        await until(lambda: supervised.restarts)
        return reply, await call(slow, *GENERATE, body={})

    reply, asked = asyncio.run(scenario())
    assert reply.status_code == 503 and "started again with version 1" in reply.json()["reason"]
    assert asked.status_code == 503, "nobody can say what this engine serves"
    old = slow.engine.workers[0]
    assert read_kept(supervised.keep) == Kept(KeptDrafter(old["folder"], "1", old["sha256"]))


def test_an_old_drafter_that_cannot_be_put_back_everywhere_ends_in_a_restart(supervised):
    supervised.engine.broken_workers = (1,)

    def never_back(rank, worker, swap, version, num_swaps, call):
        return {"status": "failed", **worker, "reason": "no memory", "rank": rank, "call": call}

    supervised.engine._put_back = never_back

    async def scenario():
        reply = await call(supervised, "POST", "/slipstream/swap", body=order(supervised))
        await until(lambda: supervised.restarts)
        return reply

    assert asyncio.run(scenario()).status_code == 503
    assert read_kept(supervised.keep).serve.version == "1"


def test_a_drafter_is_kept_for_the_next_start_once_it_has_proved_itself(supervised):
    ask(supervised, "POST", "/slipstream/swap", body=order(supervised))
    assert read_kept(supervised.keep).serve.version == "2"


def test_a_drafter_that_cannot_be_kept_is_put_back(supervised, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("serving.replica_restart.write_kept", full)
    reply = ask(supervised, "POST", "/slipstream/swap", body=order(supervised))
    assert reply.status_code == 500 and "no space left" in reply.json()["reason"]
    assert [w["version"] for w in supervised.engine.workers] == ["1", "1"]


def test_where_in_place_is_not_proven_the_same_order_is_a_restart(supervised):
    not_here = {"how": None, "reason": "this engine captures CUDA graphs; restart it with the new drafter"}
    for worker in supervised.engine.workers:
        worker["swap"] = not_here
    told = ask(supervised, "GET", "/slipstream/status").json()["swap"]
    assert told == {"in_place": False, "how": None, "reason": not_here["reason"], "restart": True}
    refused = ask(supervised, "POST", "/slipstream/swap", body=order(supervised) | {"how": "in_place"})
    assert refused.status_code == 409 and "CUDA graphs" in refused.json()["reason"]

    async def scenario():
        reply = await call(supervised, "POST", "/slipstream/swap", body=order(supervised))
        await until(lambda: supervised.restarts)
        return reply

    reply = asyncio.run(scenario())
    assert (reply.status_code, reply.json()["status"], supervised.restarts) == (202, "restarting", [4711])
    kept = read_kept(supervised.keep)
    assert (kept.serve.version, kept.previous.version) == ("2", "1")
    assert "pause" not in supervised.engine.calls


def test_without_a_supervisor_a_restart_is_refused_with_the_reason(served):
    for worker in served.engine.workers:
        worker["swap"] = {"how": None, "reason": "this engine shards its model"}
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 409
    assert "shards its model" in reply.json()["reason"] and "--keep" in reply.json()["reason"]


def test_two_api_servers_of_one_engine_have_one_winner_and_the_loser_undoes_nothing(served, drafters):
    # Each process has a lock of its own; the workers' compare-and-set is what decides between them.
    other = build(drafters)
    other.state.engine_client = served.engine

    async def scenario():
        served.engine.swap_gate = asyncio.Event()
        asked = order(served) | {"probe": []}
        both = [asyncio.create_task(call(one, "POST", "/slipstream/swap", body=asked)) for one in (served, other)]
        await until(lambda: served.engine.calls.count("slipstream_swap") == 2)
        served.engine.swap_gate.set()
        return await asyncio.gather(*both)

    replies = asyncio.run(scenario())
    assert sorted(reply.status_code for reply in replies) == [200, 409]
    assert [w["version"] for w in served.engine.workers] == ["2", "2"]
    assert [w["num_swaps"] for w in served.engine.workers] == [1, 1] and not served.engine.paused


def test_a_server_whose_workers_lack_the_extension_is_never_asked_for_it(served):
    # A worker that is asked for a method it has not raises, and leaves the other workers' answers behind.
    served.engine.vllm_config.parallel_config.worker_extension_cls = ""
    reply = ask(served, "GET", "/slipstream/status")
    assert reply.status_code == 503 and "--worker-extension-cls" in reply.json()["reason"]
    assert served.engine.calls == [] and ask(served, *GENERATE, body={}).status_code == 204


def test_shards_have_weights_of_their_own_and_agree_on_the_version(served):
    for rank, worker in enumerate(served.engine.workers):
        worker.update(swap={"how": None, "reason": "shards"}, live_fingerprint=f"f{rank}")
    assert ask(served, "GET", "/slipstream/status").json()["status"] == "ok"
    for worker in served.engine.workers:
        worker["swap"] = IN_PLACE
    assert ask(served, "GET", "/slipstream/status").json()["status"] == "failed"


def test_restarts_go_to_the_leader_of_this_group_alone(monkeypatch):
    signals = []
    monkeypatch.setattr("os.kill", lambda *what: signals.append(what))
    monkeypatch.setattr("os.getpgrp", lambda: 5)
    assert Supervised.from_environment({KEEP_ENV: "/k", SUPERVISOR_ENV: "6"}) is None, "an id of another time"
    assert Supervised.from_environment({SUPERVISOR_ENV: "5"}) is None
    Supervised.from_environment({KEEP_ENV: "/k", SUPERVISOR_ENV: "5"}).restart()
    assert signals == [(5, signal.SIGUSR1)]


def test_the_log_says_at_the_start_how_the_drafter_can_be_changed(served, caplog):
    async def startup(scope, receive, send):
        await send({"type": "lifespan.startup.complete"})

    served.endpoint.app = startup
    sent = []

    async def send(message):
        sent.append(message["type"])

    with caplog.at_level("INFO", logger="vllm.slipstream"):
        asyncio.run(served.app({"type": "lifespan"}, None, send))
    assert sent == ["lifespan.startup.complete"]
    assert "drafter 1 serves; it can be swapped: replace" in caplog.text


def test_every_order_is_on_record_with_its_outcome_and_without_the_token(served, tmp_path, monkeypatch, drafters):
    monkeypatch.setenv("SLIPSTREAM_AUDIT_LOG", str(tmp_path / "audit.jsonl"))
    audited = build(drafters)
    ask(audited, "POST", "/slipstream/swap", body=order(audited))
    ask(audited, "POST", "/slipstream/swap", body=order(audited))
    ask(audited, "POST", "/slipstream/swap", content=b"{")
    ask(audited, "GET", "/slipstream/status", token="wrong")
    text = (tmp_path / "audit.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["action"], line["outcome"], line.get("http_status")) for line in lines] == [
        ("swap", "begun", None),  # what a crash in the middle leaves
        ("swap", "ok", 200),
        ("swap", "begun", None),
        ("swap", "refused", 409),
        ("swap", "refused", 400),
        ("admit", "refused", 401),
    ]
    assert lines[0]["version"] == "2" and lines[0]["peer"] == "127.0.0.1" and "version 2 serves" in lines[3]["reason"]
    assert "secret" not in text and "wrong" not in text
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0
