import copy
import json
import logging
import re

import pytest

from bench.oracles.redaction_records import clean, labelled
from pipeline.collect_config import CustomPattern, RedactionConfig
from pipeline.errors import ConfigError, Rejected
from pipeline.redaction import Redactor, conversation_of
from pipeline.split import SplitKey

KEY = SplitKey(b"the split key of these tests")
MAIL, IBAN = "anna.berg@firma.de", "DE89 3704 0044 0532 0130 00"


def redactor(**settings):
    return Redactor(RedactionConfig(**{"names": "not_redacted", **settings}), KEY)


@pytest.fixture(scope="module")
def plain():
    return redactor()


def user(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def call(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "send", "arguments": arguments}}


# Each place that a text may stand in: MAIL is to become one and the same made-up address in all of them.
PLACES = {
    "content": user(f"write to {MAIL}"),
    "part": user([{"type": "text", "text": f"write to {MAIL}"}]),
    "two parts": user([{"type": "text", "text": "write to anna.be"}, {"type": "text", "text": "rg@firma.de now"}]),
    "three parts": user([{"type": "text", "text": t} for t in ("mail anna", ".berg@fir", "ma.de now")]),
    "name": {"messages": [{"role": "user", "name": MAIL, "content": "hi"}]},
    "reasoning": {"messages": [{"role": "assistant", "reasoning_content": f"it is {MAIL}", "content": ""}]},
    "arguments": {"messages": [{"role": "assistant", "tool_calls": [call(json.dumps({"to": [{"cc": MAIL}]}))]}]},
    "arguments that are no JSON": {"messages": [{"role": "assistant", "tool_calls": [call(f'{{"to": "{MAIL}')]}]},
    "arguments as an object": {"messages": [{"role": "assistant", "tool_calls": [call({"to": MAIL})]}]},
    "tool result": {"messages": [{"role": "tool", "tool_call_id": "call_1", "content": f'{{"to": "{MAIL}"}}'}]},
    "prompt": {"prompt": f"write to {MAIL}"},
    "tool's description": user("hi", tools=[{"type": "function", "function": {"description": f"mails {MAIL}"}}]),
    "parameter's description": user(
        "hi", tools=[{"function": {"parameters": {"properties": {"to": {"description": f"as {MAIL}"}}}}}]
    ),
    "tools as JSON": user("hi", tools=json.dumps([{"function": {"description": f"mails {MAIL}"}}])),
    "template argument": user("hi", params={"chat_template_kwargs": {"sender": MAIL}}),
    "stop": user("hi", params={"stop": [f"{MAIL}\n"]}),
    "reply": user("hi", response={"choices": [{"message": {"content": f"write to {MAIL}"}, "finish_reason": "stop"}]}),
    "text completion": user("hi", response={"choices": [{"text": f"write to {MAIL}"}]}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_value_is_replaced_alike_wherever_a_text_may_stand(plain, place):
    before = copy.deepcopy(PLACES[place])
    redacted = plain.redact(PLACES[place], "c1")
    written = json.dumps(redacted.body)
    assert "berg" not in written and "firma.de" not in written
    assert re.findall(r"[\w.]+@example\.\w+", written.replace('"}, {"type": "text", "text": "', "")) == [
        plain.redact({"prompt": MAIL}, "c1").body["prompt"]
    ]
    assert redacted.found == {"email": 1} and redacted.changed
    assert PLACES[place] == before


@pytest.mark.parametrize(
    "body",
    [
        user("hi", params={"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": MAIL}}}}),
        user("hi", params={"structured_outputs": {"regex": MAIL}}),
        user("hi", params={"guided_choice": [MAIL, "b"]}),
        user("hi", params={"structured_outputs": {"json": {"properties": {MAIL: {"type": "string"}}}}}),
        user("hi", tools=[{"function": {"parameters": {"properties": {"to": {"enum": [MAIL]}}}}}]),
        user("hi", tools=[{"function": {"name": MAIL}}]),
        user("hi", params={"chat_template_kwargs": {MAIL: True}}),
        {"messages": [{"role": "assistant", "tool_calls": [call(json.dumps({MAIL: 1}))]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**call("{}"), "id": MAIL}]}]},
        {"messages": [{"role": "tool", "tool_call_id": MAIL, "content": "x"}]},
        {"messages": [{"role": MAIL, "content": "x"}]},
        {MAIL: "x"},
    ],
)
def test_a_value_where_nothing_can_be_written_anew_rejects_the_record(plain, body):
    with pytest.raises(Rejected, match=r"^personal_data_in_settings$"):
        plain.redact(body, "c1")


def test_one_value_is_one_in_all_turns_and_records_of_a_conversation_and_another_elsewhere(plain):
    first = plain.redact(user(f"I am {MAIL}"), "c1").body["messages"][0]["content"].split()[-1]
    turns = [{"role": "user", "content": f"I am {MAIL}"}, {"role": "assistant", "content": f"Dear {MAIL.upper()},"}]
    later = plain.redact({"messages": [*turns, {"role": "user", "content": f"<{MAIL}>"}]}, "c1").body["messages"]
    assert [turn["content"] for turn in later] == [f"I am {first}", f"Dear {first},", f"<{first}>"]
    assert first not in plain.redact(user(f"I am {MAIL}"), "c2").body["messages"][0]["content"]


def test_arguments_keep_the_spacing_that_they_were_written_with(plain):
    new = plain.redact({"prompt": MAIL}, "c1").body["prompt"]
    for written in (
        '{"to": "%s", "n": 1}',
        '{"to":"%s","n":1}',
        '{"to": "%s", "who": "J\\u00fcrgen"}',
        '{"to": "%s", "who": "Jürgen"}',
    ):
        body = {"messages": [{"role": "assistant", "tool_calls": [call(written % MAIL)]}]}
        made = plain.redact(body, "c1").body["messages"][0]["tool_calls"][0]["function"]["arguments"]
        assert made == written % new
    odd = '{ "to" : 1.50 }'
    body = {"messages": [{"role": "assistant", "tool_calls": [call(odd)]}]}
    assert plain.redact(body, "c1").body == body


def test_a_card_that_is_a_number_in_arguments_is_replaced_as_a_number(plain):
    body = {"messages": [{"role": "assistant", "tool_calls": [call('{"card": 4539148803436467, "n": 12}')]}]}
    arguments = json.loads(plain.redact(body, "c1").body["messages"][0]["tool_calls"][0]["function"]["arguments"])
    assert arguments["n"] == 12
    assert isinstance(arguments["card"], int) and str(arguments["card"]).startswith("42424242")


def test_numbers_are_looked_at_wherever_a_call_or_a_template_is_given_one():
    own = redactor(custom=[CustomPattern(name="customer", pattern=r"\b\d{8}\b")])
    given = {"card": 4539148803436467, "as_float": 4539148803436467.0, "phone": 4153675309, "customer": 12345678}
    kept = {"n": 12, "price": 19.5, "ok": True, "year": 2026, "id": 987654321}
    for body in (
        {"messages": [{"role": "assistant", "tool_calls": [call(json.dumps(given | kept))]}]},
        {"messages": [{"role": "assistant", "tool_calls": [call(given | kept)]}]},
        user("hi", params={"chat_template_kwargs": given | kept, "seed": 4539148803436467}),
    ):
        redacted = own.redact(body, "c1")
        assert redacted.found == {"card": 2, "phone": 1, "custom_customer": 1}
        written = json.dumps(redacted.body.get("messages") if "params" not in body else redacted.body["params"])
        assert not any(str(number) in written for number in (4153675309, 12345678)) and "987654321" in written
        assert ("4539148803436467" in written) == ("params" in body), "a seed is no word of anybody"


@pytest.mark.parametrize(
    "body",
    [
        user("hi", tools=[{"function": {"parameters": {"properties": {"to": {"enum": [4539148803436467]}}}}}]),
        user("hi", params={"response_format": {"json_schema": {"schema": {"const": 4539148803436467}}}}),
    ],
)
def test_a_number_in_a_schema_rejects_the_record_where_it_is_somebodys(plain, body):
    with pytest.raises(Rejected, match=r"^personal_data_in_settings$"):
        plain.redact(body, "c1")


def test_the_key_that_a_value_stands_under_counts(plain):
    body = {
        "messages": [{"role": "assistant", "tool_calls": [call('{"password": "hunter2xy", "title": "hunter2xy"}')]}]
    }
    made = json.loads(plain.redact(body, "c1").body["messages"][0]["tool_calls"][0]["function"]["arguments"])
    assert made["password"].startswith("notreal") and made["title"] == "hunter2xy"


def test_groups_are_named_alike_in_every_conversation(plain):
    body = user("hi", slice=MAIL, slices={"desk": MAIL}, tenant=MAIL, id=MAIL)
    one, two = (plain.redact(body, conversation).body for conversation in ("c1", "c2"))
    assert one == two
    assert MAIL not in json.dumps(one)
    assert one["slice"] == one["slices"]["desk"] == one["tenant"]


def reply(text, **more):
    choice = {"message": {"role": "assistant", "content": text}, "token_ids": [1, 2], "finish_reason": "stop"}
    return {"prompt_token_ids": [3, 4], "choices": [{**choice, "logprobs": {"content": [{"token": MAIL}]}}], **more}


def test_token_ids_are_kept_only_where_nothing_was_changed_and_their_text_is_there(plain):
    whole = user("hi", response=reply("ok"))
    assert plain.redact(whole, "c1").body == whole
    for body in (
        user(f"I am {MAIL}", response=reply("ok")),
        user("hi", response=reply(f"Dear {MAIL}")),
        user("hi", response={"prompt_token_ids": [3], "choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}),
        user("hi", response=reply("ok"), params={"include_reasoning": False}),
    ):
        made = plain.redact(body, "c1").body["response"]
        assert "prompt_token_ids" not in made
        assert set(made["choices"][0]) <= {"message", "finish_reason"}


def test_what_is_found_is_counted_by_kind_and_never_told(plain, caplog):
    with caplog.at_level(logging.DEBUG):
        redacted = plain.redact(
            user(f"{MAIL} {MAIL} {IBAN} GB00XXXX00000000000000 84.12.3.4 4539 1488 0343 6468"), "c1"
        )
    assert redacted.found == {"email": 2, "iban": 1, "ip": 1}
    told = caplog.text + repr(redacted.found) + repr(plain)
    assert not any(value in told for value in (MAIL, "berg", "3704", "84.12", "GB00"))
    # Presidio quotes what it could not check.
    assert not logging.getLogger("presidio-analyzer").isEnabledFor(logging.CRITICAL)


def test_a_redacted_record_has_nothing_left_to_redact(plain):
    for record in labelled(per_kind=6):
        once = plain.redact(record.body, "c1")
        assert once.changed, record.value.kind
        again = plain.redact(once.body, "c2")
        assert again.body == once.body, (record.value.kind, again.found)


def test_a_record_without_personal_data_stays_byte_for_byte(plain):
    for body in clean(count=150):
        if not (redacted := plain.redact(body, "c1")).changed:
            assert json.dumps(redacted.body) == json.dumps(body)


def test_signs_that_only_look_like_others_hide_nothing(plain):
    text = (
        "４５３９ 1488\u00a00343\u00a06467, anna．berg＠firma.de, DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00"
    )
    assert plain.redact({"prompt": text}, "c1").found == {"card": 1, "email": 1, "iban": 1}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("to anna.berg\u200b@firma.de now", "email"),
        ("to an\u00adna.berg@fir\u2060ma.de now", "email"),
        ("https://h.io/?to=anna.berg%40firma.de now", "email"),
        ("to anna.berg&#64;firma.de now", "email"),
        ('{"to": "anna.berg\\u0040firma.de"} now', "email"),
        ('{\\"to\\": \\"anna.berg\\\\u0040firma.de\\"} now', "email"),
        ("card 4539\u200b1488\u200b0343\u200b6467 now", "card"),
        ("card ٤٥٣٩ ١٤٨٨ ٠٣٤٣ ٦٤٦٧ now", "card"),
        ("مواعيد: هاتف +٤٩ ١٥١ ٢٣٤٥٦٧٨٩ now", "phone"),
    ],
)
def test_what_nobody_sees_or_another_script_writes_hides_nothing(plain, text, kind):
    redacted = plain.redact({"prompt": text}, "c1")
    made = redacted.body["prompt"]
    assert redacted.found == {kind: 1} and made.endswith(" now")
    assert not any(part in made for part in ("anna", "berg", "firma", "6467", "٦٤٦٧", "٢٣٤٥"))
    assert plain.redact(redacted.body, "c2").body["prompt"] == made


def test_signs_that_nobody_sees_stay_where_nothing_is_found(plain):
    text = "50% of 40%40 and Auf\u00adlage, \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 👩\u200d💻 &#64; ok"
    assert plain.redact({"prompt": text}, "c1").body["prompt"] == text


def test_half_a_character_rejects_the_record(plain):
    with pytest.raises(Rejected, match=r"^not_unicode$"):
        plain.redact(user("half a pair: \ud800 and more"), "c1")


def test_a_record_that_is_nested_too_deep_is_rejected(plain):
    deep = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(Rejected, match=r"^nested_too_deep$"):
        plain.redact(user("hi", metadata=deep), "c1")
    with pytest.raises(Rejected, match=r"^nested_too_deep$"):
        conversation_of(user(deep))


def test_names_must_be_given_up_in_so_many_words_or_found_by_a_model_that_is_there():
    with pytest.raises(ConfigError, match="names=not_redacted"):
        Redactor(RedactionConfig(), KEY)
    with pytest.raises(ConfigError, match="spacy download no_such_model"):
        redactor(names="no_such_model")


def test_a_model_that_is_there_finds_people_and_places(tmp_path):
    import spacy

    model = spacy.blank("en")
    people = [{"label": "PERSON", "pattern": name} for name in ("Anna Berg", "Anna")]
    model.add_pipe("entity_ruler").add_patterns([*people, {"label": "GPE", "pattern": "Köln"}])
    model.to_disk(tmp_path / "model")
    both = redactor(names=str(tmp_path / "model"))
    redacted = both.redact(user("Anna Berg of Köln wrote. Anna is well."), "c1")
    assert redacted.found == {"person": 2, "place": 1}
    first, last, _, place, _, again = redacted.body["messages"][0]["content"].replace(".", "").split()[:6]
    assert again == first and {first, last, place}.isdisjoint({"Anna", "Berg", "Köln"})
    schema = [{"function": {"name": "ride", "parameters": {"properties": {"to": {"enum": ["Köln"]}}}}}]
    assert both.redact(user("hi", tools=schema), "c1").body["tools"] == schema


def test_own_patterns_are_replaced_by_values_of_the_same_form():
    own = redactor(custom=[CustomPattern(name="customer", pattern=r"\bKD-\d{8}\b")])
    redacted = own.redact(user("customer KD-12345678 and KD-1234"), "c1")
    assert redacted.found == {"custom_customer": 1}
    assert re.fullmatch(r"customer [A-Z]{2}-\d{8} and KD-1234", redacted.body["messages"][0]["content"])
    checked = redactor(custom=[CustomPattern(name="member", pattern=r"\bM\d{8}\b", check="luhn")])
    assert checked.redact(user("M12345674 and M12345675"), "c1").found == {"custom_member": 1}


def test_own_patterns_are_looked_for_in_texts_of_any_length():
    own = redactor(custom=[CustomPattern(name="pin", pattern=r"\b\d{3}\b")])
    assert own.redact({"prompt": "123"}, "c1").found == {"custom_pin": 1}


def test_a_pattern_that_takes_too_long_is_a_reject_and_no_hanging_run():
    slow = redactor(custom=[CustomPattern(name="slow", pattern=r"(a|aa)+$")], pattern_timeout_s=0.02)
    with pytest.raises(Rejected, match=r"^pattern_timeout$"):
        slow.redact(user("a" * 60 + "b"), "c1")


def test_settings_and_versions_decide_what_a_redaction_means():
    assert redactor().meaning == redactor().meaning != redactor(phone_regions=("US",)).meaning
    assert set(redactor().meaning["libraries"]) >= {"presidio_analyzer", "phonenumbers", "kingfisher-secret-scanner"}


def test_a_conversation_is_its_subject_and_name_or_how_it_began():
    one = user("hi")
    assert conversation_of({**one, "subject": "a", "conversation": "1"}) != conversation_of(
        {**one, "subject": "b", "conversation": "1"}
    )
    longer = {
        "messages": [*one["messages"], {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]
    }
    assert conversation_of(one) == conversation_of(longer) != conversation_of(user("ho"))
    assert conversation_of({"prompt": "hi"}) != conversation_of({"prompt": "ho"})
