"""Who is let in, from where, how often; and what an order may name."""

import asyncio
import itertools
import json
import os

import httpx
import pytest

from serving.control_access import Access, Rate, Refusal
from serving.errors import ServingError
from serving.swap_order import parse_order
from tests.serving.scripted_engine import TOKEN, ask, build, call, order

WHOLE = {"folder": "/f", "version": "2", "sha256": "0" * 64, "expected_version": "1"}
HEADERS = [(b"authorization", b"Bearer t")]


def refused(action, *arguments):
    with pytest.raises(Refusal) as caught:
        action(*arguments)
    return caught.value.http_status


def admit(environment, *, peer="127.0.0.1", headers=HEADERS):
    try:
        return Access(environment).admit({"client": (peer, 1), "headers": headers})
    except Refusal as refusal:
        return refusal.http_status


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_callers_on_this_machine_are_let_in(peer):
    assert admit({"SLIPSTREAM_CONTROL_TOKEN": "t"}, peer=peer) == peer


@pytest.mark.parametrize("peer", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1", "testclient"])
def test_callers_elsewhere_are_not_unless_their_network_is_named(peer):
    assert admit({"SLIPSTREAM_CONTROL_TOKEN": "t"}, peer=peer) == 403
    named = {"SLIPSTREAM_CONTROL_TOKEN": "t", "SLIPSTREAM_CONTROL_PEERS": "10.0.0.0/8, fe80::/10"}
    assert admit(named, peer=peer) == (403 if peer == "testclient" else peer)
    assert admit(named, peer="127.0.0.1") == 403


def test_a_network_that_cannot_be_read_stops_the_server_at_its_start():
    with pytest.raises(ServingError, match="SLIPSTREAM_CONTROL_PEERS=everyone"):
        Access({"SLIPSTREAM_CONTROL_PEERS": "everyone"})


def test_a_token_file_is_read_at_every_call(tmp_path):
    path = tmp_path / "token"
    access = Access({"SLIPSTREAM_CONTROL_TOKEN_FILE": str(path), "SLIPSTREAM_CONTROL_TOKEN": "t"})
    scope = {"client": ("127.0.0.1", 1), "headers": HEADERS}
    assert refused(access.admit, scope) == 503, "a file that is named and missing is no leave to use another token"
    path.write_text("t\n")
    assert access.admit(scope) == "127.0.0.1"
    path.write_text("rotated")
    assert refused(access.admit, scope) == 401
    path.write_text("\n")
    assert refused(access.admit, scope) == 503, "an empty token is none"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"t")],
        [(b"authorization", b"Basic t")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer t "), (b"x", b"")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer t")],
    ],
)
def test_anything_but_the_one_right_header_is_refused(headers):
    assert admit({"SLIPSTREAM_CONTROL_TOKEN": "t"}, headers=headers) == 401


def test_wrong_tokens_run_out_and_the_right_one_still_gets_in():
    access = Access({"SLIPSTREAM_CONTROL_TOKEN": "t"})
    wrong, right = {"client": ("127.0.0.1", 1), "headers": []}, {"client": ("127.0.0.1", 1), "headers": HEADERS}
    assert [refused(access.admit, wrong) for _ in range(7)] == [401] * 5 + [429] * 2
    assert access.admit(right) == "127.0.0.1"


def test_calls_run_out_and_come_back(monkeypatch):
    now = itertools.count(100.0, 0.0)
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    rate = Rate(3, 2.0)
    assert [rate.take("a") for _ in range(4)] == [True, True, True, False]
    assert rate.take("b"), "everyone has their own"
    now = itertools.count(101.0, 0.0)
    assert [rate.take("a") for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "folder",
    [
        "{root}/..",
        "{root}/../secret",
        "{root}/2/../../secret",
        "{root}/link",
        "{root}/link/inner",
        "{root}-other/2",
        "/",
        "/etc/passwd",
        "versions/2",
        "{root}/2\x00",
        "~/2",
        "file://{root}/2",
        "/" + "x/" * 3000,
        "{root}/loop",
    ],
)
def test_no_path_leaves_the_roots(served, tmp_path, folder):
    root = tmp_path / "versions"
    (tmp_path / "secret" / "inner").mkdir(parents=True)
    os.symlink(tmp_path / "secret", root / "link")
    os.symlink(root / "loop", root / "loop")
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | {"folder": folder.format(root=root)})
    assert reply.status_code == 403 and reply.json()["code"] == "root"
    assert "pause" not in served.engine.calls and str(tmp_path) not in reply.json()["reason"]


def test_a_link_to_another_version_is_refused_by_name(served, tmp_path):
    os.symlink(served.drafters["2"], tmp_path / "versions" / "latest")
    folder = str(tmp_path / "versions" / "latest")
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | {"folder": folder})
    assert (reply.status_code, reply.json()["code"]) == (422, "folder")


def test_a_repeated_order_is_refused_even_once_the_old_version_is_back(served):
    epoch = ask(served, "GET", "/slipstream/status").json()["epoch"]
    first = order(served) | {"expected_epoch": epoch}
    assert ask(served, "POST", "/slipstream/swap", body=first).status_code == 200
    assert ask(served, "POST", "/slipstream/swap", body=order(served, "1", "2")).status_code == 200
    again = ask(served, "POST", "/slipstream/swap", body=first)
    assert (again.status_code, again.json()["code"], again.json()["version"]) == (409, "epoch", "1")


def test_of_twenty_swaps_at_once_one_wins(served):
    async def scenario():
        return await asyncio.gather(*(call(served, "POST", "/slipstream/swap", body=order(served)) for _ in range(20)))

    replies = asyncio.run(scenario())
    assert sorted(reply.status_code for reply in replies) == [200] + [409] * 19
    assert served.engine.calls.count("pause") == 1 and not served.engine.paused


def test_a_body_that_says_it_is_too_long_is_refused_unread(served):
    async def scenario():
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            raise AssertionError("read")

        headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-length", b"9999999999")]
        scope = {"type": "http", "method": "POST", "path": "/slipstream/swap", "headers": headers}
        await served.app(scope | {"client": ("127.0.0.1", 1)}, receive, send)
        return sent[0]["status"]

    assert asyncio.run(scenario()) == 413


def test_a_body_that_never_ends_is_given_up(served, monkeypatch):
    monkeypatch.setattr("serving.control.BODY_S", 0.05)

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    async def scenario():
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/slipstream/swap", headers={"Authorization": f"Bearer {TOKEN}"}, content=slow())

    assert asyncio.run(scenario()).status_code == 408


@pytest.mark.parametrize(
    "changes",
    [
        {"pause": "abort"},
        {"prefix_cache": True},
        {"how": "somehow"},
        {"expected_epoch": 3},
        {"allow_changed_outputs": "yes"},
        {"probe": "all"},
        {"probe": [{}]},
        {"probe": [{"prompt": "a", "messages": []}]},
        {"probe": [{"prompt": "a", "max_tokens": 100_000}]},
        {"probe": [{"prompt": "a", "max_tokens": True}]},
        {"probe": [{"prompt": "a"}] * 17},
        {"version": "2\x00"},  # it goes into the environment of the next start
        {"version": "2\n3"},
        {"version": "\ud800"},
        {"version": "v" * 201},
        {"sha256": "0"},
        {"sha256": "A" * 64},
    ],
)
def test_an_order_with_a_setting_that_is_none_is_refused(changes):
    assert parse_order(json.dumps(WHOLE).encode()).version == "2"
    body = WHOLE | changes
    assert refused(parse_order, json.dumps(body).encode()) == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 60_000, b'{"folder": "/f"}'])
def test_a_body_that_is_no_order_is_refused(body):
    assert refused(parse_order, body) == 400


def test_the_address_of_a_caller_who_may_not_call_is_asked_for_no_token(served, monkeypatch, drafters):
    monkeypatch.setenv("SLIPSTREAM_CONTROL_PEERS", "192.0.2.0/24")
    reply = ask(build(drafters), "GET", "/slipstream/status", token=None)
    assert reply.status_code == 403
