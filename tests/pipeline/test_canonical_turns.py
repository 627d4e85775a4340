"""Turns of a request: one form for one meaning, what the template reads alone, and no record that stops a batch."""

import copy
import itertools
import json
import random

import pytest
from tokenizers import Tokenizer

from pipeline.canonical import canonical_request
from pipeline.cut_marks import is_cut
from pipeline.errors import Rejected
from pipeline.on_record import served_reply
from pipeline.render import Renderer
from pipeline.sources.formats import FORMATS, records_of
from tests.tiny import _tokenizer

USER = {"role": "user", "content": "weather?"}


def asked(*turns, **more):
    return canonical_request({"messages": list(turns), **more})


def turns(*given, **more):
    return json.loads(asked(*given, **more).messages)


def reason(*given, **more):
    with pytest.raises(Rejected) as error:
        asked(*given, **more)
    return str(error.value)


def calling(arguments, **more):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def test_arguments_as_text_and_as_an_object_are_one_prompt():
    forms = ('{"city": "Köln", "days": 2}', '{"city":"K\\u00f6ln","days":2}', {"city": "Köln", "days": 2})
    found = {asked(USER, calling(arguments), RESULT).messages for arguments in forms}
    assert len(found) == 1
    (call,) = json.loads(found.pop())[1]["tool_calls"]
    assert call["function"]["arguments"] == '{"city":"Köln","days":2}'
    for nothing in (None, "", {}, "{}"):
        assert turns(USER, calling(nothing), RESULT)[1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them():
    for text in ('{"city": ', "[1]", "42"):
        assert turns(USER, calling(text), RESULT)[1]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c"},
        {"function": "weather"},
        {"function": {"arguments": "{}"}},
        {"function": {"name": 5}},
        "weather",
        None,
    ],
)
def test_a_tool_call_that_is_none_is_told(call):
    assert reason(USER, {"role": "assistant", "tool_calls": [call]}, RESULT) == "malformed_tool_call"
    listed = {"function": {"name": "weather", "arguments": [1]}}
    assert reason(USER, {"role": "assistant", "tool_calls": [listed]}, RESULT) == "malformed_tool_call"


def test_what_no_template_reads_is_left_out_and_parts_no_prompts():
    answer = {
        "role": "assistant",
        "content": "sunny",
        "reasoning": "sun",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    noisy = [
        {**USER, "id": "m-1", "cache_control": {"type": "ephemeral"}, "name": "anna"},
        {**answer, "provider_specific_fields": {"x": 1}, "tool_calls": []},
        {"role": "user", "content": "and now?", "metadata": {"session": "s"}},
    ]
    assert turns(*noisy) == [
        {"role": "user", "content": "weather?", "name": "anna"},
        {"role": "assistant", "content": "sunny", "reasoning": "sun"},
        {"role": "user", "content": "and now?"},
    ]
    assert turns(USER, calling("{}", index=0), RESULT)[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ]


def test_parts_are_text_by_whatever_name_and_in_order():
    parts = [
        "a",
        {"type": "text", "text": "b", "cache_control": {}},
        {"type": "input_text", "text": "c"},
        {"text": "d"},
    ]
    assert turns({"role": "user", "content": parts}) == [
        {"role": "user", "content": [{"type": "text", "text": text} for text in "abcd"]}
    ]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("image_url", "unsupported_image"),
        ("input_image", "unsupported_image"),
        ("image", "unsupported_image"),
        ("input_audio", "unsupported_audio"),
        ("audio_url", "unsupported_audio"),
        ("video_url", "unsupported_video"),
        ("file", "unsupported_file"),
        ("input_file", "unsupported_file"),
        ("document", "unsupported_file"),
        ("tool_reference", "unsupported_content"),
        (7, "unsupported_content"),
    ],
)
def test_what_is_no_text_is_a_reject_of_its_own_kind(kind, why):
    assert reason({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, "x": "data:"}]}) == why


def test_developers_and_legacy_function_calls():
    developer = {"role": "developer", "content": "Be brief."}
    assert turns(developer, USER)[0] == developer
    assert reason({**developer, "tools": [{"type": "function"}]}, USER) == "unsupported_developer_tools"
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
    assert reason(USER, legacy, USER) == "unsupported_function_call"
    assert (
        reason(USER, {"role": "function", "name": "weather", "content": "sunny"}, USER) == "unsupported_function_call"
    )
    assert reason(USER, functions=[{"name": "weather"}]) == "unsupported_functions"
    assert reason(USER, params={"function_call": {"name": "weather"}}) == "unsupported_functions"
    assert turns(USER, functions=[], function_call="auto") == [USER]


def test_reasoning_is_kept_under_the_name_it_has():
    for name in ("reasoning", "reasoning_content"):
        assert turns(USER, {"role": "assistant", "content": "sunny", name: "sun"}, USER)[1][name] == "sun"


def test_case_16_null_content_is_empty_text_and_never_a_word():
    told = [
        turns(USER, {"role": "assistant", **content, "tool_calls": calling("{}")["tool_calls"]}, RESULT)
        for content in ({"content": None}, {}, {"content": ""})
    ]
    assert told[0] == told[1] == told[2]
    assert told[0][1]["content"] == ""
    assert reason({"role": "user", "content": None}) == "malformed_messages"


def test_case_16_tools_as_a_list_or_as_text_render_to_the_same_ids_with_their_schema(tmp_path):
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    _tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    renderer = Renderer(tmp_path)
    ids = []
    for given in (tools, json.dumps(tools)):
        request = asked(USER, calling("{}"), RESULT, tools=given)
        ids.append(renderer.prompt_ids(json.loads(request.messages), tools=json.loads(request.tools)))
    assert ids[0] == ids[1]
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids[0])
    assert '"parameters": {"type": "object", "properties": {}}' in text and "None" not in text
    assert reason(USER, tools='[{"type": ') == reason(USER, tools="{}") == reason(USER, tools=[5]) == "malformed_tools"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 420 + "... (truncated 800 chars) ..." + "y" * 780,
        "head... (litellm_truncated skipped 165 chars) ...tail",
        "head...[truncated 12,000 bytes]tail",
        "head...<3 chars, truncated>",
        "[base64 image/png truncated]",
        "data:image/png;base64,[base64_data truncated: 3.8KB]",
        "[BASE64_DATA_TRUNCATED, length=90]",
        "the end of it …[truncated] ",
        "the end of it... (truncated)",
    ],
)
def test_case_12_a_text_that_was_cut_at_its_source_is_known_by_its_mark(text):
    assert is_cut(["fine", text])
    assert reason({"role": "user", "content": text}) == "truncated_at_source"
    assert reason(USER, {"role": "assistant", "content": "", "reasoning": text}, USER) == "truncated_at_source"
    assert reason(USER, {"role": "tool", "content": [{"type": "text", "text": text}]}) == "truncated_at_source"


@pytest.mark.parametrize(
    "text",
    [
        "Why is my log truncated?",
        "Explain (truncated) normal distributions ...",
        "a [base64] string, truncated",
        "def f(): ...  # [truncated] for brevity, what does it do?",
        "My message of 800 chars was truncated... (annoying) ...",
        "truncated 800 chars",
    ],
)
def test_case_12_a_text_that_speaks_of_truncation_is_kept(text):
    assert turns({"role": "user", "content": text}) == [{"role": "user", "content": text}]


def test_a_served_request_that_ends_in_a_reply_is_not_asked_and_a_prompt_file_asks_for_its_last_turn():
    whole = [USER, {"role": "assistant", "content": "sunny"}]
    assert turns(*whole) == [USER]
    assert reason(*whole, params={}) == "ends_with_reply"


def test_case_101_a_reply_that_ran_out_while_thinking_is_no_answer_whatever_its_ids():
    def reply(**choice):
        choice = {"finish_reason": "length", "token_ids": [5, 6], **choice}
        response = {"prompt_token_ids": [1], "usage": {"completion_tokens": 2}, "choices": [choice]}
        return served_reply({"target": "f00d", "response": response})

    assert reply(text="", reasoning="thoughts") is None
    assert reply(message={"content": None, "reasoning_content": "thoughts"}) is None
    assert reply(text="begun", reasoning="thoughts").ids == (5, 6)
    assert reply(text="", reasoning="thoughts", finish_reason="stop").ids == (5, 6)
    assert reply(message={"content": None, "reasoning": "thoughts", "tool_calls": [{}]}).ids == (5, 6)


def test_no_depth_of_nesting_stops_a_batch():
    nested = []
    for _ in range(5000):
        nested = [nested]
    assert (
        reason(USER, tools=[{"type": "function", "function": {"name": "f", "parameters": nested}}])
        == "nested_too_deeply"
    )
    assert asked(USER, calling("[" * 5000), RESULT)


# Values that logs hold where others were expected.
ODD = [
    None,
    "",
    "text",
    0,
    -1,
    2.5,
    True,
    [],
    {},
    [None],
    [[]],
    {"a": None},
    "[{",
    '{"a":1}',
    float("nan"),
    "lone \ud800",
]
TEXT = {"stringValue": "chat"}
PARTS = {"stringValue": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "a"}]}])}
SPAN = {
    "traceId": "t",
    "spanId": "s",
    "startTimeUnixNano": "5",
    "attributes": [
        {"key": "gen_ai.operation.name", "value": TEXT},
        {"key": "gen_ai.input.messages", "value": PARTS},
        {"key": "gen_ai.request.top_k", "value": {"intValue": "5"}},
        {"key": "gen_ai.request.stop_sequences", "value": {"arrayValue": {"values": [TEXT]}}},
    ],
    "events": [{"name": "gen_ai.user.message", "attributes": [{"key": "content", "value": TEXT}]}],
}
MESSAGE = {"kvlistValue": {"values": [{"key": "content", "value": TEXT}]}}
LOG = {"traceId": "t", "spanId": "s", "eventName": "gen_ai.user.message", "body": MESSAGE, "attributes": []}
CHAT = {"messages": [USER, calling("{}"), RESULT], "tools": [{"type": "function", "function": {"name": "f"}}]}
CHOICE = {"message": {"content": "a"}, "token_ids": [5], "finish_reason": "stop"}
REPLY = {"choices": [CHOICE], "prompt_token_ids": [1], "usage": {"completion_tokens": 1}}
SETTINGS = {"temperature": 0.5, "stop": ["a"], "response_format": {"type": "json_object"}, "reasoning_effort": "low"}
WHOLE = [
    {
        **CHAT,
        "params": {**SETTINGS, "chat_template_kwargs": {"a": 1}},
        "subject": "s",
        "slices": {"a": "b"},
        "response": REPLY,
    },
    {"model": "m", **CHAT, **SETTINGS},
    {"custom_id": "c", "url": "/v1/chat/completions", "body": {"model": "m", **CHAT}},
    {
        "request": {"body": {"model": "m", **CHAT}, "url": "/v1/chat/completions"},
        "response": {"status": 200, "body": REPLY},
    },
    {
        "model": "m",
        "instructions": "i",
        "input": [
            USER,
            {"type": "reasoning", "content": [{"text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "tools": [{"type": "function", "name": "f"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    },
    {
        "call_type": "acompletion",
        "startTime": 5.0,
        "messages": CHAT["messages"],
        "model_parameters": {**SETTINGS, "extra_body": {"top_k": 5}, "tools": CHAT["tools"]},
        "metadata": {"user_api_key_team_id": "t"},
        "response": REPLY,
    },
    {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": [SPAN]}]}]},
    {"resourceLogs": [{"resource": {"attributes": []}, "scopeLogs": [{"logRecords": [LOG]}]}]},
    {"prompt": "a", "ts": 5, "max_tokens": 5},
]


def nodes(value):
    """Every place in a nested value: what holds it, and under which key."""
    for key in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ():
        yield value, key
        yield from nodes(value[key])


def taken(body, log_format):
    """How many requests are read of an object; whatever else happens is counted by its reason."""
    kept = 0
    try:
        for record in records_of(body, log_format):
            if not isinstance(record, Rejected):
                canonical_request(record)
                served_reply(record)
                kept += 1
    except Rejected as error:
        assert str(error).isidentifier()
    return kept


def test_every_format_reads_its_own_whole_record():
    assert [taken(json.loads(json.dumps(body)), "auto") for body in WHOLE] == [1] * len(WHOLE)


def test_no_damage_to_a_record_stops_a_batch():
    rng = random.Random(7)
    for body in WHOLE:
        for number, _ in enumerate(nodes(body)):
            for odd in ODD:
                damaged = json.loads(json.dumps(body))
                holder, key = next(itertools.islice(nodes(damaged), number, None))
                holder[key] = copy.deepcopy(odd)
                taken(damaged, "auto")
        for _ in range(300):
            damaged = json.loads(json.dumps(body))
            for _ in range(rng.randrange(1, 4)):
                holder, key = rng.choice(list(nodes(damaged)) or [(damaged, "a")])
                holder[key] = copy.deepcopy(rng.choice([*ODD, CHAT, SPAN, [USER]]))
            for log_format in ("auto", *FORMATS):
                taken(damaged, log_format)
