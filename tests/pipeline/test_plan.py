"""What is asked of the target: the traffic's own sampling under the policy, and nothing that is on record already."""

import json
import random

import pytest

from pipeline.canonical import canonical_request
from pipeline.config import Config
from pipeline.fingerprint import fingerprint_id, target_fingerprint
from pipeline.gate_prompts import _served as gate_served
from pipeline.plan import Planned, Served, plan, row_seed
from pipeline.render import Renderer
from pipeline.schemas import PROMPTS
from tests.tiny import EOS_TOKEN_ID, _tokenizer

TARGET_ID, END = "f00d", 1


def config(*, max_model_len=72, block_size=8, **regenerate):
    return Config(
        target={"model": "m", "max_model_len": max_model_len},
        drafter={"block_size": block_size},
        collect={"served_models": ["target"]},
        regenerate={"max_tokens": 16, **regenerate},
    )


def row(**changes):
    plain = dict.fromkeys(PROMPTS.names)
    return {**plain, "row_id": "r", "split": "train", "sampling": "{}", "temperature": 0.5, "top_p": 0.75, **changes}


def on_record(ids=(7, 8, END), reason="stop", **changes):
    served = {"served_prompt_ids": [0, 3, 4], "served_ids": list(ids), "served_finish_reason": reason}
    return row(**{**served, "served_by": TARGET_ID, **changes})


def planned(a_row, prompt_ids=(0, 3, 4), settings=None, target_id=TARGET_ID, end_ids=(END,)):
    return plan(settings or config(reuse="exact"), a_row, prompt_ids, target_id=target_id, end_ids=end_ids)


def test_case_4_a_prompt_that_fills_the_context_is_rejected_with_both_lengths_and_a_budget_is_clamped_to_the_rest():
    assert plan(config(), row(), [5] * 80, target_id="") == {
        "reason": "prompt_too_long",
        "prompt_tokens": 80,
        "usable_context": 64,
    }
    clamped = plan(config(), row(max_tokens=16), [5] * 60, target_id="")
    whole = plan(config(), row(max_tokens=16), [5] * 10, target_id="")
    assert (clamped.request.max_tokens, clamped.clamped) == (4, True)
    assert (whole.request.max_tokens, whole.clamped) == (16, False)
    assert plan(config(), row(), [5] * 63, target_id="").request.max_tokens == 1
    assert plan(config(), row(), [5] * 64, target_id="")["reason"] == "prompt_too_long"


def test_a_train_row_is_drawn_as_its_request_was():
    asked = row(sampling='{"top_k":5,"stop":["x"],"min_tokens":9}', max_tokens=12)
    request = plan(config(), asked, [1, 2], target_id="").request
    assert (request.temperature, request.top_p, request.max_tokens) == (0.5, 0.75, 12)
    assert request.sampling == '{"top_k":5,"stop":["x"],"min_tokens":9}'
    assert plan(config(), row(temperature=None, top_p=None), [1], target_id="").request.temperature is None


def test_policy_holds_above_the_traffic():
    request = plan(
        config(temperature=0.25), row(max_tokens=999, sampling='{"min_tokens":20}'), [1], target_id=""
    ).request
    assert (request.temperature, request.max_tokens, request.sampling) == (0.25, 16, '{"min_tokens":16}')


def answered(asked, request):
    """The row of RESPONSES that a request becomes."""
    drawn = {name: getattr(request, name) for name in ("temperature", "top_p", "max_tokens", "sampling")}
    return {**asked, **drawn, "prompt_ids": list(request.prompt_ids)}


@pytest.mark.parametrize("split", ["validation", "gate"])
def test_a_held_out_row_is_answered_as_the_gate_serves_it(split):
    asked = row(
        split=split,
        max_tokens=12,
        sampling=json.dumps(
            {
                "top_k": 5,
                "presence_penalty": 0.5,
                "stop": ["x"],
                "min_tokens": 14,
                "structured_outputs": {"regex": "a+"},
            }
        ),
    )
    settings = config()
    request = plan(settings, asked, [1, 2], target_id="").request
    served = gate_served(settings, answered(asked, request), 8)
    assert served["num_tokens"] == request.max_tokens == 12
    assert served["sampling"] == {"temperature": request.temperature, **json.loads(request.sampling)}
    assert served["sampling"] == {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "min_tokens": 12,
        "structured_outputs": {"regex": "a+"},
    }


DRAWS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
DRAWS += ("stop", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens", "structured_outputs", "n", "logit_bias")
SERVERS_OWN = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}  # a generation_config.json
ASKED = [
    {},
    {"temperature": 0},
    {"temperature": 0.5, "top_p": 0.75, "top_k": -1, "stop": "END", "max_tokens": 9},
    {"repetition_penalty": 1.0, "presence_penalty": 0.5, "min_tokens": 4, "stop_token_ids": [9, 3], "min_p": 0.25},
    {"response_format": {"type": "json_object"}, "ignore_eos": True, "frequency_penalty": -0.5},
    {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0, "top_k": 3, "presence_penalty": 1.5},
]


def collected(body, **changes):
    asked = canonical_request({"messages": [{"role": "user", "content": "a"}], **body})
    drawn = {name: getattr(asked, name) for name in ("temperature", "top_p", "max_tokens", "sampling")}
    return row(**drawn, slices="{}", **changes)


def engines_params(request):
    from vllm import SamplingParams

    from jobs.engine_sampling import reply_params

    params = reply_params(request, SamplingParams.from_optional(**SERVERS_OWN))
    return {name: getattr(params, name) for name in DRAWS}


@pytest.mark.parametrize("body", ASKED)
def test_the_engine_draws_a_train_row_with_the_parameters_that_the_chat_route_made_of_its_request(body):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    served = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **body)
    budget = body.get("max_tokens", 16)
    params = served.to_sampling_params(budget, SERVERS_OWN)
    request = plan(config(), collected(body), [1, 2], target_id="").request
    assert engines_params(request) == {name: getattr(params, name) for name in DRAWS}


@pytest.mark.parametrize("body", ASKED)
def test_a_held_out_row_is_answered_with_the_parameters_that_the_gates_request_body_gets(body):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    asked = collected(body, split="gate")
    request = plan(config(), asked, [1, 2], target_id="").request
    served = gate_served(config(), answered(asked, request), 8)
    params = CompletionRequest(prompt=[1, 2], **served["sampling"]).to_sampling_params(
        served["num_tokens"], SERVERS_OWN
    )
    assert engines_params(request) == {name: getattr(params, name) for name in DRAWS}
    assert params.temperature == 0.0


def test_a_seed_is_the_rows_own_in_every_run():
    assert row_seed(0, "a") == row_seed(0, "a")
    assert len({row_seed(seed, name) for seed in range(9) for name in "abcdefghi"}) == 81
    assert all(0 <= row_seed(0, str(n)) < 2**31 for n in range(99))


def test_a_served_reply_is_reused_by_its_exact_ids():
    found = planned(on_record())
    assert isinstance(found, Served)
    assert (found.reply.row_id, found.reply.ids, found.reply.finish_reason) == ("r", (7, 8, END), "stop")
    assert found.request == planned(row()).request
    assert found.reply.accepted_per_step is None


@pytest.mark.parametrize(
    ("a_row", "changes"),
    [
        (on_record(), {"settings": config()}),  # reuse is off unless it is typed out
        (on_record(split="validation"), {}),
        (on_record(split="gate"), {}),
        (on_record(), {"target_id": "beef"}),
        (on_record(), {"prompt_ids": (0, 3, 5)}),
        (on_record(), {"prompt_ids": (0, 3, 4, 5)}),
        (on_record(), {"settings": config(reuse="exact", temperature=0.5)}),
        (on_record(served_ids=None), {}),
    ],
    ids=["never", "validation", "gate", "target", "prompt", "longer prompt", "temperature", "no ids"],
)
def test_a_reply_of_another_target_prompt_or_sampling_is_not_reused_and_held_out_rows_are_always_answered(
    a_row, changes
):
    assert isinstance(planned(a_row, **changes), Planned)


@pytest.mark.parametrize(
    ("ids", "reason", "sampling", "reused"),
    [
        ((5, 6, END), "stop", "{}", True),
        ((5, 6), "stop", "{}", False),  # the view that leaves the end token out
        ((5, END, 6), "stop", "{}", False),
        ((5, END, END), "stop", "{}", False),
        ((5,) * 16, "length", "{}", True),
        ((5,) * 15 + (END,), "length", "{}", False),
        ((5, 9), "stop", '{"stop_token_ids":[9]}', True),
        ((5, END, 9), "stop", '{"stop_token_ids":[9],"ignore_eos":true}', True),
        ((5, 6, END), "stop", '{"stop":["x"]}', False),
    ],
)
def test_case_7_a_reused_reply_ends_with_its_end_token_on_stop_and_has_none_on_length(ids, reason, sampling, reused):
    assert isinstance(planned(on_record(ids, reason, sampling=sampling)), Served) is reused


def test_a_reply_beyond_the_budget_is_cut_there_and_one_that_another_limit_cut_is_not_reused():
    long = planned(on_record((*range(5, 25), END)))
    assert (long.reply.ids, long.reply.finish_reason) == (tuple(range(5, 21)), "length")
    crowded = planned(on_record((*range(5, 15), END), served_prompt_ids=[3] * 60), prompt_ids=(3,) * 60)
    assert (len(crowded.reply.ids), crowded.reply.finish_reason, crowded.clamped) == (4, "length", True)
    assert isinstance(planned(on_record((5, 6, 7), "length")), Planned)
    assert isinstance(planned(on_record((5, 6, 7), "length", max_tokens=3)), Served)


def test_reuse_changes_nothing_in_how_long_replies_are():
    """Served replies of random lengths, cut at the budget, against fresh draws that end at it: one distribution."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 40) for _ in range(400)]
    reused = [planned(on_record((*[5] * (length - 1), END))).reply for length in lengths]
    assert [len(reply.ids) for reply in reused] == [min(length, 16) for length in lengths]
    assert [reply.finish_reason for reply in reused] == ["stop" if length <= 16 else "length" for length in lengths]


def test_case_49_a_reused_reply_is_what_was_emitted_and_not_what_its_text_renders_to(tmp_path):
    _tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    renderer = Renderer(tmp_path)
    prompt_ids = renderer.prompt_ids([{"role": "user", "content": "hi"}])
    # Four ids of one word each and the end token: rendered again as a message they would be other ids, without it.
    emitted = [300, 301, 302, 303, EOS_TOKEN_ID]
    text = renderer._tokenizer.decode(emitted, skip_special_tokens=True)
    again = renderer.prompt_ids([{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}])
    assert again[len(prompt_ids) : len(prompt_ids) + len(emitted)] != emitted
    a_row = on_record(emitted, served_prompt_ids=prompt_ids)
    found = planned(a_row, prompt_ids=tuple(prompt_ids), end_ids=renderer.end_ids)
    assert list(found.reply.ids) == emitted


def test_a_targets_id_is_the_same_whatever_layers_are_read_and_another_for_another_dtype(tmp_path):
    _tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    one, other = (target_fingerprint(tmp_path, dtype="float32", target_layer_ids=ids) for ids in ((), (1, 3)))
    assert fingerprint_id(one) == fingerprint_id(other)
    assert fingerprint_id(one) != fingerprint_id(target_fingerprint(tmp_path, dtype="bfloat16", target_layer_ids=()))
