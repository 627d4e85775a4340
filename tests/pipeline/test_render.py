"""Rendering: ids are those of vLLM's own chat route, and a bad row harms no other."""

import json

import pytest
from tokenizers import Tokenizer, processors

from pipeline.canonical import canonical_request
from pipeline.render import Renderer, RenderError
from tests.tiny import ASSISTANT, BOS, END, EOS_TOKEN_ID, SPECIAL, USER, _tokenizer, tiny_target

TOOLS_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message['content'] }}"
    "{% for call in message.get('tool_calls', []) %}{{ call['function']['arguments']['city'] }}{% endfor %}{% endfor %}"
    "{% if thinking %}think{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A folder with nothing but a byte-level tokenizer and a template that writes the BOS itself."""
    _tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


# A template that hides nothing of what it is handed.
WRITES_ALL = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    "{% if thinking is defined %}{{ thinking }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As some templates do: earlier reasoning goes once a later turn exists, and without thinking the generation prompt
# itself holds an empty pair of tags.
DROPS_REASONING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% else %}<|assistant|>"
    "{% if loop.last %}<t>{{ m.reasoning }}</t>{% endif %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not thinking %}<t></t>{% endif %}{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"z": 1, "a": "x"}'}}
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}, "city": {"type": "string"}}}


def special(token):
    return SPECIAL.index(token)


def with_template(model, template):
    (model / "chat_template.jinja").write_text(template)
    return Renderer(model)


def bytes_of(model, text):
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_a_prompt_is_the_templates_own_ids_in_order(model):
    ids = Renderer(model).prompt_ids([{"role": "user", "content": "hi"}])
    assert ids == [special(BOS), special(USER), *bytes_of(model, "hi"), special(END), special(ASSISTANT)]


def test_one_bos_when_template_and_tokenizer_would_both_add_it(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, special(BOS))])
    tokenizer.save(str(model / "tokenizer.json"))
    assert tokenizer.encode("x").ids[0] == special(BOS)  # this tokenizer does add one on its own
    ids = Renderer(model).prompt_ids([{"role": "user", "content": "hi"}])
    assert ids.count(special(BOS)) == 1 and ids[0] == special(BOS)


def test_a_template_that_begins_with_two_bos_is_rejected(model):
    renderer = with_template(model, "{{ bos_token }}{{ bos_token }}x")
    with pytest.raises(RenderError) as error:
        renderer.prompt_ids([{"role": "user", "content": "hi"}])
    assert error.value.reason == "double_bos"


def test_tools_template_args_and_parsed_tool_arguments_reach_the_template(model):
    renderer = with_template(model, TOOLS_TEMPLATE)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    row = {
        "messages": json.dumps([{"role": "assistant", "content": "a", "tool_calls": [call]}]),
        "tools": json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {}}}]),
        "template_args": json.dumps({"thinking": True}),
    }
    assert renderer.row_ids(row) == bytes_of(model, "weatheraOslothink")
    plain = {**row, "tools": None, "template_args": "{}"}
    assert renderer.row_ids(plain) == bytes_of(model, "aOslo")


def test_a_single_text_part_renders_like_the_string(model):
    renderer = Renderer(model)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert renderer.prompt_ids(parts) == renderer.prompt_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "content_parts"),
        ([{"type": "image_url", "image_url": {}}], "content_parts"),
        ("refused", "template_failed"),
    ],
)
def test_a_conversation_without_one_rendering_is_a_counted_reject(model, content, reason):
    template = "{% for m in messages %}{{ raise_exception('no') if m['content'] == 'refused' else 'x' }}{% endfor %}"
    renderer = with_template(model, template)
    with pytest.raises(RenderError) as error:
        renderer.prompt_ids([{"role": "user", "content": content}])
    assert error.value.reason == reason


@pytest.fixture(scope="module")
def chat_route(tmp_path_factory):
    """A model folder, and vLLM's own chat route over it: request → ids."""
    import asyncio

    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    model = tiny_target(tmp_path_factory.mktemp("target"), layers=1)
    (model / "chat_template.jinja").write_text(WRITES_ALL)
    config = ModelConfig(model=str(model), dtype="float32", max_model_len=2048)
    route = OnlineRenderer(
        model_config=config,
        renderer=renderer_from_config(VllmConfig(model_config=config)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
    )

    def ids_of(request):
        _, (prompt,) = asyncio.run(route.render_chat(ChatCompletionRequest(**json.loads(json.dumps(request)))))
        return list(prompt["prompt_token_ids"])

    return model, ids_of


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": [{"role": "user", "content": "hi", "name": "bob", "unheard": 1}]},
        {"messages": [{"content": [{"type": "text", "text": "hi"}], "role": "user"}]},
        {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "hi"}]},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"function": {"parameters": PARAMETERS, "name": "time", "unheard": 1}, "type": "function"}],
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"strict": True, "name": "time", "description": "d"}}],
        },
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
                {"name": "weather", "role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
                {"role": "assistant", "reasoning_content": "r", "content": "a"},
                {"role": "user", "content": "and?"},
            ]
        },
        *(
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "w", "arguments": arguments}}]},
                    {"role": "tool", "tool_call_id": "c1", "content": "x"},
                ]
            }
            for arguments in ("", "{not json", "[1]", '{"a": {"z": 1, "b": 2}}')
        ),
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"thinking": False}},
        {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "none"},
    ],
)
def test_a_collected_request_renders_to_the_ids_of_vllms_own_chat_route(chat_route, request_body):
    model, ids_of = chat_route
    asked = canonical_request({**request_body, "consent": "recorded"})
    row = {"messages": asked.messages, "tools": asked.tools, "template_args": asked.template_args}
    assert Renderer(model).row_ids(row) == ids_of(request_body)


def test_case_52_what_the_template_supplies_is_prompt_and_the_first_token_of_a_reply_is_the_first_generated(model):
    renderer = with_template(model, DROPS_REASONING)
    ask = [{"role": "user", "content": "hi"}]
    silent, thinking = (renderer.prompt_ids(ask, template_args={"thinking": on}) for on in (False, True))
    assert silent == [*thinking, *bytes_of(model, "<t></t>")]
    assert thinking[-1] == special(ASSISTANT)


def test_case_51_a_later_turns_prompt_is_rendered_for_itself_where_the_template_rewrites_history(model):
    renderer = with_template(model, DROPS_REASONING)
    first = [{"role": "user", "content": "1+1?"}]
    reply = {"role": "assistant", "content": "2", "reasoning": "sum"}
    second = [*first, reply, {"role": "user", "content": "so?"}]
    emitted = [*bytes_of(model, "<t>sum</t>2"), special(END)]
    one, two = (renderer.prompt_ids(turns, template_args={"thinking": True}) for turns in (first, second))
    assert two[: len(one)] == one
    assert two[: len(one) + len(emitted)] != one + emitted  # one packed row would hold tokens that were never seen


def test_every_token_that_ends_a_turn_is_known(model):
    assert Renderer(model).end_ids == {EOS_TOKEN_ID}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [7, 8]}))
    assert Renderer(model).end_ids == {EOS_TOKEN_ID, 7, 8}
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Renderer(model).end_ids == {EOS_TOKEN_ID, 9}
