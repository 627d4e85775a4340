"""What is read from vLLM's Prometheus exposition. The text is as vLLM 0.32 writes it."""

import socket
import threading

import pytest

from serving.errors import DeployError
from serving.fleet.counters import Counts, NoCountersError, parse, scrape
from serving.fleet.replicas import Address, look

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


def test_the_engines_of_one_replica_are_added_up_and_the_bonus_token_counts():
    counts = parse(EXPOSITION, where="here")
    assert counts == Counts(120, 840, 180, 1.76e9)
    assert counts.acceptance_length == 2.5
    assert Counts().acceptance_length is None


def test_what_grew_is_told_and_a_replica_that_started_anew_has_grown_by_nothing_known():
    before = Counts(100, 700, 150, 1.0)
    assert Counts(120, 840, 180, 1.0).since(before) == Counts(20, 140, 30, 1.0)
    assert Counts(90, 630, 100, 1.0).since(before) is None
    assert Counts(500, 3500, 900, 2.0).since(before) is None  # it counts higher, in another process
    assert Counts(5, 35, 9).since(None) is None


def test_a_replica_without_the_counters_is_told_from_one_that_cannot_be_reached():
    with pytest.raises(NoCountersError, match=r"no vllm:spec_decode_num_drafts_total.*--disable-log-stats"):
        parse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n", where="here")
    with pytest.raises(DeployError, match="could not be read") as failure:
        scrape("http://127.0.0.1:9", timeout_s=1)
    assert not isinstance(failure.value, NoCountersError)


def answering(payload):
    """A port where every connection gets these bytes and is closed."""
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

    threading.Thread(target=serve, daemon=True).start()
    return listening


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", "IncompleteRead"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{"status": "ok"}', "KeyError"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "not reachable"),
    ],
    ids=["killed amid its answer", "lacks everything", "no HTTP", "closed at once"],
)
def test_an_answer_that_cannot_be_used_is_a_replica_that_does_not_serve(payload, words):
    with answering(payload) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        seen = look(Address(url, url), "token", timeout_s=2)
        assert not seen.is_up and words in seen.why
        with pytest.raises(DeployError):
            scrape(url, timeout_s=2)
