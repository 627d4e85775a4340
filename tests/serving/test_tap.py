"""The tap: silent by default, invisible to clients, and one whole record for each exchange that policy allows."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tapped import ANSWER, CHAT, EVENTS, SSE, STREAM, app_that_answers, outcomes, records, send, stream_of

from pipeline.on_record import ServedReply, served_reply
from serving.control import ControlEndpoint
from serving.errors import TapError
from serving.tap import TrafficTap
from serving.tap.exchange import MAX_BYTES

CONSENT = {"X-Training-Consent": "yes"}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TAP_DIR", str(tmp_path / "log"))
    monkeypatch.setenv("SLIPSTREAM_TAP_CONSENT", "header:X-Training-Consent=yes")
    monkeypatch.setenv("SLIPSTREAM_TAP_SLICE_HEADER", "X-Slice")
    monkeypatch.setenv("SLIPSTREAM_DRAFTER_VERSION", "7")
    return monkeypatch


def test_an_exchange_with_consent_is_one_whole_record(settings):
    settings.setenv("SLIPSTREAM_TAP_SUBJECT_HEADER", "X-Subject")
    settings.setenv("SLIPSTREAM_TAP_TENANT_HEADER", "X-Tenant")
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, headers={**CONSENT, "X-Subject": "customer-1", "X-Slice": "mail", "X-Tenant": "acme"})
    (record,) = records(tap)
    assert record["messages"] == CHAT["messages"]
    assert record["params"] == {"temperature": 0.2, "max_tokens": 7, "chat_template_kwargs": {"enable_thinking": False}}
    assert (record["route"], record["model"], record["stream"]) == ("chat", "m", False)
    assert (record["subject"], record["tenant"], record["slice"]) == ("customer-1", "acme", "mail")
    assert (record["consent"], record["consent_source"]) == ("recorded", "header:x-training-consent")
    assert (record["drafter_version"], record["inclusion_probability"]) == ("7", 1.0)
    assert (record["response"]["text"], record["response"]["finish_reason"]) == ("On its way", "stop")
    assert record["response"]["usage"] == ANSWER["usage"]
    assert len(record["id"]) == 32 and record["ts"] > 1.7e9
    assert "never written" not in json.dumps(record)


@pytest.mark.parametrize("consent", ["", None])
def test_without_a_consent_policy_nothing_is_written(settings, tmp_path, consent):
    settings.delenv("SLIPSTREAM_TAP_CONSENT")
    if consent is not None:
        settings.setenv("SLIPSTREAM_TAP_CONSENT", consent)
    tap = TrafficTap(app_that_answers(ANSWER))
    assert send(tap).json() == ANSWER
    assert tap.feeder is None and not (tmp_path / "log").exists()


@pytest.mark.parametrize("headers", [{}, {"X-Training-Consent": "no"}, {"X-Training-Consent": "yes, please"}])
def test_a_request_without_consent_is_not_written(settings, headers):
    tap = TrafficTap(app_that_answers(ANSWER))
    assert send(tap, headers=headers).json() == ANSWER
    assert records(tap) == [] and outcomes(tap) == {"denied_no_consent": 1}


def test_a_tap_that_was_switched_off_still_deletes_what_it_wrote_in_time(settings, tmp_path):
    (tmp_path / "log").mkdir()
    old = tmp_path / "log" / "traffic-h-1-1700000000000.jsonl"
    old.write_text("{}\n")
    settings.delenv("SLIPSTREAM_TAP_CONSENT")
    tap = TrafficTap(app_that_answers(ANSWER))
    assert send(tap, headers=CONSENT).json() == ANSWER
    tap.feeder.close(30)
    assert list((tmp_path / "log").iterdir()) == [] and outcomes(tap) == {}


def test_consent_in_the_body_counts_for_nothing(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, CHAT | {"X-Training-Consent": "yes", "metadata": {"consent": "yes"}}, headers={})
    assert records(tap) == []


@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
def test_a_stream_reaches_the_client_byte_for_byte_and_is_recorded_whole(settings, pieces):
    app = app_that_answers(STREAM, content_type=SSE, pieces=pieces)
    tap = TrafficTap(app)
    reply = send(tap, CHAT | {"stream": True}, headers=CONSENT)
    assert reply.content == STREAM == send(app, CHAT | {"stream": True}).content
    (record,) = records(tap)
    assert record["stream"] is True
    assert (record["response"]["text"], record["response"]["finish_reason"]) == ("On its wäy", "stop")
    assert record["response"]["usage"] == {"completion_tokens": 3}


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
def test_only_a_success_is_written(settings, status):
    tap = TrafficTap(app_that_answers(ANSWER, status=status))
    assert send(tap, headers=CONSENT).status_code == status
    assert records(tap) == [] and outcomes(tap) == {"not_2xx": 1}


def test_an_answer_that_broke_off_is_not_written(settings):
    tap = TrafficTap(app_that_answers(STREAM, content_type=SSE, pieces=5, die=True))
    with pytest.raises(RuntimeError, match="the engine died"):
        send(tap, headers=CONSENT)
    assert records(tap) == [] and outcomes(tap) == {"cut_short": 1}


def test_a_client_that_hangs_up_in_mid_stream_is_counted_and_not_written(settings):
    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE)]})
        await send({"type": "http.response.body", "body": STREAM[:40], "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    async def scenario(tap):
        coming = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])

        async def receive():
            return next(coming)

        async def send(message):
            pass

        headers = [(b"x-training-consent", b"yes")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await tap(scope, receive, send)

    tap = TrafficTap(app)
    asyncio.run(scenario(tap))
    assert records(tap) == [] and outcomes(tap) == {"hung_up": 1}


def test_other_routes_and_methods_are_not_written(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    for path in ("/v1/embeddings", "/tokenize", "/v1/messages"):
        send(tap, path=path, headers=CONSENT)
    send(tap, method="GET", headers=CONSENT)
    assert records(tap) == [] and outcomes(tap) == {}


def test_a_server_under_a_path_of_its_own_is_tapped_as_well(settings):
    tap = TrafficTap(app_that_answers(ANSWER))

    async def under_a_path(scope, receive, send):
        await tap({**scope, "root_path": "/llm"}, receive, send)

    send(under_a_path, path="/llm/v1/chat/completions", headers=CONSENT)
    assert len(records(tap)) == 1


def test_completions_keep_their_prompt(settings):
    answer = {"choices": [{"index": 0, "text": " done", "finish_reason": "length"}], "usage": None}
    tap = TrafficTap(app_that_answers(answer))
    send(tap, {"model": "m", "prompt": [1, 2, 3], "n": 1}, path="/v1/completions", headers=CONSENT)
    (record,) = records(tap)
    assert (record["route"], record["prompt"], record["response"]["text"]) == ("completions", [1, 2, 3], " done")


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"\xff{", b"", b"[" * 100_000])
def test_a_malformed_request_is_counted_and_the_log_goes_on(settings, body):
    tap = TrafficTap(app_that_answers(ANSWER))
    assert send(tap, body, headers=CONSENT).json() == ANSWER
    send(tap, headers=CONSENT)
    assert len(records(tap)) == 1
    assert outcomes(tap) == {"malformed_request": 1, "written": 1}


@pytest.mark.parametrize("body", [b"no json", b"[]", b"{}", b'{"choices": [7]}', b'{"error": {}}', b'{"choices": 1}'])
def test_a_malformed_answer_is_counted_and_reaches_the_client(settings, body):
    tap = TrafficTap(app_that_answers(body))
    assert send(tap, headers=CONSENT).content == body
    assert records(tap) == [] and outcomes(tap) == {"malformed_reply": 1}


def test_text_that_is_no_unicode_is_written_as_it_came(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', headers=CONSENT)
    assert records(tap)[0]["messages"][0]["content"] == "\ud800"


def test_what_json_has_no_word_for_is_no_record(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, b'{"messages": [], "temperature": NaN}', headers=CONSENT)
    assert records(tap) == [] and outcomes(tap) == {"malformed_request": 1}


def test_a_compressed_answer_is_counted(settings):
    tap = TrafficTap(app_that_answers(ANSWER, headers=[(b"content-encoding", b"br")]))
    send(tap, headers={**CONSENT, "Accept-Encoding": "identity"}, method="POST")
    assert records(tap) == [] and outcomes(tap) == {"encoded": 1}


def test_an_exchange_that_is_too_large_is_let_go_and_reaches_the_client(settings):
    body = json.dumps(ANSWER).encode() + b" " * MAX_BYTES
    tap = TrafficTap(app_that_answers(body, pieces=40))
    assert send(tap, headers=CONSENT).content == body
    assert records(tap) == [] and outcomes(tap) == {"too_large": 1}
    assert tap.budget.taken == tap.budget.released == 0


def test_no_more_bytes_are_held_than_the_setting_says(settings):
    settings.setenv("SLIPSTREAM_TAP_MEMORY_MIB", "1")
    body = json.dumps(ANSWER).encode() + b" " * (1 << 20)
    tap = TrafficTap(app_that_answers(body, pieces=9))
    assert send(tap, headers=CONSENT).content == body
    tap.app = app_that_answers(ANSWER)
    send(tap, headers=CONSENT)
    assert len(records(tap)) == 1 and outcomes(tap) == {"dropped_memory": 1, "written": 1}
    assert tap.budget.taken == tap.budget.released > 0


def test_the_log_is_its_owners_alone(settings, tmp_path):
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, headers=CONSENT)
    records(tap)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "log").iterdir()}
    assert (stat.S_IMODE((tmp_path / "log").stat().st_mode), modes) == (0o700, {0o600})


def test_a_folder_that_cannot_be_made_stops_the_start(settings, tmp_path):
    (tmp_path / "file").write_text("")
    settings.setenv("SLIPSTREAM_TAP_DIR", str(tmp_path / "file" / "log"))
    with pytest.raises(TapError, match="expected a folder that can be written to"):
        TrafficTap(app_that_answers(ANSWER))


@pytest.mark.parametrize("stream", [False, True])
def test_the_exact_ids_that_a_client_asked_for_are_on_record_with_the_target_that_gave_them(settings, stream):
    settings.setenv("SLIPSTREAM_TAP_TARGET", "f00d")
    if stream:
        events = [{**EVENTS[0], "prompt_token_ids": [0, 3, 4]}]
        for event, ids in zip(EVENTS[1:3], ([7, 8], [1]), strict=True):
            events.append({"choices": [{**event["choices"][0], "token_ids": ids}]})
        app = app_that_answers(stream_of([*events, EVENTS[3]]), content_type=b"text/event-stream")
    else:
        choice = {**ANSWER["choices"][0], "token_ids": [7, 8, 1]}
        app = app_that_answers({**ANSWER, "prompt_token_ids": [0, 3, 4], "choices": [choice]})
    tap = TrafficTap(app)
    send(tap, CHAT | {"stream": stream, "return_token_ids": True}, headers=CONSENT)
    (record,) = records(tap)
    assert record["target"] == "f00d"
    assert record["response"]["prompt_token_ids"] == [0, 3, 4]
    assert record["response"]["choices"][0]["token_ids"] == [7, 8, 1]
    assert served_reply(record) == ServedReply((0, 3, 4), (7, 8, 1), "stop", "f00d")
    assert tap.metrics.counts["ids_from_client"] == 1


def test_every_setting_that_changes_a_reply_is_on_record_so_that_collecting_can_refuse_it(settings):
    unheard = {"top_k": 3, "min_tokens": 2, "bad_words": ["x"], "reasoning_effort": "low", "best_of": 2}
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, {**CHAT, **unheard}, headers=CONSENT)
    (record,) = records(tap)
    assert unheard.items() <= record["params"].items()


def test_every_request_to_a_tapped_route_has_one_outcome(settings):
    settings.setenv("SLIPSTREAM_TAP_OPT_OUT", "x-never")
    settings.setenv("SLIPSTREAM_TAP_RATE", "0.5")
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, headers=CONSENT, times=40)
    send(tap, headers={**CONSENT, "X-Never": "1"}, times=3)
    send(tap, headers={}, times=2)
    send(tap, b"{", headers=CONSENT, times=5)
    kept = records(tap)
    assert sum(outcomes(tap).values()) == 50
    assert len(kept) == outcomes(tap)["written"] and {record["inclusion_probability"] for record in kept} <= {0.5}
    assert {"denied_opt_out": 3, "denied_no_consent": 2}.items() <= outcomes(tap).items()


def test_the_servers_end_waits_for_what_is_queued(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    send(tap, headers=CONSENT, times=20)
    told = []

    async def scenario():
        async def app(scope, receive, send):
            told.append((await receive())["type"])

        tap.app = app

        async def receive():
            return {"type": "lifespan.shutdown"}

        await tap({"type": "lifespan"}, receive, None)

    asyncio.run(scenario())
    assert told == ["lifespan.shutdown"]
    (log,) = tap.settings.log.folder.iterdir()
    assert log.suffixes == [".jsonl"] and len(log.read_bytes().splitlines()) == 20


def test_the_tap_counts_on_a_route_of_its_own_whichever_middleware_is_outside(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    inside = TrafficTap(app_that_answers(b"not here"))
    for outer in (tap, ControlEndpoint(inside)):
        answer = send(outer, path="/slipstream/tap/metrics", method="GET")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        assert 'slipstream_tap_requests_total{outcome="dropped_queue_full"}' in answer.text
        assert "python_gc" not in answer.text
    for one in (tap, inside):
        one.feeder.close()


def test_several_api_server_processes_are_counted_together(tmp_path):
    count = (
        "import os, sys\nfrom serving.tap.metrics import Metrics, exposition\n"
        "Metrics().outcome('written', int(sys.argv[1]))\nprint(exposition()[0].decode())"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    root = Path(__file__).resolve().parents[2]
    for number, total in (("2", "2.0"), ("3", "5.0")):
        done = subprocess.run([sys.executable, "-c", count, number], cwd=root, env=env, capture_output=True, text=True)
        assert f'slipstream_tap_requests_total{{outcome="written"}} {total}' in done.stdout, done.stderr


def test_an_error_of_the_taps_own_breaks_no_request(settings):
    tap = TrafficTap(app_that_answers(ANSWER))
    tap.draw = None
    assert send(tap, headers=CONSENT).json() == ANSWER
    assert outcomes(tap) == {"failed": 1}
    tap.feeder.close()


def test_the_middleware_needs_neither_vllm_nor_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, serving.tap.writer; print({'vllm', 'torch'} & set(sys.modules))"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "set()\n", done.stderr


def test_a_swap_during_a_reply_leaves_no_one_version_on_record(settings):
    class State:
        slipstream_drafter_version = "1"

    class Application:
        state = State()

    answer = app_that_answers(ANSWER)

    async def app(scope, receive, send):
        await answer(scope, receive, send)
        if (b"x-swap", b"1") in scope["headers"]:
            State.slipstream_drafter_version = "2"

    tap = TrafficTap(app)

    async def server(scope, receive, send):
        await tap({**scope, "app": Application}, receive, send)

    send(server, headers=CONSENT)
    send(server, headers={**CONSENT, "X-Swap": "1"})
    send(server, headers=CONSENT)
    assert [record["drafter_version"] for record in records(tap)] == ["1", None, "2"]
