"""OpenAI-style logs: requests, pairs, batches; the chat, completions and responses routes."""

import json

import pytest

from pipeline.canonical import canonical_request
from pipeline.errors import Rejected
from pipeline.on_record import served_reply
from pipeline.sources.formats import records_of

ASK = [{"role": "user", "content": "weather?"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT_TOOL = {"type": "function", **FUNCTION}


def one(body, log_format="auto"):
    (record,) = records_of(body, log_format)
    return record


def reason(body, log_format="auto"):
    with pytest.raises(Rejected) as error:
        canonical_request(one(body, log_format))
    return str(error.value)


def test_a_request_alone_a_pair_a_batch_line_and_a_proxys_log_are_one_prompt():
    request = {"model": "m", "messages": ASK, "tools": [TOOL], "temperature": 0.5, "max_completion_tokens": 9}
    response = {"id": "r", "created": 1767268800, "choices": [{"message": {"content": "sunny"}}]}
    url = "/v1/chat/completions"
    found = [
        one(request),
        one({"request": request, "response": response}),
        one({"request": json.dumps(request), "response": json.dumps(response)}),
        one({"custom_id": "c-1", "method": "POST", "url": url, "body": request}),
        one(
            {
                "request": {"url": f"https://gateway{url}", "body": request},
                "response": {"status": 200, "body": response},
            }
        ),
    ]
    assert [record["route"] for record in found] == ["chat"] * 5
    assert [record.get("ts") for record in found] == [None, 1767268800, 1767268800, None, 1767268800]
    assert [record.get("id") for record in found] == [None, None, None, "c-1", None]
    asked = [canonical_request(record) for record in found]
    assert {(a.prompt, a.temperature, a.max_tokens, a.tools) for a in asked} == {
        (asked[0].prompt, 0.5, 9, json.dumps([TOOL], separators=(",", ":")))
    }
    assert [record.get("response") for record in found[1:3]] == [response, response]


def test_what_clients_sent_says_nothing_of_consent_tenant_or_subject():
    claims = {"consent": "recorded", "tenant": "t", "subject": "s", "slices": {"a": "b"}, "target": "f00d", "user": "u"}
    request = {"model": "m", "messages": ASK, **claims}
    record = one({"request": request, "tenant": "beside"})
    assert {name: record.get(name) for name in claims} == {**dict.fromkeys(claims), "tenant": "beside"}
    asked = canonical_request(record)
    assert asked.subject.startswith("opening:")
    assert json.loads(asked.slices) == {"route": "chat", "tenant": "beside"} | {"language": "unknown"}


def test_the_exact_ids_of_a_pairs_response_are_on_record():
    choice = {"message": {"content": "t"}, "finish_reason": "stop", "token_ids": [7, 1]}
    response = {"prompt_token_ids": [3, 4], "choices": [choice], "usage": {"completion_tokens": 2}}
    reply = served_reply(one({"request": {"messages": ASK}, "response": response, "target": "f00d"}))
    assert (reply.prompt_ids, reply.ids, reply.target) == ((3, 4), (7, 1), "f00d")


@pytest.mark.parametrize(
    "body",
    [
        {"request": {"messages": ASK}, "response": {"error": {"message": "overloaded"}}},
        {"request": {"messages": ASK}, "response": {"status": 500, "body": {}}},
        {"request": {"messages": ASK}, "status_code": 429},
        {"custom_id": "c", "response": {"status_code": 400, "body": {"error": {}}}, "error": None},
        {"custom_id": "c", "response": None, "error": {"code": "batch_expired"}},
    ],
)
def test_a_request_that_failed_is_no_traffic_of_the_target(body):
    assert reason(body) == "failed_request"


def test_a_batchs_output_holds_no_prompt():
    answered = {"status_code": 200, "body": {"choices": [{"message": {"content": "sunny"}}]}}
    assert reason({"custom_id": "c", "response": answered, "error": None}) == "reply_alone"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"custom_id": "c", "url": "/v1/embeddings", "body": {"model": "m", "input": "a"}}, "other_call_type"),
        ({"request": {"model": "m", "input": "a"}, "response": {"data": [{"embedding": []}]}}, "other_call_type"),
        ({"model": "m", "prompt": "Once upon"}, "unsupported_raw_prompt"),
        ({"custom_id": "c", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}, "unsupported_raw_prompt"),
        ({"request": "{broken", "response": {}}, "malformed_request"),
        ({"request": "[1]", "response": {}}, "malformed_request"),
        ({"model": "m", "messages": "hello"}, "malformed_messages"),
        ({"model": "m", "messages": ASK, "functions": [FUNCTION]}, "unsupported_functions"),
        ({"model": "m", "messages": [*ASK, {"role": "assistant", "content": "It is"}]}, "ends_with_reply"),
    ],
)
def test_what_is_no_chat_or_none_that_can_be_asked_again_is_told_by_its_reason(body, why):
    assert reason(body) == why


def test_a_prompt_without_a_model_is_a_line_of_a_prompt_file():
    assert canonical_request(one({"prompt": "Once upon"})).messages == '[{"role":"user","content":"Once upon"}]'
    assert reason({"prompt": "Once upon"}, "openai") == "unknown_format"
    assert one({"prompt": "a", "model": "m"}, "prompts") == {"prompt": "a", "model": "m"}


# What vLLM's construct_input_messages gave of the same input (run on 0.32).
ITEMS = [
    {"role": "user", "content": "weather?"},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "look it up"}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "x"}'},
    {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "c2", "output": "rainy"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and tomorrow?"}]},
]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "reasoning": "look it up",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}},
            {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    {"role": "tool", "content": "rainy", "tool_call_id": "c2"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": [{"type": "input_text", "text": "and tomorrow?"}]},
]


def test_items_of_the_responses_route_are_the_turns_that_the_server_makes_of_them():
    request = {"model": "m", "instructions": "Be brief.", "input": ITEMS, "tools": [FLAT_TOOL], "max_output_tokens": 7}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    request |= {"reasoning": {"effort": "low"}, "text": {"format": schema}, "temperature": 0.5}
    bare, pair = one(request), one({"request": request, "response": {"created_at": 5.0, "output": []}})
    tap = one({"params": {k: v for k, v in request.items() if k not in ("input", "instructions")}, **request})
    for record in (bare, pair, tap):
        assert (record["messages"], record["tools"], record["route"]) == (TURNS, [TOOL], "responses")
        asked = canonical_request(record)
        assert (asked.max_tokens, asked.temperature) == (7, 0.5)
        assert json.loads(asked.template_args) == {"enable_thinking": True, "reasoning_effort": "low"}
        assert json.loads(asked.sampling) == {"structured_outputs": {"json": {"type": "object"}}}
    assert pair["ts"] == 5.0


def test_vllm_makes_the_same_turns_of_the_items():
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    parsed = {"reasoning": ResponseReasoningItem, "function_call": ResponseFunctionToolCall}
    items = []
    for item in ITEMS:  # as the request's own parsing gives them
        if item.get("role") == "assistant":
            parts = [{**part, "annotations": []} for part in item["content"]]
            items.append(ResponseOutputMessage(**{**item, "content": parts}, id="m", status="completed"))
        else:
            items.append(parsed[item["type"]](**item) if item.get("type") in parsed else item)
    theirs = construct_input_messages(request_instructions="Be brief.", request_input=items)
    fields = ("role", "content", "reasoning", "tool_calls", "tool_call_id")
    assert [{k: m[k] for k in fields if k in m} for m in theirs] == TURNS


def test_a_text_input_is_a_users_turn():
    assert one({"model": "m", "input": "hello"})["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"previous_response_id": "r"}, "unsupported_previous_response_id"),
        ({"prompt": {"id": "p"}}, "unsupported_prompt"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "unsupported_item"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "unsupported_encrypted_reasoning"),
        ({"input": ["a", "b"]}, "malformed_messages"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "malformed_messages"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_builtin_tool"),
        ({"tools": "[{"}, "malformed_tools"),
        ({"truncation": "auto"}, "unsupported_truncate_prompt_tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "unsupported_image"),
    ],
)
def test_a_responses_request_that_its_messages_do_not_tell_whole_is_told_by_its_reason(more, why):
    assert reason({"model": "m", "input": "hello", **more}) == why
