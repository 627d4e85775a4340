"""The tap: silent by default, invisible to clients, and one whole line for each exchange that policy allows."""

import asyncio
import json
import stat

import httpx
import pytest

from pipeline.on_record import ServedReply, served_reply
from serving.errors import TapError
from serving.replies import read_reply
from serving.tap import ConsentPolicy, TrafficTap

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "Grüße, where is my parcel?"}],
    "temperature": 0.2,
    "max_tokens": 7,
    "chat_template_kwargs": {"enable_thinking": False},
    "api_secret": "never written",
}
ANSWER = {
    "id": "x",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "On its way"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 3},
}
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "On its "}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "wäy"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
STREAM = (
    b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in EVENTS) + b"data: [DONE]\n\n"
)
CONSENT = {"X-Training-Consent": "yes"}


def app_that_answers(body, *, status=200, content_type=b"application/json", pieces=1, die=False):
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})
        size = -(-len(body) // pieces)
        for start in range(0, len(body), size):
            await send({"type": "http.response.body", "body": body[start : start + size], "more_body": True})
            if die:
                raise RuntimeError("the engine died")
        await send({"type": "http.response.body", "body": b""})

    return app


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TAP_DIR", str(tmp_path / "log"))
    monkeypatch.setenv("SLIPSTREAM_TAP_CONSENT", "header:X-Training-Consent=yes")
    monkeypatch.setenv("SLIPSTREAM_TAP_SUBJECT_HEADER", "X-Subject")
    monkeypatch.setenv("SLIPSTREAM_TAP_SLICE_HEADER", "X-Slice")
    monkeypatch.setenv("SLIPSTREAM_DRAFTER_VERSION", "7")
    return monkeypatch


def send(tap, body=CHAT, *, headers=CONSENT, path="/v1/chat/completions", method="POST"):
    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(tap), base_url="http://x") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(scenario())


def records(tap):
    tap.log.close()
    text = tap.log.path.read_bytes()
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def test_an_exchange_with_consent_is_one_whole_record(settings):
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    send(tap, headers={**CONSENT, "X-Subject": "customer-1", "X-Slice": "mail"})
    (record,) = records(tap)
    assert record["messages"] == CHAT["messages"]
    assert record["params"] == {"temperature": 0.2, "max_tokens": 7, "chat_template_kwargs": {"enable_thinking": False}}
    assert (record["route"], record["model"], record["stream"]) == ("chat", "m", False)
    assert (record["subject"], record["slice"], record["drafter_version"]) == ("customer-1", "mail", "7")
    assert (record["consent"], record["consent_source"]) == ("recorded", "header:x-training-consent")
    assert (record["response"]["text"], record["response"]["finish_reason"]) == ("On its way", "stop")
    assert record["response"]["usage"] == ANSWER["usage"]
    assert "never written" not in json.dumps(record)


@pytest.mark.parametrize("consent", ["", None])
def test_without_a_consent_policy_nothing_is_written(settings, tmp_path, consent):
    settings.setenv("SLIPSTREAM_TAP_CONSENT", consent) if consent is not None else settings.delenv(
        "SLIPSTREAM_TAP_CONSENT"
    )
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    assert send(tap).json() == ANSWER
    assert tap.log is None and not (tmp_path / "log").exists()


@pytest.mark.parametrize("headers", [{}, {"X-Training-Consent": "no"}, {"X-Training-Consent": "yes, please"}])
def test_a_request_without_consent_is_not_written(settings, headers):
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    assert send(tap, headers=headers).json() == ANSWER
    assert records(tap) == [] and tap.counts["without_consent"] == 1


def test_consent_in_the_body_counts_for_nothing(settings):
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    send(tap, CHAT | {"X-Training-Consent": "yes", "metadata": {"consent": "yes"}}, headers={})
    assert records(tap) == []


def test_allow_all_must_be_typed_out(settings):
    settings.setenv("SLIPSTREAM_TAP_CONSENT", "allow_all")
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    send(tap, headers={})
    (record,) = records(tap)
    assert record["consent_source"] == "allow_all"


@pytest.mark.parametrize("text", ["yes", "all", "header:", "header:X", "header:X=", "header:=yes", "X=yes"])
def test_a_consent_setting_that_says_nothing_clear_stops_the_start(text):
    with pytest.raises(TapError, match="expected header:NAME=VALUE or allow_all"):
        ConsentPolicy.parse(text)


@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
def test_a_stream_reaches_the_client_byte_for_byte_and_is_recorded_whole(settings, pieces):
    app = app_that_answers(STREAM, content_type=b"text/event-stream; charset=utf-8", pieces=pieces)
    tap = TrafficTap(app)
    reply = send(tap, CHAT | {"stream": True})
    assert reply.content == STREAM == send(app, CHAT | {"stream": True}).content
    (record,) = records(tap)
    assert record["stream"] is True
    assert (record["response"]["text"], record["response"]["finish_reason"]) == ("On its wäy", "stop")
    assert record["response"]["usage"] == {"completion_tokens": 3}


@pytest.mark.parametrize("status", [400, 401, 404, 500, 503])
def test_only_a_success_is_written(settings, status):
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode(), status=status))
    assert send(tap).status_code == status
    assert records(tap) == [] and tap.counts["not_2xx"] == 1


def test_an_answer_that_broke_off_is_not_written(settings):
    tap = TrafficTap(app_that_answers(STREAM, content_type=b"text/event-stream", pieces=5, die=True))
    with pytest.raises(RuntimeError, match="the engine died"):
        send(tap)
    assert records(tap) == [] and tap.counts["cut_short"] == 1


def test_other_routes_are_not_written(settings):
    tap = TrafficTap(app_that_answers(b"{}"))
    send(tap, path="/v1/embeddings")
    send(tap, path="/tokenize")
    assert records(tap) == []


def test_completions_keep_their_prompt(settings):
    answer = {"choices": [{"index": 0, "text": " done", "finish_reason": "length"}], "usage": None}
    tap = TrafficTap(app_that_answers(json.dumps(answer).encode()))
    send(tap, {"model": "m", "prompt": [1, 2, 3], "n": 1}, path="/v1/completions")
    (record,) = records(tap)
    assert (record["route"], record["prompt"], record["response"]["text"]) == ("completions", [1, 2, 3], " done")


def test_a_full_queue_drops_and_counts_and_never_waits(settings, monkeypatch):
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    tap.log.close()  # nobody drains the queue any more
    for _ in range(tap.log.queue.maxsize + 3):
        tap.log.put(object())
    assert tap.counts["dropped"] == 3


def test_an_odd_body_is_counted_and_the_log_goes_on(settings):
    tap = TrafficTap(app_that_answers(b"no json"))
    send(tap)
    tap.app = app_that_answers(json.dumps(ANSWER).encode())
    send(tap)
    assert len(records(tap)) == 1
    assert tap.counts["unreadable_JSONDecodeError"] == 1


def test_the_log_is_its_owners_alone(settings):
    tap = TrafficTap(app_that_answers(b"{}"))
    assert stat.S_IMODE(tap.log.path.stat().st_mode) == 0o600
    tap.log.close()


def test_two_choices_are_both_kept():
    whole = {"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}, {"index": 0, "text": "a"}]}
    reply = read_reply(json.dumps(whole).encode(), stream=False)
    assert [c["text"] for c in reply["choices"]] == ["a", "b"] and reply["text"] == "a"


def test_a_stream_without_its_end_is_refused():
    with pytest.raises(ValueError, match="cut short"):
        read_reply(STREAM.replace(b"data: [DONE]\n\n", b""), stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_the_exact_ids_that_a_client_asked_for_are_on_record_with_the_target_that_gave_them(settings, stream):
    settings.setenv("SLIPSTREAM_TAP_TARGET", "f00d")
    if stream:
        events = [{**EVENTS[0], "prompt_token_ids": [0, 3, 4]}]
        for event, ids in zip(EVENTS[1:3], ([7, 8], [1]), strict=True):
            events.append({"choices": [{**event["choices"][0], "token_ids": ids}]})
        lines = [b"data: " + json.dumps(event).encode() for event in [*events, EVENTS[3]]]
        app = app_that_answers(b"\n\n".join([*lines, b"data: [DONE]\n\n"]), content_type=b"text/event-stream")
    else:
        answer = {
            **ANSWER,
            "prompt_token_ids": [0, 3, 4],
            "choices": [{**ANSWER["choices"][0], "token_ids": [7, 8, 1]}],
        }
        app = app_that_answers(json.dumps(answer).encode())
    tap = TrafficTap(app)
    send(tap, CHAT | {"stream": stream, "return_token_ids": True})
    (record,) = records(tap)
    assert record["target"] == "f00d"
    assert record["response"]["prompt_token_ids"] == [0, 3, 4]
    assert record["response"]["choices"][0]["token_ids"] == [7, 8, 1]
    assert served_reply(record) == ServedReply((0, 3, 4), (7, 8, 1), "stop", "f00d")


def test_every_setting_that_changes_a_reply_is_on_record_so_that_collecting_can_refuse_it(settings):
    unheard = {"top_k": 3, "min_tokens": 2, "bad_words": ["x"], "reasoning_effort": "low", "best_of": 2}
    tap = TrafficTap(app_that_answers(json.dumps(ANSWER).encode()))
    send(tap, {**CHAT, **unheard})
    (record,) = records(tap)
    assert unheard.items() <= record["params"].items()


def test_an_answer_that_is_an_error_is_no_reply():
    for body, stream in ((b'{"error": {}}', False), (b'data: {"error": {}}\n\ndata: [DONE]\n\n', True)):
        with pytest.raises(ValueError, match="is an error"):
            read_reply(body, stream=stream)
