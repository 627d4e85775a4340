"""The control endpoint over a scripted engine client: who may swap, what is refused, and that it always resumes."""

import asyncio

import pytest

from tests.serving.scripted_engine import TOKEN, ask, build, call, order, steps, until


def test_the_prefix_cache_is_emptied_on_request(served):
    reply = ask(served, "POST", "/slipstream/reset", body={})
    assert (reply.status_code, reply.json()["prefix_cache_reset"]) == (200, True)
    assert served.engine.calls == ["reset"]
    assert ask(served, "POST", "/slipstream/reset", body={}, token="another").status_code == 401


PROBED = ["probe", "probe"]


def test_a_swap_probes_pauses_swaps_resets_resumes_and_probes_in_this_order(served):
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | {"prefix_cache": "clear"})
    assert reply.status_code == 200
    body = reply.json()
    assert (body["version"], body["previous"], body["live_fingerprint"]) == ("2", "1", ["f2", "f2"])
    assert body["pause_s"] >= 0 and body["prefix_cache_reset"] is True
    assert steps(served) == [*PROBED, "pause", "slipstream_swap", "reset", "resume", *PROBED, "slipstream_commit"]
    assert body["probe"]["after"] == {"num_steps": 6, "num_accepted_tokens": 2}
    assert (body["how"], body["epoch"]) == ("in_place", "aa.1")
    assert served.state.slipstream_drafter_version == "2"


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
def test_without_the_token_nothing_is_answered(served, token):
    for method, path in (("GET", "/slipstream/status"), ("POST", "/slipstream/swap")):
        assert ask(served, method, path, token=token).status_code == 401
    assert served.engine.calls == []


def test_without_a_configured_token_the_endpoint_is_off(drafters, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_CONTROL_TOKEN", raising=False)
    served = build(drafters)
    reply = ask(served, "GET", "/slipstream/status", token="")
    assert reply.status_code == 503 and "not configured" in reply.json()["reason"]


def test_other_routes_pass_through(served):
    assert ask(served, "GET", "/v1/models").status_code == 204
    assert ask(served, "GET", "/slipstream/other").status_code == 404


@pytest.mark.parametrize(
    ("http_status", "changes"),
    [
        (409, {"expected_version": "9"}),
        (409, {"sha256": "0" * 64}),
        (403, {"folder": "/etc"}),
        (403, {"folder": "versions/2"}),
        (400, {"version": ""}),
        (400, {"version": 2}),
        (400, {"extra": "x"}),
    ],
)
def test_an_order_that_cannot_be_right_is_refused_before_the_engine_pauses(served, http_status, changes):
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | changes)
    assert reply.status_code == http_status and reply.json()["status"] == "refused"
    assert "pause" not in served.engine.calls


def test_a_path_that_climbs_out_of_the_allowed_folder_is_refused(served):
    folder = str(served.drafters["2"].parent / ".." / ".." / "elsewhere")
    assert ask(served, "POST", "/slipstream/swap", body=order(served) | {"folder": folder}).status_code == 403


def test_a_body_that_is_too_large_or_no_json_is_refused(served):
    assert ask(served, "POST", "/slipstream/swap", content=b"x" * 70_000).status_code == 413
    assert ask(served, "POST", "/slipstream/swap", content=b"{").status_code == 400


def test_preflight_runs_before_the_engine_pauses_and_names_its_check(served):
    (served.drafters["2"] / "model.bin").write_bytes(b"x")
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert (reply.status_code, reply.json()["code"]) == (422, "pickle")
    assert "pause" not in served.engine.calls


@pytest.mark.parametrize("step", ["pause", "slipstream_swap", "reset"])
def test_the_engine_resumes_whatever_breaks(served, step):
    served.engine.fail_on = step
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | {"prefix_cache": "clear"})
    assert reply.status_code == 500 and "broke" in reply.json()["reason"]
    assert served.engine.paused is False and served.engine.calls.count("resume") == 1
    assert [w["version"] for w in served.engine.workers] == ["1", "1"]
    assert ask(served, "GET", "/slipstream/status").json()["door"] == "open"


def test_when_one_worker_fails_the_others_go_back(served):
    served.engine.broken_workers = (1,)
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 500
    assert "worker 1: no memory" in reply.json()["reason"] and "serves again" in reply.json()["reason"]
    assert [w["version"] for w in served.engine.workers] == ["1", "1"]
    assert reply.json()["version"] == "1" and not served.engine.paused


def test_a_caller_that_hangs_up_does_not_leave_the_engine_paused(served):
    async def scenario():
        served.engine.swap_gate = asyncio.Event()
        request = asyncio.create_task(call(served, "POST", "/slipstream/swap", body=order(served)))
        await until(lambda: "slipstream_swap" in served.engine.calls)
        request.cancel()
        await asyncio.sleep(0.01)
        served.engine.swap_gate.set()
        await until(lambda: "resume" in served.engine.calls)

    asyncio.run(scenario())
    assert not served.engine.paused and served.engine.workers[0]["version"] == "2"


def test_a_second_swap_at_the_same_time_is_refused(served):
    async def scenario():
        served.engine.swap_gate = asyncio.Event()
        first = asyncio.create_task(call(served, "POST", "/slipstream/swap", body=order(served)))
        await until(lambda: "slipstream_swap" in served.engine.calls)
        second = await call(served, "POST", "/slipstream/swap", body=order(served))
        served.engine.swap_gate.set()
        return await first, second

    first, second = asyncio.run(scenario())
    assert (first.status_code, second.status_code) == (200, 409)
    assert served.engine.calls.count("pause") == 1


def test_status_tells_when_workers_disagree(served):
    assert ask(served, "GET", "/slipstream/status").json()["status"] == "ok"
    served.engine.workers[1]["live_fingerprint"] = "other"
    assert ask(served, "GET", "/slipstream/status").json()["status"] == "failed"
