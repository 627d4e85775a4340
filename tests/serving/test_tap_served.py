"""A real server: every route's exact ids without being asked, answers as without a tap, and nothing lost at its end."""

import json
import re
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tiny import tiny_drafter, tiny_target

from pipeline.canonical import canonical_request
from pipeline.render import Renderer
from serving.launch import VllmServer
from serving.tap.replies import read_reply
from serving.tap.responses import read_response

KEEP = {"X-Tenant": "acme"}
MODEL = "m"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("tapped")
    target = tiny_target(root / "target", favourite=433)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = VllmServer(
        model=target,
        drafter=tiny_drafter(root / "1", target, proposes=433),
        port=port,
        log=root / "server.log",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        served_name=MODEL,
        tap_dir=root / "traffic",
        tap_consent="tenant:acme",
        env={
            "OMP_NUM_THREADS": "1",
            "SLIPSTREAM_TAP_TENANT_HEADER": "X-Tenant",
            "SLIPSTREAM_TAP_TARGET": "f00d",
            "SLIPSTREAM_TAP_FILE_MINUTES": "0.02",
        },
    )
    server.start()
    yield SimpleNamespace(server=server, url=server.base_url, folder=root / "traffic", target=target, sent=[])
    server.stop()


def post(served, path, body, headers=KEEP):
    data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    request = urllib.request.Request(served.url + path, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=120) as answer:
        body = answer.read()
    served.sent.extend([path] if headers else [])
    return body


def records(served):
    """The records so far, once there is one of every request that was to be tapped."""
    count = len(served.sent)
    deadline = time.monotonic() + 30
    while True:
        lines = [line for path in sorted(served.folder.glob("*.jsonl")) for line in path.read_bytes().split(b"\n")[:-1]]
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        assert time.monotonic() < deadline, f"{len(lines)} records, expected {count}; {served.server.log_tail()}"
        time.sleep(0.05)


def metric(served, name):
    with urllib.request.urlopen(f"{served.url}/slipstream/tap/metrics", timeout=30) as answer:
        return float(re.search(rf'="{name}"}} (\S+)', answer.read().decode()).group(1))


def answer(path, body, *, stream):
    """What an answer says: its bytes but for ids and times, or, since the events of a stream hold as many tokens as
    were ready, what these add up to."""
    if not stream:
        return re.sub(rb'"(id|item_id)":\s*"[^"]*"|"(created|created_at|completed_at)":\s*[\d.]+', b"", body)
    read = read_response if path == "/v1/responses" else read_reply
    return {name: value for name, value in read(body, stream=True).items() if name != "id"}


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
TEXT = {"prompt": "hello", "max_tokens": 9}
RESPONSE = {"input": "hello", "max_output_tokens": 9}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": RESPONSE}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_each_route_has_its_exact_ids_ends_and_counts_on_record_unasked(served, path, stream):
    asked = ROUTES[path]
    returns_ids = path != "/v1/responses"
    plain = json.loads(post(served, path, {**asked, "return_token_ids": True} if returns_ids else asked, headers={}))
    tapped = post(served, path, {**asked, "stream": stream})
    assert b"token_ids" not in tapped.replace(b'"prompt_token_ids":null', b"").replace(b'"token_ids":null', b"")
    record = records(served)[-1]
    reply = record["response"]
    (choice,) = reply["choices"]
    if returns_ids:
        theirs = plain["choices"][0]
        assert choice["token_ids"] == theirs["token_ids"]
        assert reply["prompt_token_ids"] == (plain.get("prompt_token_ids") or theirs["prompt_token_ids"])
        assert (reply["text"], reply["finish_reason"]) == (
            theirs.get("text") or theirs["message"]["content"],
            theirs["finish_reason"],
        )
        spec = plain["metrics"]["speculative_decoding"]
        assert record["acceptance"] == {
            "num_drafts": spec["num_spec_steps"],
            "num_draft_tokens": spec["num_draft_tokens"],
            "num_accepted_tokens": spec["num_accepted_draft_tokens"],
        }
    else:
        assert reply["text"] == "".join(
            part["text"] for item in plain["output"] if item["type"] == "message" for part in item["content"]
        )
        assert record["acceptance"]["num_drafts"] > 0
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) == 9
    assert reply["finish_reason"] == "length" and record["target"] == "f00d"
    if path != "/v1/completions":
        renderer = Renderer(served.target)
        assert renderer.prompt_ids(json.loads(canonical_request(record).messages)) == reply["prompt_token_ids"]


def test_a_response_of_items_is_the_chat_that_the_server_rendered(served):
    given = [
        {"role": "user", "content": "Where is order 7?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Hamburg."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And order 8?"}]},
    ]
    post(served, "/v1/responses", {"input": given, "instructions": "Be brief", "max_output_tokens": 5})
    record = records(served)[-1]
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "user"]
    rendered = Renderer(served.target).prompt_ids(json.loads(canonical_request(record).messages))
    assert rendered == record["response"]["prompt_token_ids"]


def test_several_prompts_and_choices_have_their_own_ids(served):
    body = {"prompt": [[0, 9, 10], [0, 11, 12]], "n": 2, "max_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    plain = json.loads(post(served, "/v1/completions", {**body, "seed": 3, "return_token_ids": True}))
    reply = records(served)[-1]["response"]
    assert [choice["token_ids"] for choice in reply["choices"]] == [one["token_ids"] for one in plain["choices"]]
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[0, 9, 10]] * 2 + [[0, 11, 12]] * 2
    post(served, "/v1/chat/completions", {**CHAT, "n": 3, "temperature": 1.0, "stream": True})
    reply = records(served)[-1]["response"]
    assert len(reply["choices"]) == 3 and all(choice["token_ids"] for choice in reply["choices"])


def test_clients_that_choose_one_request_id_get_records_of_their_own(served):
    asked = [
        {**CHAT, "messages": [{"role": "user", "content": "x" * (i + 1)}], "stream": bool(i % 2)} for i in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        same = {**KEEP, "X-Request-Id": "same"}
        list(pool.map(lambda body: post(served, "/v1/chat/completions", body, same), asked))
    renderer = Renderer(served.target)
    found = records(served)[-8:]
    assert sorted(len(record["messages"][0]["content"]) for record in found) == list(range(1, 9))
    for record in found:
        assert record["response"]["prompt_token_ids"] == renderer.prompt_ids(record["messages"])
        assert len(record["response"]["choices"][0]["token_ids"]) == 9


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_the_same_bytes_tapped_or_not(served, path, stream):
    body = {**ROUTES[path], "stream": stream}
    untapped, tapped = (post(served, path, body, headers) for headers in ({}, KEEP))
    assert answer(path, tapped, stream=stream) == answer(path, untapped, stream=stream)


def test_a_client_that_hangs_up_is_counted_and_the_server_goes_on(served):
    before = metric(served, "hung_up")
    body = json.dumps({"model": MODEL, **CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Tenant: acme\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    for _ in range(3):
        with socket.create_connection((served.server.host, served.server.port)) as client:
            client.sendall(head + body)
            assert client.recv(64).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + 30
    while metric(served, "hung_up") < before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert b"choices" in post(served, "/v1/chat/completions", CHAT)


def test_files_are_committed_and_at_the_servers_end_nothing_is_left_open(served):
    post(served, "/v1/chat/completions", CHAT)
    records(served)
    deadline = time.monotonic() + 20
    while list(served.folder.glob("*.open.*")):
        assert time.monotonic() < deadline, "a file grew older than it may"
        time.sleep(0.1)
    for _ in range(5):
        post(served, "/v1/chat/completions", CHAT)
    served.server.stop()
    assert not list(served.folder.glob("*.open.*"))
    assert len(records(served)) == len(served.sent)
