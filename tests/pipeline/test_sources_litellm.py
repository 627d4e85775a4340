"""LiteLLM's logs: its standard payload, and rows of its spend-log table."""

import json

import pytest

from pipeline.canonical import canonical_request
from pipeline.errors import Rejected
from pipeline.sources.formats import records_of

ASK = [{"role": "user", "content": "Where is my parcel?"}]
TOOL = {"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}


def payload(**more):
    return {
        "id": "chatcmpl-1",
        "trace_id": "t-1",
        "call_type": "acompletion",
        "stream": False,
        "status": "success",
        "startTime": 1767268800.5,
        "endTime": 1767268801.5,
        "model": "support",
        "model_group": "support-eu",
        "cache_hit": None,
        "end_user": "u-7",
        "metadata": {"user_api_key_hash": "88dc", "user_api_key_team_id": "acme", "user_api_key_user_id": "robot"},
        "messages": ASK,
        "response": {
            "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "On its way."}}]
        },
        "model_parameters": {"temperature": 0.5, "max_tokens": 20, "stream": False},
        **more,
    }


def one(body):
    (record,) = records_of(body, "auto")
    return record


def reason(body):
    with pytest.raises(Rejected) as error:
        canonical_request(one(body))
    return str(error.value)


def test_a_payload_is_a_record_by_what_the_proxy_itself_knows():
    record = one(payload())
    assert {name: record[name] for name in ("id", "ts", "model", "tenant", "subject", "route")} == {
        "id": "chatcmpl-1",
        "ts": 1767268800.5,
        "model": "support",
        "tenant": "acme",
        "subject": "u-7",
        "route": "chat",
    }
    assert "consent" not in record
    asked = canonical_request(record)
    assert (json.loads(asked.messages), asked.temperature, asked.max_tokens) == (ASK, 0.5, 20)
    assert asked.subject == "subject:u-7"
    assert one({"standard_logging_object": payload()}) == record


def test_settings_of_the_server_itself_and_tools_are_found_where_the_proxy_puts_them():
    extra = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}
    asked = canonical_request(one(payload(model_parameters={"extra_body": extra, "tools": [TOOL], "top_p": 0.5})))
    assert (asked.top_p, asked.tools) == (0.5, json.dumps([TOOL], separators=(",", ":")))
    assert (asked.sampling, asked.template_args) == ('{"top_k":5}', '{"enable_thinking":false}')


@pytest.mark.parametrize(
    ("more", "subject"),
    [
        ({"end_user": None}, "subject:robot"),
        (
            {"end_user": "", "metadata": {"user_api_key_user_id": "default_user_id"}, "session_id": "s"},
            "conversation:s",
        ),
        ({"end_user": None, "metadata": {"user_api_key_hash": "88dc"}}, 'opening:[{"content":"Where is my parcel?",'),
        ({"end_user": None, "metadata": None}, "opening:"),
    ],
)
def test_the_holder_of_a_key_is_no_subject_by_itself(more, subject):
    assert canonical_request(one(payload(**more))).subject.startswith(subject)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"status": "failure", "response": None}, "failed_request"),
        ({"cache_hit": True}, "cache_hit"),
        ({"cache_hit": "True"}, "cache_hit"),
        ({"call_type": "aembedding"}, "other_call_type"),
        ({"call_type": "anthropic_messages"}, "other_call_type"),
        ({"call_type": None}, "other_call_type"),
        ({"messages": None}, "prompt_not_recorded"),
        ({"messages": {}}, "prompt_not_recorded"),
        ({"messages": [{"role": "user", "content": "redacted-by-litellm"}]}, "redacted_at_source"),
        ({"messages": "redacted-by-litellm"}, "redacted_at_source"),
        ({"call_type": "atext_completion", "messages": "Once upon"}, "unsupported_raw_prompt"),
        ({"model_parameters": {"n": 2}}, "unsupported_n"),
        ({"model_parameters": {"logit_bias": {"5": 1}}}, "unsupported_logit_bias"),
        ({"messages": [5]}, "malformed_messages"),
    ],
)
def test_what_the_fleet_did_not_answer_or_the_proxy_did_not_keep_is_told_by_its_reason(more, why):
    assert reason(payload(**more)) == why


def test_case_12_what_the_proxy_cut_is_rejected_and_a_question_about_it_is_kept():
    note = "Truncation is a DB storage safeguard. Full data is logged to callbacks (OTEL, Datadog, etc.)."
    cut = "x" * 420 + f"... (litellm_truncated skipped 800 chars. {note}) ..." + "y" * 780
    image = "look: data:image/png;base64,[base64_data truncated: 3.8KB]"
    for text in (cut, image):
        assert reason(payload(messages=[{"role": "user", "content": text}])) == "truncated_at_source"
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [_call(cut)]},
        {"role": "tool", "content": "ok"},
    ]
    assert reason(payload(messages=turns)) == "truncated_at_source"
    tool = {"type": "function", "function": {"name": "track", "description": cut}}
    assert reason(payload(model_parameters={"tools": [tool]})) == "truncated_at_source"
    for text in ("Why does LiteLLM say litellm_truncated?", "My log is truncated after 800 chars ..."):
        assert canonical_request(one(payload(messages=[{"role": "user", "content": text}])))


def _call(text):
    return {"id": "c", "type": "function", "function": {"name": "track", "arguments": json.dumps({"note": text})}}


def test_case_101_a_reply_that_was_only_reasoning_keeps_its_prompt():
    message = {"role": "assistant", "content": "", "reasoning_content": "thoughts " * 400}
    record = one(payload(response={"choices": [{"finish_reason": "length", "message": message}]}))
    assert json.loads(canonical_request(record).messages) == ASK


def test_a_row_of_the_spend_log_table_is_read_with_its_columns_as_text_or_not():
    request = {"model": "support", "messages": ASK, "temperature": 0.5, "tools": [TOOL]}
    row = {
        "request_id": "r-1",
        "call_type": "acompletion",
        "startTime": "2026-01-01 12:00:00.500",
        "model": "support",
        "cache_hit": "False",
        "end_user": "u-7",
        "team_id": "acme",
        "metadata": {},
        "messages": {},
        "response": {},
        "proxy_server_request": request,
    }
    text = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in row.items()}
    for record in (one(row), one(text)):
        assert (record["id"], record["ts"], record["tenant"]) == ("r-1", "2026-01-01 12:00:00.500", "acme")
        asked = canonical_request(record)
        assert (json.loads(asked.messages), asked.temperature, asked.subject) == (ASK, 0.5, "subject:u-7")
        assert json.loads(asked.tools) == [TOOL]


def test_the_responses_route_is_read_as_its_turns():
    params = {"instructions": "Be brief.", "max_output_tokens": 9}
    record = one(payload(call_type="aresponses", messages="hello", model_parameters=params))
    assert record["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (record["route"], canonical_request(record).max_tokens) == ("responses", 9)
