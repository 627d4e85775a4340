"""What a source's settings say of its records: format, consent, tenant, time zone."""

import json
from pathlib import Path

import pytest

from pipeline.collect_config import SourceConfig
from pipeline.config import load_config
from pipeline.errors import ConfigError, Rejected
from pipeline.sources import Record, Unreadable, find_sources, read_records, watermarks

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def read(path, **settings):
    sources = find_sources([SourceConfig(path=path, **settings)])
    return [line for source in sources for line in read_records(source)]


def log(tmp_path, *bodies, name="log.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "slipstream.toml"
    path.write_text(
        '[target]\nmodel = "model"\n[[collect.sources]]\npath = "logs"\nformat = "otel"\ntenant = "acme"\n'
        '[[collect.sources]]\npath = "s3://bucket/logs?region=here"\nname = "gateway"\nconsent = "all_users_agreed"\n'
    )
    return path


def test_a_source_is_a_path_a_uri_or_a_table_and_relative_paths_are_relative_to_the_file(toml, tmp_path):
    first, second = load_config(toml).collect.sources
    assert first == SourceConfig(path=tmp_path / "logs", format="otel", tenant="acme")
    assert (second.path, second.name, second.consent) == ("s3://bucket/logs?region=here", "gateway", "all_users_agreed")
    mixed = load_config(toml, ['collect.sources=["a", "s3://bucket/b", {path="c", format="text"}]']).collect.sources
    assert mixed == (tmp_path / "a", "s3://bucket/b", SourceConfig(path=tmp_path / "c", format="text"))
    assert isinstance(mixed[0], Path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('{path="a", format="csv"}', ["sources.0.table.format", "no such format", "litellm", "csv"]),
        ('{path="a", consent="yes"}', ["sources.0.table.consent", "all_users_agreed"]),
        ('{path="a", timezone="Mars/Base"}', ["sources.0.table.timezone", "Europe/Paris"]),
        ('{path="a", shape="x"}', ["sources.0.table.shape", "Extra inputs"]),
        ('{format="otel"}', ["sources.0.table.path", "required"]),
        ('{path="a", name="b/c"}', ["sources.0.table.name"]),
        ("5", ["sources.0.path"]),
    ],
)
def test_a_source_that_cannot_be_used_is_named_with_what_was_expected(toml, source, words):
    with pytest.raises(ConfigError) as error:
        load_config(toml, [f"collect.sources=[{source}]"])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_log_without_consent_has_it_where_someone_typed_that_all_its_users_agreed(tmp_path):
    path = log(tmp_path, CHAT, {**CHAT, "consent": "refused"}, {**CHAT, "consent": "recorded", "consent_source": "x"})
    plain, agreed = read(path), read(path, consent="all_users_agreed")
    assert [line.body.get("consent") for line in plain] == [None, "refused", "recorded"]
    assert [line.body.get("consent") for line in agreed] == ["recorded", "refused", "recorded"]
    assert [line.body.get("consent_source") for line in agreed] == ["collect.sources", None, "x"]


def test_a_sources_tenant_is_that_of_records_which_name_none(tmp_path):
    path = log(tmp_path, CHAT, {**CHAT, "tenant": "own"}, {**CHAT, "tenant": ""})
    assert [line.body["tenant"] for line in read(path, tenant="acme")] == ["acme", "own", "acme"]


def test_the_format_of_each_line_is_told_by_its_shape(tmp_path):
    span = {"name": "chat", "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}]}
    path = log(
        tmp_path,
        {**CHAT, "params": {"temperature": 0.5}, "route": "chat"},
        {"model": "m", **CHAT, "temperature": 0.5},
        {"request": {"model": "m", **CHAT}, "response": {"choices": []}},
        {"call_type": "acompletion", "startTime": 1767268800.0, **CHAT, "model_parameters": {}},
        {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]},
        {"prompt": "a"},
        {"log": "server started"},
    )
    lines = read(path)
    assert [line.reason if isinstance(line, Unreadable) else sorted(line.body) for line in lines] == [
        ["messages", "params", "route"],
        ["messages", "model", "params", "route", "temperature", "ts"],
        ["id", "messages", "model", "params", "response", "route", "ts"],
        ["conversation", "id", "messages", "model", "params", "route", "subject", "tenant", "ts"],
        "prompt_not_recorded",
        ["prompt"],
        "unknown_format",
    ]


def test_a_format_that_was_typed_out_is_the_only_one(tmp_path):
    path = log(tmp_path, {"prompt": "a"}, {"call_type": "embedding", "startTime": 0})
    assert [line.reason for line in read(path, format="litellm")] == ["unknown_format", "other_call_type"]


def test_every_line_of_a_text_file_is_a_prompt(tmp_path):
    (tmp_path / "prompts.txt").write_text('First one.\n\n{"prompt": "as it is"}\r\n')
    for settings in ({}, {"format": "text"}):
        lines = read(tmp_path / "prompts.txt", **settings)
        assert [(line.line, line.body) for line in lines] == [
            (1, {"prompt": "First one."}),
            (3, {"prompt": '{"prompt": "as it is"}'}),
        ]
    assert len(read(tmp_path, format="text")) == 2
    with pytest.raises(ConfigError, match=r"no \.jsonl"):
        read(tmp_path)


def test_json_files_of_a_folder_count_where_their_format_is_typed_out(tmp_path):
    log(tmp_path, {"call_type": "completion", "startTime": 0, **CHAT}, name="time-1.json")
    with pytest.raises(ConfigError, match=r"no \.jsonl"):
        read(tmp_path)
    assert len(read(tmp_path, format="litellm")) == 1


def test_a_record_knows_when_it_was_served_and_a_window_learns_why_one_does_not(tmp_path):
    written = [{"ts": "2026-01-01T12:00:00"}, {"ts": 1767268800_000}, {"ts": "noon"}, {}]
    lines = read(log(tmp_path, *({**CHAT, **ts} for ts in written)), timezone="Europe/Paris")
    assert [line.ts for line in lines] == [1767265200.0, 1767268800.0, None, None]
    assert [line.body.get("ts") for line in lines] == [1767265200.0, 1767268800.0, "noon", None]
    assert lines[1].time() == 1767268800.0
    for line, reason in zip(lines[2:], ("malformed_time", "no_time"), strict=True):
        with pytest.raises(Rejected, match=reason):
            line.time()


def test_a_files_watermark_is_the_latest_time_in_it(tmp_path):
    log(tmp_path, *({**CHAT, "ts": ts} for ts in (5.0, 30.0, 10.0)), {"broken": 1}, name="a.jsonl")
    log(tmp_path, CHAT, name="b.jsonl")
    log(tmp_path, {**CHAT, "ts": 7.0}, name="c.jsonl")
    assert watermarks(read(tmp_path, name="logs")) == {"logs/a.jsonl": 30.0, "logs/c.jsonl": 7.0}


def test_what_decides_over_rows_is_part_of_a_sources_meaning_and_where_it_lies_is_not(tmp_path):
    path = log(tmp_path, CHAT)
    (plain,) = find_sources([path])
    (told,) = find_sources([SourceConfig(path=path, format="prompts", tenant="t", name="logs")])
    assert plain.meaning == ["log.jsonl", plain.sha256]
    assert told.meaning == ["logs", plain.sha256, {"format": "prompts", "tenant": "t"}]


def test_several_records_of_a_line_have_places_of_their_own():
    places = [Record("a.jsonl", 3, 0, {}, part).place for part in (0, 1)]
    assert places == ["a.jsonl:3", "a.jsonl:3#1"]
