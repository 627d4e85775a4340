"""A request's sampling as vLLM takes it: what the traffic asked for, else the target's own."""

import pytest
from vllm import SamplingParams

from jobs.engine_sampling import read_params, reply_params
from pipeline.engines import GenerateRequest
from pipeline.sampling import as_text, settings_of


def test_every_setting_of_the_traffic_reaches_the_sampler():
    asked = {
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["\n\n"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    sampling = as_text(settings_of(asked | {"response_format": {"type": "json_object"}}))
    request = GenerateRequest("row", (1, 2), 9, 0.5, 0.75, 11, sampling)
    params = reply_params(request, SamplingParams(top_k=3, temperature=0.1), capture={"key": "value"})
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.75, 9, 11)
    assert params.structured_outputs.json_object and params.extra_args == {"key": "value"}
    assert params.skip_reading_prefix_cache and params.detokenize  # a stop string is found in text


def test_what_a_request_leaves_open_is_the_targets_own():
    params = reply_params(GenerateRequest("row", (1,), 9, None, None, 1), SamplingParams(temperature=0.3, top_p=0.8))
    assert (params.temperature, params.top_p, params.detokenize) == (0.3, 0.8, False)


@pytest.mark.parametrize("sampling", ['{"voice":1}', '{"min_p":7}', '{"stop_token_ids":"x"}', '{"top_k":"many"}', "[]"])
def test_a_setting_that_vllm_does_not_take_is_an_error_of_the_request(sampling):
    with pytest.raises(ValueError):
        reply_params(GenerateRequest("row", (1,), 9, 0.0, None, 1, sampling), SamplingParams())


def test_reading_a_row_samples_one_token_and_leaves_the_prefix_cache_alone():
    params = read_params({"key": "value"})
    assert (params.max_tokens, params.temperature, params.detokenize) == (1, 0.0, False)
    assert params.skip_reading_prefix_cache and params.extra_args == {"key": "value"}
