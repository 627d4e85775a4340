"""The way back from a swap, scripted: from memory, on all workers alike, whatever went wrong; and what is refused."""

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.kept_drafter import Kept, KeptDrafter, read_kept, write_kept
from serving.preflight import sha256_file
from serving.replica_restart import ReplicaRestart
from tests.serving.scripted_engine import ask, build, call, order, steps, until

SWAP = ("POST", "/slipstream/swap")
GENERATE = ("POST", "/v1/chat/completions")


def versions(served):
    return [worker["version"] for worker in served.engine.workers]


def test_a_replica_can_be_swapped_again_after_one_worker_of_two_failed(served):
    served.engine.broken_workers = (1,)
    first = order(served) | {"expected_epoch": "aa.0"}
    assert ask(served, *SWAP, body=first).status_code == 500
    now = ask(served, "GET", "/slipstream/status").json()
    assert (now["status"], now["epoch"], now["version"]) == ("ok", "aa.2", "1")
    served.engine.broken_workers = ()
    assert ask(served, *SWAP, body=first).json()["code"] == "epoch", "an order that failed is not taken later"
    assert ask(served, *SWAP, body=order(served)).status_code == 200


def test_the_way_back_needs_no_disk(served):
    served.engine.replies["2"] = [7]
    generate = served.engine.generate

    def lose_the_old_folder(*arguments):
        if versions(served) == ["2", "2"]:
            shutil.rmtree(served.drafters["1"], ignore_errors=True)
        return generate(*arguments)

    served.engine.generate = lose_the_old_folder
    reply = ask(served, *SWAP, body=order(served))
    assert reply.status_code == 500 and "version 1 serves again on every worker" in reply.json()["reason"]
    assert versions(served) == ["1", "1"] and not served.drafters["1"].exists()
    assert steps(served).count("slipstream_swap") == 1


@pytest.mark.parametrize("broken", ["slipstream_commit", "keep"])
def test_an_error_that_nobody_foresaw_leaves_no_unproven_drafter_behind_an_open_door(served, monkeypatch, broken):
    def surprise(*_):
        raise RuntimeError("a surprise")

    if broken == "keep":
        monkeypatch.setattr(ReplicaRestart, "keep", surprise)
        assert ask(served, *SWAP, body=order(served)).status_code == 500
        assert versions(served) == ["1", "1"] and not served.engine.paused
        assert ask(served, *GENERATE, body={}).status_code == 204
        return
    served.engine.fail_on = broken  # workers that do not answer: nobody can say what serves
    assert ask(served, *SWAP, body=order(served)).status_code == 503
    assert ask(served, *GENERATE, body={}).status_code == 503


def test_while_a_restart_is_on_its_way_no_other_order_is_taken(supervised):
    async def scenario():
        first = await call(supervised, *SWAP, body=order(supervised) | {"how": "restart"})
        return first, await call(supervised, *SWAP, body=order(supervised))

    first, second = asyncio.run(scenario())
    assert (first.status_code, second.status_code, second.json()["code"]) == (202, 503, "shut")
    assert read_kept(supervised.keep).previous.version == "1" and versions(supervised) == ["1", "1"]


def test_an_engine_that_somebody_paused_is_neither_swapped_nor_resumed(served):
    served.engine.paused = True
    reply = ask(served, *SWAP, body=order(served))
    assert (reply.status_code, reply.json()["code"]) == (409, "paused")
    assert steps(served) == [] and served.engine.paused


@pytest.mark.parametrize("same", ["name", "folder"])
def test_a_version_is_one_folder_with_one_content_for_good(served, same):
    # vllm-project/vllm 32718: a reload that gives what was cached, since the folder was overwritten.
    asked = order(served)
    if same == "name":
        asked["version"] = "1"
    else:
        shutil.copy(served.drafters["2"] / "model.safetensors", served.drafters["1"] / "model.safetensors")
        asked["folder"] = str(served.drafters["1"])
    reply = ask(served, *SWAP, body=asked)
    assert (reply.status_code, reply.json()["code"]) == (409, "immutable")
    assert steps(served) == [] and versions(served) == ["1", "1"]


def test_a_server_may_go_back_to_the_folder_that_it_was_started_from_and_to_no_other(served, tmp_path):
    elsewhere = shutil.copytree(served.drafters["1"], tmp_path / "elsewhere" / "1")
    for worker in served.engine.workers:
        worker["folder"] = str(elsewhere)
    back = order(served, "1", "2") | {"folder": str(elsewhere)}
    assert ask(served, *SWAP, body=order(served)).status_code == 200
    beside = shutil.copytree(elsewhere, tmp_path / "elsewhere" / "beside")
    assert ask(served, *SWAP, body=back | {"folder": str(beside)}).json()["code"] == "root"
    shutil.copy(served.drafters["2"] / "model.safetensors", elsewhere / "model.safetensors")
    other = back | {"sha256": sha256_file(elsewhere / "model.safetensors"), "version": "3"}
    assert ask(served, *SWAP, body=other).json()["code"] == "root"
    shutil.copy(served.drafters["1"] / "model.safetensors", elsewhere / "model.safetensors")
    assert ask(served, *SWAP, body=back).status_code == 200


def test_what_is_kept_stays_what_it_was_when_it_could_not_be_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    restart = ReplicaRestart(None, SimpleNamespace(path=path), drain_s=1)
    first, second = KeptDrafter("/v/1", "1", "a"), KeptDrafter("/v/2", "2", "b")
    is_open, fsync = os.open, os.fsync
    folders, failing = [], []

    def remember(name, *arguments, **settings):
        number = is_open(name, *arguments, **settings)
        folders.append(number) if Path(name).is_dir() else None
        return number

    def fail_once_on_the_folder(number):
        if number in folders and failing:
            failing.clear()
            raise OSError("no power-safe rename")
        fsync(number)

    monkeypatch.setattr("os.open", remember)
    monkeypatch.setattr("os.fsync", fail_once_on_the_folder)
    for before in (None, Kept(first)):
        if before is not None:
            write_kept(path, before)
        failing.append(True)
        assert "no power-safe rename" in restart.keep(second)
        assert read_kept(path) == before


def test_records_are_not_labelled_with_a_drafter_that_has_not_proved_itself(served):
    async def scenario():
        generate, gate = served.engine.generate, asyncio.Event()
        served.engine.replies["2"] = [7]

        async def waiting(*arguments):
            if versions(served) == ["2", "2"]:
                await gate.wait()
            async for output in generate(*arguments):
                yield output

        served.engine.generate = waiting
        swap = asyncio.create_task(call(served, *SWAP, body=order(served)))
        await until(lambda: versions(served) == ["2", "2"] and "resume" in served.engine.calls)
        told = await call(served, "GET", "/slipstream/status")
        labelled = served.state.slipstream_drafter_version
        gate.set()
        return (await swap).status_code, told.json(), labelled

    code, told, labelled = asyncio.run(scenario())
    assert (code, told["door"], told["swapping"], labelled) == (500, "closed", True, "1")
    assert served.state.slipstream_drafter_version == "1"


@pytest.mark.parametrize("hangs", ["is_paused", "reset_prefix_cache"])
def test_an_engine_that_does_not_answer_holds_nobody_for_ever(served, monkeypatch, drafters, hangs):
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "0.1")
    slow = build(drafters)

    async def never():
        await asyncio.sleep(100)

    setattr(slow.engine, hangs, never)
    path = ("GET", "/slipstream/status") if hangs == "is_paused" else ("POST", "/slipstream/reset")
    assert ask(slow, *path).status_code == 503


@pytest.mark.timeout(100)
def test_a_call_to_an_engine_that_died_ends_at_once(supervised):
    # vLLM leaves it unanswered, and its server, which ends itself, waits for every request before that.
    rpc = supervised.engine.collective_rpc

    async def die_in_the_swap(method, args=()):
        if method == "slipstream_swap":
            supervised.engine.errored = True
        if getattr(supervised.engine, "errored", False):
            await asyncio.sleep(1000)
        return await rpc(method, args)

    supervised.engine.collective_rpc = die_in_the_swap

    async def scenario():
        swap = await call(supervised, *SWAP, body=order(supervised))
        await until(lambda: supervised.restarts)
        return swap, await call(supervised, "GET", "/slipstream/status")

    swap, told = asyncio.run(scenario())
    assert (swap.status_code, told.status_code) == (503, 503) and "the engine died" in told.json()["reason"]
    assert read_kept(supervised.keep).serve.version == "1" and len(supervised.restarts) == 1


def test_all_probes_together_have_the_time_of_one_step(served, monkeypatch, drafters):
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "2")
    slow = build(drafters)
    generate = slow.engine.generate

    async def slower(*arguments):
        await asyncio.sleep(0.5)
        async for output in generate(*arguments):
            yield output

    slow.engine.generate = slower
    probes = [{"prompt": [1, 2], "max_tokens": 8}] * 16
    reply = ask(slow, *SWAP, body=order(slow) | {"probe": probes})
    assert reply.status_code == 409 and "no answers in 2 s" in reply.json()["reason"]


def test_a_cache_that_cannot_be_emptied_is_left_behind_or_the_swap_fails(served, monkeypatch):
    # NeMo-RL PR 4018 and others: the reset is accepted and does nothing.
    served.engine.can_empty = False
    reply = ask(served, *SWAP, body=order(served) | {"prefix_cache": "clear"}).json()
    assert (reply["prefix_cache_reset"], reply["prefix_cache_salted"]) == (False, True)
    assert served.engine.slipstream_cache_salt == "aa.1"
    monkeypatch.setattr("serving.engine.version_salt.is_possible", lambda _: False)
    refused = ask(served, *SWAP, body=order(served, "1", "2") | {"prefix_cache": "clear"})
    assert refused.status_code == 500 and "neither be emptied nor told apart" in refused.json()["reason"]
    assert versions(served) == ["2", "2"]


def test_every_salted_swap_has_a_salt_of_its_own(served):
    salts = []
    for new, old in (("2", "1"), ("1", "2"), ("2", "1")):
        assert ask(served, *SWAP, body=order(served, new, old) | {"prefix_cache": "salt"}).status_code == 200
        salts.append(served.engine.slipstream_cache_salt)
    assert len(set(salts)) == 3, "between two times of a version another one wrote under its name"


@pytest.mark.timeout(60)
def test_a_configuration_that_never_ends_is_not_read(served):
    (served.drafters["2"] / "config.json").unlink()
    os.mkfifo(served.drafters["2"] / "config.json")
    reply = ask(served, *SWAP, body=order(served))
    assert (reply.status_code, reply.json()["code"]) == (422, "config_unreadable")


def test_a_check_that_takes_too_long_is_given_up_with_the_engine_untouched(served, monkeypatch, drafters):
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "0.2")
    slow = build(drafters)

    def hang(*_, **__):
        import time

        time.sleep(1)

    monkeypatch.setattr("serving.swap_check.check_drafter", hang)
    reply = ask(slow, *SWAP, body=order(slow))
    assert (reply.status_code, reply.json()["code"]) == (503, "slow")
    assert steps(slow) == []


def test_the_workers_read_the_files_before_the_door_closes_and_may_refuse_them(served):
    served.engine.checks = ["running", "running", "refused"]
    reply = ask(served, *SWAP, body=order(served))
    assert reply.status_code == 409 and "sha256" in reply.json()["reason"]
    assert steps(served) == [] and served.engine.calls.count("slipstream_check") == 3


def test_workers_that_read_for_too_long_are_not_waited_for(served, monkeypatch, drafters):
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "0.5")
    slow = build(drafters)
    slow.engine.checks = ["running"] * 1000
    assert ask(slow, *SWAP, body=order(slow)).status_code == 503
    assert steps(slow) == [] and slow.endpoint.door.state == "open"


def test_at_whatever_step_a_server_is_killed_it_comes_up_with_a_drafter_that_proved_itself(supervised):
    # What is kept is what the supervisor starts with; before the first swap it is the command line's drafter.
    kept, rpc, generate = [], supervised.engine.collective_rpc, supervised.engine.generate

    def note(name):
        now = read_kept(supervised.keep)
        kept.append((name, now.serve.version if now else "1"))

    async def noted_rpc(method, args=()):
        note(method)
        answers = await rpc(method, args)
        note(method)
        return answers

    async def noted_generate(*arguments):
        note("probe")
        async for output in generate(*arguments):
            yield output
        note("probe")

    supervised.engine.collective_rpc, supervised.engine.generate = noted_rpc, noted_generate
    assert ask(supervised, *SWAP, body=order(supervised)).status_code == 200
    proved = max(i for i, (name, _) in enumerate(kept) if name == "probe")
    assert {version for _, version in kept[: proved + 1]} == {"1"}
    assert [name for name, version in kept if version == "2"] == ["slipstream_commit"] * 2


def test_an_old_drafter_that_is_back_and_answers_nothing_is_a_lost_engine(supervised, caplog):
    # areal-project/AReaL 1160: after a failed update generation stays paused for ever.
    supervised.engine.broken_workers = (0, 1)
    resumed = supervised.engine.resume_generation

    async def resume_and_generate_nothing():
        await resumed()
        supervised.engine.replies["1"] = []

    supervised.engine.resume_generation = resume_and_generate_nothing

    async def scenario():
        reply = await call(supervised, *SWAP, body=order(supervised))
        await until(lambda: supervised.restarts)
        return reply

    reply = asyncio.run(scenario())
    assert reply.status_code == 503 and "got 0 tokens" in reply.json()["reason"]
    assert any(record.levelname == "ERROR" and '"http_status": 503' in record.message for record in caplog.records)


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_has_others_to_answer_first_is_not_taken_for_a_lost_one(served, monkeypatch, drafters, busy):
    monkeypatch.setenv("SLIPSTREAM_SWAP_TIMEOUT_S", "0.5")
    slow = build(drafters)
    slow.engine.broken_workers = (0, 1)
    slow.endpoint.door.inside = int(busy)
    resumed, generate = slow.engine.resume_generation, slow.engine.generate

    async def slower(*arguments):
        await asyncio.sleep(5)
        async for output in generate(*arguments):
            yield output

    async def resume_and_be_slow():
        await resumed()
        slow.engine.generate = slower

    slow.engine.resume_generation = resume_and_be_slow
    assert ask(slow, *SWAP, body=order(slow)).status_code == (500 if busy else 503)
    assert slow.endpoint.door.state == ("open" if busy else "shut")
