"""Sampling of the traffic: kept as it was asked for, refused by name where it can't be, one form for one meaning."""

import json

import pytest

from pipeline.errors import Rejected
from pipeline.sampling import as_text, measured, settings_of, within

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


def test_a_plain_request_has_no_settings():
    assert as_text(settings_of({})) == "{}"
    assert as_text(settings_of({"temperature": 0.7, "top_p": 0.9, "max_tokens": 5, "seed": 1})) == "{}"
    absent = {"stop": [], "stop_token_ids": [], "ignore_eos": False, "min_tokens": 0, "top_k": None}
    asks_for_nothing = {"n": 1, "best_of": 1, "logit_bias": {}, "bad_words": [], "tool_choice": "auto", "echo": False}
    assert as_text(settings_of({**absent, **asks_for_nothing, "response_format": {"type": "text"}})) == "{}"


def test_a_setting_that_overrides_the_servers_own_default_stays_even_where_it_is_vllms():
    # A generation_config.json may say top_k 20; this client said: all of them.
    assert settings_of({"top_k": -1, "repetition_penalty": 1.0}) == {"top_k": -1, "repetition_penalty": 1.0}


def test_settings_have_one_order_and_one_form():
    one = {"stop": "END", "top_k": 4, "min_p": 0, "ignore_eos": True}
    other = {"ignore_eos": True, "min_p": 0.0, "top_k": 4, "stop": ["END"]}
    assert as_text(settings_of(one)) == as_text(settings_of(other))
    assert as_text(settings_of(one)) == '{"top_k":4,"min_p":0.0,"stop":["END"],"ignore_eos":true}'


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_k": True},
        {"min_p": 1.5},
        {"min_p": "0.1"},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("-inf")},
        {"stop": [""]},
        {"stop": ""},
        {"stop": 5},
        {"stop_token_ids": [1, -1]},
        {"stop_token_ids": 3},
        {"ignore_eos": "yes"},
        {"min_tokens": -1},
        {"structured_outputs": {}, "response_format": "json"},
        {"structured_outputs": "json"},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"disable_any_whitespace": True}},
        {"structured_outputs": {"json": SCHEMA, "unheard": 1}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ],
)
def test_a_malformed_setting_is_refused_by_its_name(params):
    with pytest.raises(Rejected) as error:
        settings_of(params)
    assert str(error.value) == f"malformed_{list(params)[-1]}"


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {"5": -100}},
        {"n": 2},
        {"best_of": 4},
        {"use_beam_search": True},
        {"bad_words": ["no"]},
        {"allowed_token_ids": [4]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"truncate_prompt_tokens": 100},
        {"vllm_xargs": {"processor": "own"}},
        {"response_format": {"type": "structural_tag"}},
    ],
)
def test_what_the_target_cannot_be_asked_again_is_refused_by_its_name(params):
    with pytest.raises(Rejected) as error:
        settings_of(params)
    assert str(error.value) == f"unsupported_{next(iter(params))}"


@pytest.mark.parametrize(
    ("params", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "regex": None}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
    ],
)
def test_a_constraint_is_the_same_whatever_it_was_called(params, constraint):
    assert settings_of(params) == {"structured_outputs": constraint}


def test_a_schema_keeps_the_order_of_its_properties_which_is_the_order_of_the_reply():
    swapped = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert as_text(settings_of({"guided_json": SCHEMA})) != as_text(settings_of({"guided_json": swapped}))


def test_vllm_takes_every_setting_by_the_name_it_is_kept_under():
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    everything = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 2}
    everything |= {"frequency_penalty": -0.5, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True}
    kept = json.loads(as_text(settings_of({**everything, "guided_json": SCHEMA})))
    structured = StructuredOutputsParams(**kept.pop("structured_outputs"))
    params = SamplingParams(**kept, structured_outputs=structured)
    assert {name: getattr(params, name) for name in everything} == everything
    assert params.structured_outputs.json == SCHEMA


def test_a_minimum_above_the_budget_is_the_budget():
    assert within('{"min_tokens":20}', max_tokens=8) == '{"min_tokens":8}'
    assert within('{"min_tokens":20}', max_tokens=30) == '{"min_tokens":20}'
    assert within(None, max_tokens=8) == "{}"


def test_what_is_measured_keeps_what_changes_a_greedy_reply_and_never_ends_at_a_string():
    asked = '{"top_k":5,"min_p":0.1,"presence_penalty":0.5,"stop":["x"],"stop_token_ids":[3],"min_tokens":9}'
    greedy = measured(asked, temperature=0.0, max_tokens=4)
    assert json.loads(greedy) == {"presence_penalty": 0.5, "stop_token_ids": [3], "min_tokens": 4}
    assert measured(greedy, temperature=0.0, max_tokens=4) == greedy
    assert json.loads(measured(asked, temperature=None, max_tokens=9)).keys() == {
        *("top_k", "min_p", "presence_penalty", "stop_token_ids", "min_tokens")
    }
