"""Answers read into one shape, and requests of the responses route written as the chat that they mean."""

import json

import pytest

from pipeline.canonical import canonical_request
from pipeline.errors import Rejected
from serving.tap.exchange import Taken
from serving.tap.policy import Verdict
from serving.tap.record import build_record
from serving.tap.replies import read_reply
from serving.tap.responses import Inexact, chat_form, read_response


def messages(given, **more):
    return chat_form({"model": "m", "input": given, **more})["messages"]


def test_two_choices_are_both_kept():
    whole = {"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}, {"index": 0, "text": "a"}]}
    reply = read_reply(json.dumps(whole).encode(), stream=False)
    assert [c["text"] for c in reply["choices"]] == ["a", "b"] and reply["text"] == "a"


def test_a_stream_without_its_end_is_refused():
    with pytest.raises(ValueError, match="cut short"):
        read_reply(b'data: {"choices": [{"index": 0}]}\n\n', stream=True)


def test_an_answer_that_is_an_error_is_no_reply():
    for body, stream in ((b'{"error": {}}', False), (b'data: {"error": {}}\n\ndata: [DONE]\n\n', True)):
        with pytest.raises(ValueError, match="is an error"):
            read_reply(body, stream=stream)


def test_a_streamed_tool_call_is_put_together():
    def event(**call):
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    events = [
        event(index=0, id="c1", type="function", function={"name": "find", "arguments": ""}),
        event(index=0, function={"arguments": '{"a"'}),
        event(index=1, id="c2", type="function", function={"name": "stop", "arguments": "{}"}),
        event(index=0, function={"arguments": ": 1}"}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events) + b"data: [DONE]\n\n"
    (choice,) = read_reply(body, stream=True)["choices"]
    assert choice["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
    ]


def test_reasoning_under_two_names_is_kept_once():
    message = {"content": "42", "reasoning": "six by seven", "reasoning_content": "six by seven"}
    reply = read_reply(json.dumps({"choices": [{"index": 0, "message": message}]}).encode(), stream=False)
    assert reply["choices"][0]["reasoning"] == "six by seven"


def test_instructions_and_a_text_are_a_system_and_a_user_turn():
    assert messages("hello") == [{"role": "user", "content": "hello"}]
    assert messages("hello", instructions="Be brief") == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hello"},
    ]


def test_items_become_turns_and_what_belongs_to_one_turn_is_one():
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Use tools"}]},
        {"type": "message", "role": "user", "content": "Where is order 7?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look up"}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"order": 7}'},
        {"type": "function_call", "call_id": "c2", "name": "find", "arguments": '{"order": 8}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Hamburg"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Hamburg."}]},
        {"role": "assistant", "content": "Anything else?"},
        {"role": "user", "content": "No"},
    ]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "find", "arguments": json.dumps({"order": order})}}
        for i, order in ((1, 7), (2, 8))
    ]
    assert messages(given) == [
        {"role": "developer", "content": [{"type": "text", "text": "Use tools"}]},
        {"role": "user", "content": "Where is order 7?"},
        {"role": "assistant", "reasoning": "Look up", "tool_calls": calls},
        {"role": "tool", "content": "Hamburg", "tool_call_id": "c1"},
        {"role": "assistant", "content": "In Hamburg."},
        {"role": "assistant", "content": "Anything else?"},
        {"role": "user", "content": "No"},
    ]


def test_the_messages_are_those_that_vllm_makes_of_the_same_items():
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    text = {"type": "output_text", "text": "In Hamburg.", "annotations": []}
    given = [
        {"role": "user", "content": "Where is order 7?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look up"}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Hamburg"},
        {"type": "function_call", "call_id": "c2", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "Bremen"},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [text]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "Sure"}]},
        {"type": "message", "role": "assistant", "content": "Anything else?"},
        {"role": "user", "content": "No"},
    ]
    body = {"model": "m", "input": given, "instructions": "Be brief"}
    theirs = ResponsesRequest.model_validate(json.loads(json.dumps(body)))
    expected = construct_input_messages(request_instructions=theirs.instructions, request_input=theirs.input)
    assert chat_form(body)["messages"] == json.loads(json.dumps(expected))


def test_settings_and_tools_take_the_chat_routes_names():
    schema = {"type": "object"}
    chat = chat_form(
        {
            "input": "x",
            "temperature": 0.5,
            "max_output_tokens": 9,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
            "tools": [{"type": "function", "name": "find", "parameters": schema, "strict": None}],
            "tool_choice": "auto",
            "truncation": "auto",
            "n": 3,
            "user": "anna",
        }
    )
    assert chat["tools"] == [{"type": "function", "function": {"name": "find", "parameters": schema, "strict": None}}]
    expected = {"temperature": 0.5, "max_completion_tokens": 9, "reasoning_effort": "low", "tool_choice": "auto"}
    assert expected.items() <= chat.items()
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert (chat["response_format"], chat["truncate_prompt_tokens"]) == (form, -1)
    assert not {"n", "user", "input"} & set(chat), "this route does not know n, and a client's word is no subject"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_input_messages": [{}]}, "previous_input_messages"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input_item"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input_item"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{}]}]}, "input_item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input_content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "encrypted_reasoning"),
        ({"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}] * 2}]}, "assistant_parts"),
        ({"input": [{"role": "assistant", "content": "a", "status": "incomplete"}]}, "continued_message"),
        ({"tools": [{"type": "web_search_preview"}]}, "tool_type"),
        ({"input": [7]}, "unknown_shape"),
        ({"input": None}, "unknown_shape"),
        ({"input": [{"content": "no role"}]}, "unknown_shape"),
        ({"text": "plain"}, "unknown_shape"),
    ],
)  # fmt: skip
def test_what_has_no_certain_chat_form_is_marked_without_content_and_rejected_when_collected(more, why):
    request = {"model": "m", "input": "a secret", **more}
    with pytest.raises(Inexact, match=f"^{why}$"):
        chat_form(request)
    answer = json.dumps({"id": "resp_1", "status": "completed", "output": []}).encode()
    exchange = Taken(
        "responses", Verdict(None, "allow_all"), 0.5, None, 1.0, json.dumps(request).encode(), answer, False, ()
    )
    record, event = build_record(exchange, target=None)
    assert (record["unsupported"], record["route"], event) == (why, "responses", "unsupported")
    assert not {"messages", "response", "params"} & set(record) and "a secret" not in json.dumps(record)
    with pytest.raises(Rejected, match="unsupported_responses_request"):
        canonical_request(record)


OUTPUT = [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Look up"}], "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Hamburg."}]},
]
RESPONSE = {"id": "resp_1", "status": "completed", "output": OUTPUT,
            "usage": {"input_tokens": 4, "output_tokens": 3, "total_tokens": 7}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_a_reply_like_any_other(stream):
    body = json.dumps(RESPONSE)
    if stream:
        events = [{"type": "response.created", "response": {}}, {"type": "response.completed", "response": RESPONSE}]
        body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    reply = read_response(body.encode(), stream=stream)
    assert (reply["id"], reply["text"], reply["finish_reason"]) == ("resp_1", "In Hamburg.", "stop")
    assert reply["choices"][0]["reasoning"] == "Look up"
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def test_a_response_that_ended_at_its_limit_or_in_a_call_says_so():
    cut = {**RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert read_response(json.dumps(cut).encode(), stream=False)["finish_reason"] == "length"
    call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
    reply = read_response(json.dumps({**RESPONSE, "output": [call]}).encode(), stream=False)
    assert reply["finish_reason"] == "tool_calls"
    assert reply["choices"][0]["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "find", "arguments": "{}"},
    }


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"type": "response.created", "response": {}}\n\n',
        b'data: {"type": "response.failed", "response": {}}\n\n',
        b"",
    ],
)
def test_a_stream_of_events_without_its_last_one_is_refused(body):
    with pytest.raises(ValueError, match="cut short"):
        read_response(body, stream=True)


@pytest.mark.parametrize("status", ["queued", "failed", "in_progress", "cancelled", None])
def test_a_response_without_an_end_is_no_reply(status):
    with pytest.raises(ValueError, match="no end"):
        read_response(json.dumps({**RESPONSE, "status": status}).encode(), stream=False)


def test_a_subject_of_one_request_is_no_other_requests():
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    answer = json.dumps({"choices": [{"index": 0, "message": {"content": "y"}}]}).encode()
    verdict = Verdict(None, "allow_all", one_request_subject=True)
    found = [
        build_record(Taken("chat", verdict, 1.0, None, 1.0, body, answer, False, ()), target=None)[0] for _ in "ab"
    ]
    assert [record["subject"] for record in found] == [f"request:{record['id']}" for record in found]
    assert found[0]["subject"] != found[1]["subject"]
