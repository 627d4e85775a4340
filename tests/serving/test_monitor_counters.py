import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serving.monitor.counters import Counters, between, read_counters
from serving.monitor.gauges import NAMES, Endpoint, Gauge, exposition
from serving.monitor.scrape import scrape, scrape_all

TEXT = """
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1000.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 300.0
vllm:generation_tokens_total{engine="1",model_name="m"} 30.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop"} 7.0
vllm:request_success_total{engine="0",finished_reason="length"} 2.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 200.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 5.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{le="+Inf"} 50.0
vllm:inter_token_latency_seconds_count{engine="0"} 50.0
vllm:inter_token_latency_seconds_sum{engine="0"} 2.5
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{le="+Inf"} 20.0
vllm:iteration_tokens_total_count{engine="0"} 20.0
vllm:iteration_tokens_total_sum{engine="0"} 330.0
"""


def test_engines_and_processes_are_added_up():
    found = read_counters(TEXT, at=2000.0)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (110, 300, 200)
    assert (found.num_tokens, found.num_requests, found.running, found.waiting) == (330, 9, 5, 1)
    assert (found.step_s, found.num_steps, found.num_iterations) == (2.5, 50, 20)
    assert found.accepted_per_pos == (95, 0, 40)
    assert (found.at, found.started, found.speculates) == (2000.0, 1000.0, True)
    assert Counters.from_dict(found.as_dict()) == found


@pytest.mark.parametrize("text", ["", "hello", "<html>", "# TYPE python_info gauge\npython_info 1\n"])
def test_a_text_without_vllms_counters_is_no_replica(text):
    with pytest.raises(ValueError):
        read_counters(text, at=1.0)


def counters(at, drafts, accepted, *, started=1000.0, per_pos=()):
    return Counters(at=at, started=started, num_drafts=drafts, num_accepted_tokens=accepted, accepted_per_pos=per_pos)


def test_between_two_looks_the_difference_was_counted():
    found = between(counters(0, 100, 150, per_pos=(90, 60)), counters(60, 160, 300, per_pos=(140, 160)))
    assert (found.seconds, found.num_drafts, found.num_accepted_tokens) == (60, 60, 150)
    assert found.accepted_per_pos == (50, 100) and not found.restarted


def test_the_first_look_and_one_that_is_not_later_count_nothing():
    assert between(None, counters(0, 100, 150)) is None
    assert between(counters(60, 1, 1), counters(60, 2, 2)) is None


def test_a_replica_that_restarted_counts_from_nothing_also_where_it_overtook_itself():
    fell = between(counters(0, 100, 150), counters(60, 40, 80))
    assert (fell.num_drafts, fell.num_accepted_tokens, fell.restarted) == (40, 80, True)
    overtaken = between(counters(0, 100, 150), counters(7200, 900, 1800, started=1500.0))
    assert (overtaken.num_drafts, overtaken.num_accepted_tokens, overtaken.restarted) == (900, 1800, True)


class Replica(BaseHTTPRequestHandler):
    answers = (200, TEXT.encode())

    def do_GET(self):
        status, body = self.answers
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def replica():
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Replica,), {}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url_of(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_replicas_that_answer_are_read_whatever_becomes_of_the_others(replica):
    closed = "http://127.0.0.1:9"
    found = scrape_all([url_of(replica) + "/", closed, "not a url"], timeout_s=5)
    assert found[url_of(replica) + "/"].num_drafts == 110
    assert "refused" in found[closed] and isinstance(found["not a url"], str)
    assert scrape_all([], timeout_s=1) == {}


@pytest.mark.parametrize(
    "answer", [(500, b"no"), (404, b""), (200, b"\xff\xfe"), (200, b"vllm 3 x y z\n"), (401, b"{}")]
)
def test_what_is_no_answer_is_told_in_words(replica, answer):
    replica.RequestHandlerClass.answers = answer
    assert isinstance(scrape(url_of(replica), timeout_s=5), str)


def test_gauges_are_written_so_that_prometheus_reads_them():
    from prometheus_client.parser import text_string_to_metric_families

    made = [
        Gauge("acceptance_length", 2.5, {"slice": 'route="a\\b"\n'}),
        Gauge("acceptance_length", 3.0, {"slice": "all"}),
    ]
    (family,) = text_string_to_metric_families(exposition(made).decode())
    assert family.name == "slipstream_watch_acceptance_length" and family.documentation == NAMES["acceptance_length"]
    assert {sample.labels["slice"]: sample.value for sample in family.samples} == {'route="a\\b"\n': 2.5, "all": 3.0}
    with pytest.raises(KeyError):
        exposition([Gauge("made_up", 1.0, {})])


def test_the_endpoint_serves_metrics_and_nothing_else():
    import urllib.error
    import urllib.request

    with Endpoint("127.0.0.1:0", lambda: b"x 1\n") as endpoint:
        base = f"http://127.0.0.1:{endpoint.port}"
        with urllib.request.urlopen(f"{base}/metrics", timeout=10) as answer:
            assert answer.read() == b"x 1\n" and "text/plain" in answer.headers["Content-Type"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/", timeout=10)


def test_a_replica_that_drips_holds_up_no_look(replica):
    def drip(self):
        self.send_response(200)
        self.end_headers()
        try:
            while not done.wait(0.02):
                self.wfile.write(b"vllm:num_requests_running 1\n")
        except OSError:
            pass

    done = threading.Event()
    replica.RequestHandlerClass.do_GET = drip
    found = scrape_all([url_of(replica)], timeout_s=0.3)
    done.set()
    assert found == {url_of(replica): "TimeoutError: timed out"}


def test_the_endpoint_listens_on_the_next_version_of_the_protocol_too():
    import socket
    import urllib.request

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Endpoint("[::1]:0", lambda: b"x 1\n") as endpoint:
        url = f"http://[::1]:{endpoint.port}/metrics"
        assert urllib.request.urlopen(url, timeout=10).read() == b"x 1\n"
