"""Every group a request is in is named from what the request says, and from how it is served."""

import json

import pytest

from pipeline.canonical import canonical_request
from pipeline.slices import UNKNOWN, language, names, served_slices


def asked(content="Where is my parcel? I ordered it a week ago.", **more):
    return json.loads(canonical_request({"messages": [{"role": "user", "content": content}], **more}).slices)


def test_a_request_names_route_tenant_language_and_thinking():
    found = asked(slice="billing", tenant="acme", chat_template_kwargs={"enable_thinking": False})
    assert found == {"route": "billing", "tenant": "acme", "language": "en", "thinking": "off"}


def test_what_a_request_does_not_say_is_no_slice():
    assert asked() == {"route": "default", "language": "en"}


def test_a_records_own_slices_come_on_top_and_win():
    found = asked(slices={"plan": "pro", "language": "pt", "empty": None})
    assert found == {"route": "default", "language": "pt", "plan": "pro"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("Wo bleibt mein Paket, das ich letzte Woche bestellt habe?", "de"),
        ("我上周订购的包裹在哪里?我已经等了很久了,请尽快告诉我", "zh"),
        ("12345 67890 !!!", UNKNOWN),
        ("order?", UNKNOWN),
    ],
)
def test_the_language_is_that_of_the_last_users_words_or_unknown_where_they_are_too_few(words, code):
    earlier = {"role": "user", "content": "This is an English sentence that was said before."}
    reply = {"role": "assistant", "content": "A reply in English, which says nothing of the user."}
    parts = [{"type": "text", "text": words}]
    assert language([earlier, reply, {"role": "user", "content": parts}]) == code


def test_length_and_temperature_are_buckets_by_their_upper_end():
    low = names(served_slices('{"route":"a"}', num_prompt_tokens=128, temperature=0.0))
    high = names(served_slices(None, num_prompt_tokens=129, temperature=1.5))
    assert low == ["length=≤128", "route=a", "temperature=≤0"]
    assert high == ["length=≤512", "temperature=>1"]
