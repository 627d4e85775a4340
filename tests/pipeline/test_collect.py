import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import collect, redaction
from pipeline.canonical import canonical_request
from pipeline.config import load_config
from pipeline.errors import ConfigError, Rejected, StageError
from pipeline.schemas import PROMPTS
from pipeline.shards import read_tables

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def user(text, **more):
    return {"id": f"id-{text[:20]}", "consent": "recorded", "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
def run(tmp_path):
    """Collect these files' records; returns rows, manifest and rejects."""
    tries = iter(range(1000))

    def collect_files(files, *, overrides=(), order=None):
        folder = tmp_path / f"try-{next(tries)}"
        log = folder / "traffic"
        log.mkdir(parents=True)
        for name, records in files.items():
            lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
            (log / name).write_text("\n".join(lines) + "\n")
        sources = [str(log / name) for name in order or sorted(files)]
        (folder / "s.toml").write_text(
            f"root = 'root'\n[target]\nmodel = 'm'\n[collect]\nsources = {json.dumps(sources)}\nredaction = 'none'\n"
        )
        artifact = collect.run(load_config(folder / "s.toml", overrides))
        rows = read_tables(artifact.folder, artifact.manifest.shards, PROMPTS).to_pylist()
        rejects = [json.loads(line) for line in (artifact.folder / "rejects.jsonl").read_text().splitlines()]
        return rows, artifact, rejects

    return collect_files


def test_only_records_that_carry_consent_are_kept_unless_allow_all_is_typed_out(run):
    records = [user("a"), {**user("b"), "consent": None}, {k: v for k, v in user("c").items() if k != "consent"}]
    rows, artifact, _ = run({"a.jsonl": records})
    assert [json.loads(r["messages"])[0]["content"] for r in rows] == ["a"]
    assert artifact.manifest.rejects == {"no_consent": 2}
    assert len(run({"a.jsonl": records}, overrides=["collect.consent=allow_all"])[0]) == 3


REDACTED = ("collect.redaction={names = 'not_redacted'}",)


def test_nothing_is_collected_before_someone_says_what_becomes_of_names(run):
    with pytest.raises(ConfigError, match="names=not_redacted"):
        run({"a.jsonl": [user("a")]}, overrides=["collect.redaction={}"])


def test_personal_data_is_replaced_alike_in_a_conversation_before_anything_else_reads_it(run):
    mail, card = "anna.berg@firma.de", "4539 1488 0343 6467"
    records = [
        user(f"I am {mail}", conversation="c1"),
        user(f"Again {mail}, card {card}", conversation="c1"),
        user(f"I am {mail}", conversation="c2", slice=mail),
        {**user("x", tools=json.dumps([{"type": "function", "function": {"name": mail}}])), "id": f"of {mail}"},
        user("hello there"),
    ]
    rows, artifact, rejects = run({"a.jsonl": records}, overrides=REDACTED)
    said = [json.loads(row["messages"])[0]["content"].split() for row in rows]
    assert ["hello", "there"] in said
    again = next(words[1].strip(",") for words in said if words[0] == "Again")
    assert sorted(words[-1] == again for words in said if words[0] == "I") == [False, True]
    counts = artifact.manifest.counts
    assert {name: n for name, n in counts.items() if name.startswith("redacted_")} == {
        "redacted_card": 1,
        "redacted_email": 4,
    }
    assert artifact.manifest.rejects == {"personal_data_in_settings": 1}
    written = b"".join(path.read_bytes() for path in artifact.folder.rglob("*") if path.is_file()).decode(
        errors="replace"
    )
    assert not any(value in written + json.dumps(rows) + json.dumps(rejects) for value in (mail, "anna", card))


def test_the_same_key_redacts_alike_and_other_settings_or_libraries_are_other_prompts(run, monkeypatch):
    records = [user(f"mail {n}: anna{n}@firma.de", subject=f"s{n}") for n in range(20)]
    first, second = (run({"a.jsonl": records}, overrides=REDACTED) for _ in range(2))
    assert first[0] == second[0] and first[1].id == second[1].id
    fewer = ("collect.redaction={names = 'not_redacted', phone_regions = ['US']}",)
    ids = {first[1].id, run({"a.jsonl": records}, overrides=fewer)[1].id, run({"a.jsonl": records})[1].id}
    monkeypatch.setattr(redaction.metadata, "version", lambda name: "another")
    assert len({*ids, run({"a.jsonl": records}, overrides=REDACTED)[1].id}) == 4


def test_a_served_reply_stands_only_where_redaction_changed_nothing(run):
    def served(text, reply):
        choice = {"message": {"content": reply}, "token_ids": [5, 6], "finish_reason": "stop"}
        response = {"prompt_token_ids": [1, 2], "choices": [choice], "usage": {"completion_tokens": 2}}
        return user(text, response=response, target="t")

    records = [served("hello there", "ok"), served("I am anna@firma.de", "ok"), served("who?", "ask anna@firma.de")]
    rows, _, _ = run({"a.jsonl": records}, overrides=REDACTED)
    assert {
        json.loads(row["messages"])[0]["content"]: row["served_ids"] for row in rows if "I am" not in row["messages"]
    } == {
        "hello there": [5, 6],
        "who?": None,
    }
    assert len(rows) == 3 and sum(row["served_ids"] is None for row in rows) == 2


def test_equal_prompts_become_one_row_that_stands_for_all_of_them(run):
    records = [user("same", subject=f"s{n}") for n in range(5)] + [user("other", subject="s0")]
    rows, artifact, _ = run({"a.jsonl": records})
    assert sorted(r["weight"] for r in rows) == [1, 5]
    assert artifact.manifest.counts["kept_records"] == 6


def test_the_same_records_give_the_same_bytes_in_any_order_of_files(run):
    files = {f"{n}.jsonl": [user(f"text {k % 30}", subject=f"s{k}") for k in range(n, 90, 3)] for n in range(3)}
    files["1.jsonl"].append("{broken")
    first = run(files, order=["0.jsonl", "1.jsonl", "2.jsonl"])
    second = run(files, order=["2.jsonl", "0.jsonl", "1.jsonl"])
    assert first[0] == second[0]
    assert first[1].manifest.content_id == second[1].manifest.content_id
    assert first[1].id == second[1].id


def test_order_inside_a_file_changes_nothing(run):
    records = [user(f"text {k % 20}", subject=f"s{k % 7}", temperature=0.0) for k in range(60)]
    shuffled = random.Random(0).sample(records, len(records))
    assert run({"a.jsonl": records})[0] == run({"a.jsonl": shuffled})[0]


def test_changed_content_is_other_work_and_unchanged_content_is_skipped(run, tmp_path):
    first = run({"a.jsonl": [user("a")]})[1]
    assert run({"a.jsonl": [user("a")]})[1].id == first.id
    assert run({"a.jsonl": [user("b")]})[1].id != first.id
    assert run({"a.jsonl": [user("a")]}, overrides=["collect.gate_share=0.3"])[1].id != first.id


def test_a_subject_is_in_exactly_one_set(run):
    rows = run({"a.jsonl": [user(f"question {n}", subject=f"s{n % 40}") for n in range(400)]})[0]
    sets = {}
    for row in rows:
        sets.setdefault(row["conversation"], set()).add(row["split"])
    assert len(sets) == 40
    assert all(len(splits) == 1 for splits in sets.values())
    assert {row["split"] for row in rows} == {"train", "validation", "gate"}


def test_turns_of_a_conversation_that_has_no_name_share_a_set(run):
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    later = [*opening, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    rows = run({"a.jsonl": [{"consent": "recorded", "messages": m} for m in (opening, later)]})[0]
    assert len(rows) == 2
    assert len({row["conversation"] for row in rows}) == 1


def test_no_subject_and_no_text_leaves_in_a_reject_or_a_hash(run):
    records = [
        user("my secret", subject="anna@example.org", n=3),
        "{my secret",
        user("fine", subject="anna@example.org"),
    ]
    rows, artifact, rejects = run({"a.jsonl": records}, overrides=["collect.max_reject_share=1.0"])
    written = (artifact.folder / "rejects.jsonl").read_text() + json.dumps([{**r, "messages": ""} for r in rows])
    assert len(rejects) == 2
    assert "anna" not in written
    assert "secret" not in written, "an id that is a text is not told either"


def test_a_reject_tells_an_id_only_where_an_erasure_finds_it(run):
    failed = {
        "call_type": "acompletion",
        "startTime": 1.7e9,
        "status": "failure",
        "id": "req-anna-1",
        "end_user": "anna",
    }
    known = user("hi", subject="anna", temperature="hot") | {"id": "req-anna-2"}
    _, _, rejects = run({"a.jsonl": [failed, known, user("ok")]}, overrides=["collect.max_reject_share=1.0"])
    assert [(one["reason"], one.get("id")) for one in rejects] == [
        ("failed_request", None), ("malformed_temperature", "req-anna-2"),
    ]  # fmt: skip
    assert "subject" in rejects[1]


def test_sampling_keeps_a_fixed_part_that_a_larger_one_contains(run):
    files = {"a.jsonl": [user(f"text {n}") for n in range(50)]}
    small = {r["row_id"] for r in run(files, overrides=["collect.max_prompts=10"])[0]}
    large, artifact, _ = run(files, overrides=["collect.max_prompts=30"])
    assert len(small) == 10
    assert small < {r["row_id"] for r in large}
    assert (artifact.manifest.counts["distinct_prompts"], artifact.manifest.counts["prompts"]) == (50, 30)


def test_what_cannot_be_asked_again_is_rejected_by_its_reason(run):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    records = [
        user("keep"),
        {**user("x"), "messages": image},
        user("several", n=2),
        user("biased", params={"logit_bias": {"5": -100}}),
        user("json", response_format={"type": "json_schema"}),
        user("forced", tools=TOOLS, tool_choice="required"),
        user("adapter", lora_name="mails-3"),
        {"consent": "recorded", "route": "completions", "prompt": "Once upon"},
        {"consent": "recorded", "messages": [{"role": "system", "content": "s"}]},
        {"consent": "recorded", "messages": "hello"},
        user("odd", temperature=float("nan")),
        user("lone \ud800 surrogate"),
    ]
    rows, artifact, rejects = run({"a.jsonl": records}, overrides=["collect.max_reject_share=1.0"])
    assert len(rows) == 1
    assert artifact.manifest.rejects == {
        "unsupported_image": 1,
        "unsupported_n": 1,
        "unsupported_logit_bias": 1,
        "malformed_response_format": 1,
        "unsupported_tool_choice": 1,
        "unsupported_adapter": 1,
        "unsupported_raw_prompt": 1,
        "no_user_turn": 1,
        "malformed_messages": 1,
        "malformed_temperature": 1,
        "not_unicode": 1,
    }
    assert [r["line"] for r in rejects] == list(range(2, 13))


def test_too_many_rejects_stop_the_stage_but_missing_consent_does_not(run):
    broken = ["{"] * 3 + [user(f"t{n}") for n in range(7)]
    with pytest.raises(StageError, match=r"3 of 10 .*not_json 3.*a\.jsonl:1"):
        run({"a.jsonl": broken})
    without = [{**user(f"w{n}"), "consent": None} for n in range(9)]
    assert len(run({"a.jsonl": [*without, user("one")]})[0]) == 1
    with pytest.raises(StageError, match="none of 9 records"):
        run({"a.jsonl": without})


def test_records_without_consent_do_not_make_a_damaged_log_look_sound(run):
    silent = [user(f"silent {n}", consent=None) for n in range(95)]
    bad = [user(f"bad {n}", temperature="hot") for n in range(4)]
    with pytest.raises(StageError, match=r"4 of 5 records rejected \(malformed_temperature 4, no_consent 95\)"):
        run({"a.jsonl": [*silent, *bad, user("good")]})


def test_text_that_a_proxy_cut_is_rejected_and_a_question_about_truncation_is_not(run):
    cut = "x" * 420 + "... (truncated 800 chars) ..." + "y" * 780
    proxy = "x" * 40 + "... (litellm_truncated skipped 165 chars. Full text elsewhere) ..." + "y" * 60
    base64 = "look: [base64 image/png truncated]"
    kept = ["Why is my log truncated?", "Explain (truncated) normal distributions ...", "a [base64] string, truncated"]
    records = [user(t) for t in (cut, proxy, base64, *kept)]
    rows, artifact, _ = run({"a.jsonl": records}, overrides=["collect.max_reject_share=0.5"])
    assert artifact.manifest.rejects == {"truncated_at_source": 3}
    assert sorted(json.loads(r["messages"])[0]["content"] for r in rows) == sorted(kept)


def test_tools_as_a_list_and_as_text_are_one_prompt_and_malformed_ones_none(run):
    turns = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    absent = [{k: v for k, v in t.items() if v is not None} for t in turns]
    records = [
        {"consent": "recorded", "messages": turns, "tools": TOOLS},
        {"consent": "recorded", "messages": absent, "tools": json.dumps(TOOLS)},
        {"consent": "recorded", "messages": turns, "tools": "[{"},
    ]
    rows, artifact, _ = run({"a.jsonl": records}, overrides=["collect.max_reject_share=0.5"])
    assert artifact.manifest.rejects == {"malformed_tools": 1}
    assert [(row["weight"], json.loads(row["tools"])) for row in rows] == [(2, TOOLS)]
    messages = json.loads(rows[0]["messages"])
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]  # the logged answer is not asked again
    assert messages[1]["content"] == ""
    assert "None" not in rows[0]["messages"]


def test_columns_are_the_same_whatever_the_rows_hold_and_structure_survives(run):
    plain = [user(f"plain {n}") for n in range(1000)]
    parts = [user("x", messages=[{"role": "user", "content": [{"type": "text", "text": "in parts"}]}])]
    calls = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "r"},
    ]
    files = {"a.jsonl": plain, "b.jsonl": parts, "c.jsonl": [user("y", messages=calls)]}
    overrides = ["collect.near_similarity=off"]
    rows, artifact, _ = run(files, order=["c.jsonl", "b.jsonl", "a.jsonl"], overrides=overrides)
    schema = pq.read_schema(artifact.folder / "prompts-00000.parquet")
    assert schema.equals(PROMPTS)
    assert schema.field("messages").type == pa.string()
    assert len(rows) == 1002
    kept = [json.loads(row["messages"]) for row in rows]
    assert parts[0]["messages"] in kept
    assert calls in kept


def test_a_reply_that_was_only_reasoning_keeps_its_prompt_and_is_not_used(run):
    reply = {"choices": [{"message": {"content": "", "reasoning": "long thoughts"}, "finish_reason": "length"}]}
    rows, artifact, _ = run({"a.jsonl": [user("think", response=reply)]})
    assert len(rows) == 1
    assert b"long thoughts" not in (artifact.folder / "prompts-00000.parquet").read_bytes()


def test_sampling_settings_come_from_params_or_from_the_record():
    message = {"messages": [{"role": "user", "content": "a"}]}
    tap = canonical_request({**message, "params": {"temperature": 0.0, "top_p": 0.5, "max_tokens": 7}, "max_tokens": 9})
    log = canonical_request({**message, "temperature": 0.25, "max_completion_tokens": 12})
    bare = canonical_request({"prompt": "a"})
    assert (tap.temperature, tap.top_p, tap.max_tokens) == (0.0, 0.5, 7)
    assert (log.temperature, log.top_p, log.max_tokens) == (0.25, None, 12)
    # What a request doesn't say is the target's server's to say, and not 1.0.
    assert (bare.temperature, bare.top_p, bare.max_tokens, bare.sampling) == (None, None, None, "{}")
    assert tap.messages == log.messages == bare.messages
    with pytest.raises(Rejected, match="malformed_max_tokens"):
        canonical_request({**message, "max_tokens": "many"})


def test_the_same_prompt_under_another_constraint_of_its_reply_is_another_row_and_other_sampling_is_not(run):
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    records = [
        user("same"),
        user("same", top_k=20),
        user("same", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
        user("same", params={"structured_outputs": {"json": json.dumps(schema)}}),
        user("same", guided_json=schema, temperature=0.5),
    ]
    rows = run({"a.jsonl": records})[0]
    assert sorted((row["weight"], row["sampling"].replace('{"top_k":20}', "{}")) for row in rows) == [
        (2, "{}"),
        (3, '{"structured_outputs":{"json":{"type":"object","properties":{"b":{},"a":{}}}}}'),
    ]


def test_equal_prompts_are_drawn_as_one_record_of_them_was_whichever_is_read_first(run):
    records = [user("same", subject="s", top_k=k, temperature=k / 10) for k in (5, 3, 9)]
    (row,), (other,) = run({"a.jsonl": records})[0], run({"b.jsonl": records[2:], "c.jsonl": records[:2]})[0]
    assert row == other and row["weight"] == 3
    assert json.loads(row["sampling"])["top_k"] == pytest.approx(10 * row["temperature"])


def test_a_log_that_is_there_twice_counts_once(run):
    records = [user(f"text {n % 3}", id=f"r{n}", ts=1.7e9 + n) for n in range(6)]
    once, twice = run({"a.jsonl": records}), run({"a.jsonl": records, "copy.jsonl": records[2:]})
    assert twice[0] == once[0] and twice[1].manifest.content_id == once[1].manifest.content_id
    assert [one[1].manifest.counts["repeated_records"] for one in (once, twice)] == [0, 4]


def test_a_prompt_that_anyone_judges_with_trains_nobody(run):
    shared = [user("same", subject=f"s{n}") for n in range(40)]
    alone = run({"a.jsonl": [user(f"text {n}", subject=f"s{n}") for n in range(40)]})[0]
    assert {row["split"] for row in alone} == {"train", "validation", "gate"}
    assert [row["split"] for row in run({"b.jsonl": shared})[0]] == ["gate"]


def test_row_ids_of_plain_requests_are_what_they_were(run):
    rows = run({"a.jsonl": [user("a"), user("b", tools=TOOLS, chat_template_kwargs={"enable_thinking": False})]})[0]
    assert {row["row_id"] for row in rows} == {
        "33bcefeb479ecef41637ea8af5b0c4ea",
        "323a1c26da9d3f05f82df544d660f5f7",
    }


def test_tools_keep_the_order_of_their_keys_since_templates_write_them_out(run):
    parameters = {"type": "object", "properties": {"zone": {"type": "string"}, "city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "time", "description": "d", "parameters": parameters}}
    (row,) = run({"a.jsonl": [user("when?", tools=[tool])]})[0]
    assert row["tools"] == json.dumps([tool], separators=(",", ":"))
    other = {**tool, "function": dict(reversed(tool["function"].items()))}
    (row,) = run({"a.jsonl": [user("when?", tools=[tool]), user("when?", tools=[other])]})[0]
    assert (row["weight"], row["tools"]) == (2, json.dumps([tool], separators=(",", ":")))


def test_the_effort_of_reasoning_reaches_the_template_as_the_chat_route_hands_it_over():
    ask = {"messages": [{"role": "user", "content": "a"}]}
    assert json.loads(canonical_request({**ask, "reasoning_effort": "none"}).template_args) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    own = {**ask, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert json.loads(canonical_request(own).template_args) == {"reasoning_effort": "high", "enable_thinking": False}


def test_a_request_of_another_model_than_those_that_are_the_target_is_an_adapters(run):
    records = [user("a", model="target"), user("b", model="target-lora"), user("c")]
    rows, artifact, _ = run({"a.jsonl": records}, overrides=['collect.served_models=["target"]'])
    assert [json.loads(row["messages"])[0]["content"] for row in rows] == ["a"]
    assert artifact.manifest.rejects == {"unsupported_adapter": 2}
    assert len(run({"a.jsonl": records})[0]) == 3


def served(text, *, reply=None, **choice):
    choice = {"index": 0, "text": "t", "finish_reason": "stop", "token_ids": [7, 8, 1], **choice}
    response = {"text": "t", "prompt_token_ids": [0, 3, 4], "usage": {"completion_tokens": 3}, "choices": [choice]}
    return user(text, target="f00d", response={**response, **(reply or {})})


def test_a_served_replys_exact_ids_stay_with_its_prompt(run):
    (row,) = run({"a.jsonl": [served("a")]})[0]
    assert (row["served_prompt_ids"], row["served_ids"]) == ([0, 3, 4], [7, 8, 1])
    assert (row["served_finish_reason"], row["served_by"]) == ("stop", "f00d")


@pytest.mark.parametrize(
    "record",
    [
        user("no reply"),
        user("text alone", target="f00d", response={"text": "t", "choices": [{"text": "t", "finish_reason": "stop"}]}),
        {**served("unnamed target"), "target": None},
        served("no prompt ids", reply={"prompt_token_ids": None}),
        served("two", reply={"choices": [{"token_ids": [1], "finish_reason": "stop"}] * 2}),
        served("one id fewer than were counted", token_ids=[7, 8]),
        served("no numbers", token_ids=[7, "8", 1]),
        served("negative", token_ids=[7, -8, 1]),
        served("a flag", token_ids=[7, True, 1]),
        served("aborted", finish_reason="abort"),
        served("odd", finish_reason=["stop"]),
    ],
)
def test_case_6_a_reply_without_its_exact_ids_is_not_on_record(run, record):
    (row,) = run({"a.jsonl": [record]})[0]
    assert [row[name] for name in row if name.startswith("served_")] == [None] * 4


def test_case_51_every_assistant_turn_is_the_answer_to_a_row_of_its_own_and_a_file_line_asks_for_its_last(run):
    turns = [{"role": "user", "content": "1+1?"}]
    turns += [
        {"role": "assistant", "content": "2", "reasoning": "one and one"},
        {"role": "user", "content": "and 2+2?"},
    ]
    rows = run({"a.jsonl": [user("", messages=turns[:1]), user("", messages=turns)]})[0]
    assert sorted((json.loads(row["messages"]) for row in rows), key=len) == [turns[:1], turns]
    whole = [*turns, {"role": "assistant", "content": "4"}]
    (row,) = run({"a.jsonl": [user("", messages=whole)]})[0]
    assert json.loads(row["messages"]) == turns
