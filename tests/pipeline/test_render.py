"""Rendering: the target's own template decides, ids are exact, and a bad row harms no other."""

import json

import pytest
from tokenizers import Tokenizer, processors

from pipeline.render import Renderer, RenderError
from tests.tiny import ASSISTANT, BOS, END, SPECIAL, USER, _tokenizer

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
        (None, "template_failed"),
    ],
)
def test_a_conversation_without_one_rendering_is_a_counted_reject(model, content, reason):
    renderer = with_template(model, "{% for m in messages %}{{ 'x' + m['content'] }}{% endfor %}")
    with pytest.raises(RenderError) as error:
        renderer.prompt_ids([{"role": "user", "content": content}])
    assert error.value.reason == reason
