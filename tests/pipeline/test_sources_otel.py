"""OpenTelemetry GenAI telemetry: spans, details events and the older events, as OTLP/JSON lines."""

import json

import pytest

from pipeline.canonical import canonical_request
from pipeline.errors import Rejected
from pipeline.sources.formats import records_of

START = "1767268800500000000"
QUESTION = {"role": "user", "parts": [{"type": "text", "content": "Weather in Paris?"}]}
CALL = {"type": "tool_call", "id": "c1", "name": "weather", "arguments": {"city": "Paris"}}
CALLED = {"role": "assistant", "parts": [CALL]}
RESULT = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "rainy"}]}
ANSWER = {"role": "assistant", "parts": [{"type": "text", "content": "It rains."}], "finish_reason": "stop"}
SYSTEM = [{"type": "text", "content": "Be brief."}]
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
]


def value(plain):
    """A value in OTLP/JSON, where 64-bit integers are text."""
    match plain:
        case bool():
            return {"boolValue": plain}
        case int():
            return {"intValue": str(plain)}
        case float():
            return {"doubleValue": plain}
        case str():
            return {"stringValue": plain}
        case list():
            return {"arrayValue": {"values": [value(item) for item in plain]}}
        case dict():
            return {"kvlistValue": {"values": attributes(plain)}}
        case _:
            return {}


def attributes(plain):
    return [{"key": key, "value": value(item)} for key, item in plain.items()]


def span(told, *, events=(), **more):
    told = {"gen_ai.operation.name": "chat", **told}
    events = [{"timeUnixNano": START, "name": name, "attributes": attributes(a)} for name, a in events]
    ids = {"traceId": "4bf9", "spanId": "00f0", "startTimeUnixNano": START}
    return {"name": "chat m", **ids, "attributes": attributes(told), "events": events, **more}


def traces(*spans, **resource):
    of_resource = {"resource": {"attributes": attributes({"service.name": "shop", **resource})}}
    return {"resourceSpans": [{**of_resource, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}


def logs(*records):
    return {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": list(records)}]}]}


def event(name, body, *, span_id="00f0", as_attribute=False):
    named = {"attributes": attributes({"event.name": name})} if as_attribute else {"eventName": name}
    ids = {"traceId": "4bf9", "spanId": span_id, "timeUnixNano": START}
    return {**ids, **named, "body": value(body)}


def read(body):
    return list(records_of(body, "auto"))


def reasons(body):
    return [str(found) for found in read(body) if isinstance(found, Rejected)]


REQUEST = {
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.top_k": 5.0,
    "gen_ai.request.max_tokens": 200,
    "gen_ai.request.stop_sequences": ["END"],
    "gen_ai.conversation.id": "conv-1",
    "gen_ai.usage.output_tokens": 3,
    "gen_ai.output.type": "text",
    "enduser.id": "u-7",
}
CONTENT = {
    "gen_ai.system_instructions": SYSTEM,
    "gen_ai.input.messages": [QUESTION, CALLED, RESULT],
    "gen_ai.output.messages": [ANSWER],
    "gen_ai.tool.definitions": [TOOL],
}


def assert_the_request(record):
    asked = canonical_request(record)
    assert json.loads(asked.messages) == TURNS
    assert json.loads(asked.tools) == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    assert (asked.temperature, asked.max_tokens, asked.sampling) == (0.5, 200, '{"top_k":5,"stop":["END"]}')
    assert (asked.subject, asked.slice) == ("subject:u-7", "chat")
    assert (record["id"], record["ts"], record["model"]) == ("4bf9:00f0", START, "m")
    assert record["response"]["choices"][0]["message"]["content"] == "It rains."
    assert (record["response"]["choices"][0]["finish_reason"], record["response"]["usage"]) == (
        "stop",
        {"completion_tokens": 3},
    )


def test_a_spans_attributes_are_a_request_as_text_or_structured():
    (structured,) = read(traces(span({**REQUEST, **CONTENT})))
    (text,) = read(traces(span({**REQUEST, **{name: json.dumps(told) for name, told in CONTENT.items()}})))
    assert structured == text
    assert_the_request(structured)


def test_a_details_event_is_the_same_request_under_the_same_id():
    told = attributes({"gen_ai.operation.name": "chat", **REQUEST, **CONTENT})
    ids = {"traceId": "4bf9", "spanId": "00f0", "observedTimeUnixNano": START}
    name = "gen_ai.client.inference.operation.details"
    for record in ({**ids, "eventName": name}, {**ids, "attributes": attributes({"event.name": name})}):
        record["attributes"] = [*record.get("attributes", []), *told]
        (found,) = read(logs(record))
        assert_the_request(found)


EVENTS = [
    ("gen_ai.system.message", {"content": "Be brief."}),
    ("gen_ai.user.message", {"content": "Weather in Paris?"}),
    (
        "gen_ai.assistant.message",
        {
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ]
        },
    ),
    ("gen_ai.tool.message", {"id": "c1", "content": "rainy"}),
    ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"content": "It rains."}}),
]


@pytest.mark.parametrize("as_attribute", [False, True])
def test_the_events_of_a_span_are_one_request_each_span_its_own(as_attribute):
    records = [event(name, body, as_attribute=as_attribute) for name, body in EVENTS]
    records.insert(2, event("gen_ai.user.message", {"content": "Another one"}, span_id="00f1"))
    first, second = read(logs(*records))
    assert json.loads(canonical_request(first).messages) == TURNS
    assert (first["id"], first["ts"]) == ("4bf9:00f0", START)
    assert first["response"]["choices"][0]["message"] == {"content": "It rains."}
    assert json.loads(canonical_request(second).messages) == [{"role": "user", "content": "Another one"}]
    assert second["id"] == "4bf9:00f1"


def test_events_on_the_span_itself_have_its_settings():
    events = [
        (name, {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in body.items()})
        for name, body in EVENTS
    ]
    (found,) = read(traces(span({**REQUEST, "gen_ai.tool.definitions": json.dumps([TOOL])}, events=events)))
    found["response"]["usage"] = {"completion_tokens": 3}
    assert_the_request(found)


def test_other_telemetry_of_a_line_is_no_record_and_one_bad_span_costs_itself_alone():
    other = {"name": "GET /", "attributes": attributes({"http.request.method": "GET"})}
    tool = span({"gen_ai.operation.name": "execute_tool"})
    image = {"role": "user", "parts": [{"type": "blob", "modality": "image", "content": "aGk="}]}
    found = read(
        traces(
            other,
            tool,
            span({"gen_ai.input.messages": [QUESTION]}),
            span({"gen_ai.input.messages": json.dumps([QUESTION])[:-9]}),
            span({}),
            span({"gen_ai.input.messages": [QUESTION], "error.type": "timeout"}),
            span({"gen_ai.input.messages": [QUESTION]}, status={"code": 2}),
            span({"gen_ai.input.messages": [QUESTION], "gen_ai.output.type": "json"}),
            span({"gen_ai.input.messages": ["text"]}),
            span({"gen_ai.input.messages": [image]}),
            span({"gen_ai.input.messages": [QUESTION], "gen_ai.request.choice.count": 3}),
        )
    )
    assert [str(one) if isinstance(one, Rejected) else "record" for one in found] == [
        "record",
        "truncated_at_source",
        "prompt_not_recorded",
        "failed_request",
        "failed_request",
        "unsupported_response_format",
        "malformed_messages",
        "record",
        "record",
    ]
    for record, reason in zip(found[-2:], ("unsupported_image", "unsupported_n"), strict=True):
        with pytest.raises(Rejected, match=reason):
            canonical_request(record)
    assert read(logs({"body": {"stringValue": "started"}})) == []


def test_a_choice_alone_is_a_reply_without_its_request():
    assert reasons(logs(event(*EVENTS[-1]))) == ["reply_alone"]


def test_reasoning_and_several_texts_are_kept_as_what_they_are():
    parts = [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "a"}, {"type": "text", "content": "b"}]
    (found,) = read(
        traces(span({"gen_ai.input.messages": [QUESTION, {"role": "assistant", "parts": parts}, QUESTION]}))
    )
    turn = json.loads(canonical_request(found).messages)[1]
    assert turn == {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning": "hm",
    }


def test_text_completions_are_told_apart():
    (found,) = read(traces(span({"gen_ai.operation.name": "text_completion", "gen_ai.input.messages": [QUESTION]})))
    with pytest.raises(Rejected, match="unsupported_raw_prompt"):
        canonical_request(found)


def test_the_tenant_is_the_resources():
    (found,) = read(traces(span({"gen_ai.input.messages": [QUESTION]}), **{"tenant.id": "acme"}))
    assert found["tenant"] == "acme"


def test_a_real_sdk_writes_what_is_read_here():
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    told = {"gen_ai.operation.name": "chat", **REQUEST, **{name: json.dumps(one) for name, one in CONTENT.items()}}
    with provider.get_tracer("shop").start_as_current_span("chat m", attributes=told):
        pass
    (found,) = read(json.loads(json.dumps(MessageToDict(encode_spans(exporter.get_finished_spans())))))
    assert json.loads(canonical_request(found).messages) == TURNS
    assert canonical_request(found).sampling == '{"top_k":5,"stop":["END"]}'


def test_a_number_without_end_costs_its_own_record_alone():
    endless = span({"gen_ai.input.messages": [QUESTION]})
    endless["attributes"].append({"key": "gen_ai.request.seed", "value": {"intValue": float("inf")}})
    found = list(records_of(traces(endless, span({"gen_ai.input.messages": [QUESTION]})), "otel"))
    assert isinstance(found[0], Rejected) and str(found[0]) == "malformed_record"
    assert found[1]["messages"] == [{"role": "user", "content": "Weather in Paris?", "name": None}]
