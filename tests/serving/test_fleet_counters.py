"""What a rollout reads from vLLM's Prometheus exposition, and answers that it cannot use. The text is as vLLM 0.32
writes it."""

import json
import socket
import threading
import time

import pytest

from serving.errors import DeployError
from serving.fleet.counters import NoCountersError, acceptance_length, parse, scrape, since
from serving.fleet.replicas import Address, Drafter, look, static
from serving.monitor.counters import Counters
from serving.replica import run_probe

EXPOSITION = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="toy"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="toy"} 20.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="toy"} 1.76e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="toy"} 700.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="toy"} 140.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="toy"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="toy"} 30.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="toy",position="0"} 90.0
"""


def counted(num_drafts, num_draft_tokens, num_accepted_tokens, started=None, *, at=0.0):
    return Counters(
        at=at,
        started=started,
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        speculates=True,
    )


def test_the_engines_of_one_replica_are_added_up_and_the_bonus_token_counts():
    found = parse(EXPOSITION, where="here")
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (120, 840, 180)
    assert found.started == 1.76e9
    assert acceptance_length(found) == 2.5
    assert acceptance_length(counted(0, 0, 0)) is None


def test_what_grew_is_told_and_a_replica_that_started_anew_has_grown_by_nothing_known():
    before = counted(100, 700, 150, 1.0)
    grown = since(before, counted(120, 840, 180, 1.0, at=5.0))
    assert (grown.num_drafts, grown.num_draft_tokens, grown.num_accepted_tokens) == (20, 140, 30)
    assert since(before, counted(90, 630, 100, 1.0, at=5.0)) is None
    assert since(before, counted(500, 3500, 900, 9.0, at=5.0)) is None  # it counts higher, in another process
    assert since(None, counted(5, 35, 9)) is None


def test_a_replica_without_the_counters_is_told_from_one_that_cannot_be_reached():
    with pytest.raises(NoCountersError, match="no counter of drafts; the server must speculate"):
        parse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n", where="here")
    with pytest.raises(NoCountersError, match=r"no counter of vLLM in it.*--disable-log-stats"):
        parse("# TYPE python_info gauge\npython_info 1\n", where="here")
    with pytest.raises(DeployError, match="could not be read") as failure:
        scrape("http://127.0.0.1:9", timeout_s=1)
    assert not isinstance(failure.value, NoCountersError)


def answering(payload, *, then=lambda connection: None):
    """A port where every connection gets these bytes, and is closed after ``then``."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(payload)
                then(connection)

    threading.Thread(target=serve, daemon=True).start()
    return listening


SERVING = {
    "status": "ok",
    "version": "1",
    "folder": "/v/1",
    "sha256": "aa",
    "live_fingerprint": ["a"],
    "paused": False,
    "door": "open",
    "swapping": False,
}


def ok(body):
    payload = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload


def test_what_serves_is_what_every_worker_says():
    with answering(ok(SERVING)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert look(Address(url, url), "token", timeout_s=2).drafter == Drafter("1", "/v/1", "aa")


def test_an_answer_that_drips_is_given_up_in_time():
    def drip(connection):
        try:
            for _ in range(200):
                connection.sendall(b" ")
                time.sleep(0.05)
        except OSError:
            pass  # the caller hung up

    with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n", then=drip) as listening:
        url, began = f"http://127.0.0.1:{listening.getsockname()[1]}", time.monotonic()
        assert "timed out amid its answer" in look(Address(url, url), "token", timeout_s=0.3).why
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "completion",
    [
        {},
        [],
        {"choices": []},
        {"choices": ["a"]},
        {"choices": [{"token_ids": ["x"]}]},
        {"choices": [{}], "metrics": "m"},
    ],
)
def test_a_probe_prompt_that_gets_no_completion_says_so(completion):
    with answering(ok(completion)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(DeployError, match="a probe prompt got no completion"):
            run_probe(url, [{"messages": []}], timeout_s=2)


def test_a_url_that_is_none_and_one_that_is_listed_twice():
    assert "ValueError" in look(Address("replica-1", "replica-1"), "token").why
    urls = ["http://a:1", "http://b:1/", "http://a:1/"]
    assert [one.url for one in static(urls)()] == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", "IncompleteRead"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"status": "ok"}', "KeyError"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "not reachable"),
        (b"HTTP/1.1 500 no\r\ncontent-length: 500\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 302 no\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n", "HTTP 302"),
        (ok({"status": "ok", "paused": False, "live_fingerprint": ["a"]}), "KeyError"),
        (ok({**SERVING, "version": 2}), "must be texts"),
        (ok({**SERVING, "live_fingerprint": 7}), "TypeError"),
        (ok({**SERVING, "swapping": True}), "a swap is running"),
        (ok({**SERVING, "door": "shut"}), "about to start anew"),
        (ok([1]), "answered HTTP 200"),
        (ok(json.loads("[" * 50 + "]" * 50)), "answered HTTP 200"),
    ],
    ids=[
        "killed amid its answer",
        "lacks everything",
        "no HTTP",
        "closed at once",
        "killed amid an error",
        "sends elsewhere",
        "lacks something",
        "version is no text",
        "fingerprint is no list",
        "swaps now",
        "restarts now",
        "a list",
        "lists of lists",
    ],
)
def test_an_answer_that_cannot_be_used_is_a_replica_that_does_not_serve(payload, words):
    with answering(payload) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        seen = look(Address(url, url), "token", timeout_s=2)
        assert not seen.is_up and words in seen.why
        with pytest.raises(DeployError):
            scrape(url, timeout_s=2)
