"""What the endpoint does when a server starts, wakes or is lost; and what it makes of odd connections."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from serving.control_access import Access, Refusal
from serving.kept_drafter import PROVE_ENV, read_kept
from tests.serving.scripted_engine import TOKEN, ask, build, call, order, steps

GENERATE = ("POST", "/v1/chat/completions")


def begun(served):
    """What the server is told of its start."""
    sent = []

    async def startup(scope, receive, send):
        await send({"type": "lifespan.startup.complete"})

    async def send(message):
        sent.append(message["type"])

    served.endpoint.app = startup
    asyncio.run(served.app({"type": "lifespan"}, None, send))
    return sent


def test_a_supervisor_is_told_that_its_server_is_up(supervised):
    assert begun(supervised) == ["lifespan.startup.complete"]
    assert supervised.came_up == [4711] and steps(supervised) == [], "what served before proves nothing"


@pytest.mark.parametrize("fault", [None, "no drafts", "probe fails", "worker does not know"])
def test_after_a_restart_with_a_new_drafter_nothing_is_served_before_it_drafts(
    supervised, monkeypatch, drafters, fault
):
    monkeypatch.setenv(PROVE_ENV, "1")
    new = SimpleNamespace(**vars(build(drafters)), came_up=supervised.came_up)
    for worker in new.engine.workers:
        worker.update(version="2")
    if fault == "no drafts":
        new.engine.drafts = False
    elif fault == "probe fails":
        new.engine.replies["2"] = [7]
    elif fault is not None:
        new.engine.fail_on = "slipstream_status"
    assert begun(new) == ["lifespan.startup.failed" if fault else "lifespan.startup.complete"]
    assert new.came_up == ([] if fault else [4711])


def woken(served, *, lost=True):
    """What an engine's clients see when it wakes, its drafter's weights lost; the calls of the engine until then."""
    state = {"lost": lost, "awake": asyncio.Event()}
    rpc = served.engine.collective_rpc

    async def collective_rpc(method, args=()):
        if method == "slipstream_swap":
            state["lost"] = False
        answers = await rpc(method, args)
        if method == "slipstream_status" and args[1] and state["lost"]:
            answers = [answer | {"status": "failed", "reason": "no longer version 1's"} for answer in answers]
        return answers

    async def inner(scope, receive, send):
        if scope["path"] == "/wake_up":
            state["awake"].set()
            await asyncio.sleep(0.05)
        else:
            served.engine.calls.append("request")
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def scenario():
        waking = asyncio.create_task(call(served, "POST", "/wake_up", body={}))
        await state["awake"].wait()
        reply = await call(served, *GENERATE, body={})
        await waking
        return reply.status_code

    served.engine.collective_rpc, served.endpoint.app = collective_rpc, inner
    return asyncio.run(scenario()), steps(served)


def test_an_engine_that_woke_without_its_drafter_has_it_again_before_anyone_asks(served):
    # vllm-project/vllm PR 52487: after a deep sleep the drafter's weights are not restored.
    code, calls = woken(served)
    assert (code, calls) == (204, ["slipstream_swap", "slipstream_commit", "request"])
    assert [w["version"] for w in served.engine.workers] == ["1", "1"]


@pytest.mark.parametrize("in_part", [False, True])
def test_an_engine_that_woke_whole_or_in_part_is_left_alone(served, in_part):
    served.engine.sleeping = in_part  # what still sleeps cannot be read
    assert woken(served, lost=in_part) == (204, ["request"])


def test_where_a_drafter_cannot_be_loaded_again_the_replica_is_started_again(supervised):
    for worker in supervised.engine.workers:
        worker["swap"] = {"how": None, "reason": "this engine captures CUDA graphs"}

    code, calls = woken(supervised)
    assert (code, calls) == (503, [])
    assert read_kept(supervised.keep).serve.version == "1"


def test_a_websocket_is_not_let_into_an_engine_that_is_lost(served):
    served.endpoint.door.shut_down("lost")
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(served.app({"type": "websocket", "path": "/v1/realtime"}, None, send))
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1013)]


@pytest.mark.parametrize("root_path", ["", "/models/a"])
def test_a_server_under_a_root_path_is_the_same_server(served, root_path):
    async def get(path, headers=()):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": root_path + path, "root_path": root_path}
        await served.app(scope | {"headers": list(headers), "client": ("127.0.0.1", 1)}, None, send)
        return sent[0]["status"]

    async def scenario():
        allowed = await get("/slipstream/status", [(b"authorization", f"Bearer {TOKEN}".encode())])
        refused = await get("/slipstream/status")
        served.endpoint.door.shut_down("lost")
        return allowed, refused, await get("/health"), await get("/metrics")

    assert asyncio.run(scenario()) == (200, 401, 503, 204)


def test_a_length_of_five_thousand_digits_is_too_long(served):
    async def scenario():
        sent = []

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-length", b"9" * 5000)]
        scope = {"type": "http", "method": "POST", "path": "/slipstream/swap", "headers": headers}
        await served.app(scope | {"client": ("127.0.0.1", 1)}, None, send)
        return sent[0]["status"]

    assert asyncio.run(scenario()) == 413


def test_a_token_that_ends_in_a_newline_is_the_one_before_it():
    access = Access({"SLIPSTREAM_CONTROL_TOKEN": "t\n"})
    assert access.admit({"client": ("127.0.0.1", 1), "headers": [(b"authorization", b"Bearer t")]}) == "127.0.0.1"


def test_callers_from_elsewhere_are_on_record_and_cannot_fill_it(tmp_path):
    access = Access({"SLIPSTREAM_CONTROL_TOKEN": "t", "SLIPSTREAM_AUDIT_LOG": str(tmp_path / "audit")})
    for _ in range(50):
        with pytest.raises(Refusal):
            access.admit({"client": ("10.0.0.7", 1), "headers": []})
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["peer"], line["http_status"]) for line in lines] == [("10.0.0.7", 403)] * 5


def test_an_order_is_whole_when_it_comes_in_pieces(served):
    body = json.dumps(order(served)).encode()

    async def pieces():
        for i in range(0, len(body), 40):
            yield body[i : i + 40]

    async def scenario():
        return await call(served, "POST", "/slipstream/swap", content=pieces())

    assert asyncio.run(scenario()).status_code == 200
    assert ask(served, "GET", "/slipstream/status").json()["version"] == "2"
