"""Lines of logs: each becomes a record or a reject by its place, whatever its neighbours hold."""

import base64
import gzip
import json
import logging
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.errors import ConfigError, StageError
from pipeline.sources import Record, Unreadable, find_sources, read_records


def read(path, **limits):
    return list(read_records(find_sources([path])[0], **limits))


def prompts(lines):
    return [line.body["prompt"] for line in lines if isinstance(line, Record)]


def rejects(lines):
    return [(line.line, line.offset, line.reason) for line in lines if isinstance(line, Unreadable)]


def zst(body):
    return bytes(pa.compress(body, codec="zstd", asbytes=True))


# Noise, so that the compressed bytes grow with the rows and a cut falls among them.
NOISE = [{"prompt": format(pow(7, n * 1009, 2**521 - 1), "x")} for n in range(4000)]
NOISY = "".join(json.dumps(row) + "\n" for row in NOISE).encode()


def test_case_14_a_bad_line_costs_itself_alone_and_is_named_by_file_line_and_offset(tmp_path):
    good, cut, array = b'{"prompt":"a"}\n', b'{"prompt": "{ro\n', b'["a"]\n'
    log = tmp_path / "log.jsonl"
    log.write_bytes(good + b"\n" + cut + good + array + good[:-1])
    lines = read(log)
    assert [line.line for line in lines if isinstance(line, Record)] == [1, 4, 6]
    bad = [line for line in lines if isinstance(line, Unreadable)]
    assert [(b.file, b.line, b.offset, b.reason) for b in bad] == [
        ("log.jsonl", 3, 16, "not_json"),
        ("log.jsonl", 5, 47, "not_an_object"),
    ]
    assert [b.error for b in bad] == [
        "Unterminated string starting at at character 11 of the line",
        "found list, expected an object",
    ]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_case_14_a_cut_file_gives_what_came_before_the_cut_and_is_flagged(tmp_path, suffix, pack):
    packed = pack(NOISY)
    log = tmp_path / f"log.jsonl{suffix}"
    log.write_bytes(packed[: len(packed) // 2])
    lines = read(log)
    kept = prompts(lines)
    assert 1000 < len(kept) < 3000
    assert kept == [row["prompt"] for row in NOISE[: len(kept)]]
    cut = lines[-1]
    assert (cut.reason, cut.line) == ("file_cut", len(kept) + 1)
    assert cut.offset == len("".join(json.dumps(row) + "\n" for row in NOISE[: len(kept)]))
    assert sum(isinstance(line, Unreadable) for line in lines) == 1


def test_a_zst_that_was_flushed_line_by_line_loses_only_the_line_in_which_it_was_cut(tmp_path):
    frames = [zst(b'{"prompt":"%d"}\n' % n) for n in range(50)]
    log = tmp_path / "log.jsonl.zst"
    log.write_bytes(b"".join(frames)[:-1])
    lines = read(log)
    assert prompts(lines) == [str(n) for n in range(49)]
    assert rejects(lines)[-1][::2] == (50, "file_cut")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_a_packed_file_of_one_part_or_several_holds_what_the_plain_one_holds(tmp_path, suffix, pack):
    (tmp_path / "a.jsonl").write_bytes(NOISY)
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(NOISY))
    (tmp_path / f"c.jsonl{suffix}").write_bytes(pack(NOISY[:9_000]) + pack(b"") + pack(NOISY[9_000:]))
    plain, one, several = (list(read_records(source)) for source in find_sources([tmp_path]))
    places = [[(r.line, r.offset, r.body) for r in lines] for lines in (plain, one, several)]
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_not_what_its_name_says_is_flagged(tmp_path, suffix):
    (tmp_path / f"log.jsonl{suffix}").write_bytes(b'{"prompt": "plain text"}\n')
    assert rejects(read(tmp_path / f"log.jsonl{suffix}")) == [(1, 0, "file_cut")]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"prompt": "\xff"}', "not_utf8"),
        (b'{"prompt": "\xed\xa0\x80"}', "not_utf8"),  # a surrogate, written as if it were a character
        (b'{"prompt": "a"}'.decode().encode("utf-16"), "not_utf8"),
        (b"[" * 100_000, "nested_too_deeply"),
        (b'{"prompt": "a", "x": ' + b"[" * 256 + b"]" * 256 + b"}", "nested_too_deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not_json"),
        (b'{"prompt": "a\0b"}', "not_json"),
        (b'{"prompt": "a"} {"prompt": "b"}', "not_json"),
        (b"null", "not_an_object"),
        (b"plain text", "not_json"),
        (b"\0" * 4096, "nul_bytes"),
        (b'{"a": 1}', "unknown_format"),
    ],
)
def test_no_line_can_stop_the_reader(tmp_path, raw, reason):
    log = tmp_path / "log.jsonl"
    log.write_bytes(raw + b'\n{"prompt": "fine"}\n')
    lines = read(log)
    assert [line.reason for line in lines if isinstance(line, Unreadable)][:1] == [reason]
    assert prompts(lines) == ["fine"]


def test_what_only_looks_odd_is_read(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(
        b'\xef\xbb\xbf{"prompt": "mark"}\r\n\r\n'
        b'{"prompt": "first", "prompt": "last of two"}\n'
        b'{"prompt": "nan", "cost": NaN, "other": -Infinity}\n'
        b" \t \n"
        b'\0\0\0\0{"prompt": "after a hole"}\n'
        b'{"prompt": "escaped \\u0000 and \\ud83d\\ude00"}\n'
        b'{"prompt": "deep", "x": ' + b"[" * 255 + b"]" * 255 + b"}\n"
        b'{"prompt": "lone \\ud800"}'
    )
    lines = read(log)
    assert prompts(lines) == [
        *("mark", "last of two", "nan", "after a hole", "escaped \0 and 😀", "deep", "lone \ud800"),
    ]
    assert [line.line for line in lines] == [1, 3, 4, 6, 7, 8, 9]


def test_the_error_of_a_line_never_quotes_its_text(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"content": "my secret plan" "x"}\n{"content": "my secret \xff plan"}\n"my secret string"\n')
    lines = read(log)
    assert len(lines) == 3
    assert all("secret" not in line.error for line in lines)


def test_a_line_over_the_limit_is_a_reject_and_the_next_one_is_found(tmp_path):
    good, long = b'{"prompt": "fine"}\n', b'{"prompt": "' + b"x" * 5000 + b'"}\n'
    log = tmp_path / "log.jsonl"
    log.write_bytes(good + long + good + long[:-1])
    lines = read(log, max_line_bytes=1000)
    assert prompts(lines) == ["fine", "fine"]
    assert rejects(lines) == [(2, 19, "too_long"), (4, 19 + 5015 + 19, "too_long")]
    assert len(prompts(read(log, max_line_bytes=5015))) == 4


def test_a_log_that_grows_while_it_is_read_counts_as_it_was_when_found(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"prompt": "1"}\n{"prompt"')
    (source,) = find_sources([log])
    with open(log, "ab") as file:
        file.write(b': "2"}\n{"prompt": "3"}\n')
    lines = list(read_records(source))
    assert prompts(lines) == ["1"]
    assert [line.error for line in lines[1:]] == ["Expecting ':' delimiter at character 9 of the line; " + INSIDE]


INSIDE = "the file ends inside the line"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_file_that_became_shorter_or_went_stops_the_reader_with_its_name(tmp_path, suffix):
    log = tmp_path / f"log.jsonl{suffix}"
    body = {"": NOISY, ".gz": gzip.compress(NOISY), ".zst": zst(NOISY)}[suffix]
    log.write_bytes(body)
    (source,) = find_sources([log])
    log.write_bytes(body[:2000])
    with pytest.raises(StageError, match=r"log\.jsonl.*shorter than it was"):
        list(read_records(source))
    log.unlink()
    with pytest.raises(StageError, match="is gone"):
        list(read_records(source))


def test_a_file_that_is_still_open_reaches_to_its_last_whole_line_and_committing_it_changes_no_name(tmp_path):
    log = tmp_path / "traffic-1.open.jsonl"
    log.write_bytes(b'{"prompt": "1"}\n{"prompt": "2"}\n{"prom')
    (source,) = find_sources([tmp_path])
    assert (source.name, source.size_bytes) == (f"{tmp_path.name}/traffic-1.jsonl", 32)
    assert prompts(read_records(source)) == ["1", "2"]
    log.write_bytes(b'{"prompt": "1"}\n{"prompt": "2"}\n')
    log.rename(tmp_path / "traffic-1.jsonl")
    assert prompts(read_records(source)) == ["1", "2"]  # committed between finding and reading
    (committed,) = find_sources([tmp_path])
    assert (committed.name, committed.sha256) == (source.name, source.sha256)
    (tmp_path / "traffic-2.open.jsonl").write_bytes(b'{"prom')
    assert len(find_sources([tmp_path])) == 1


def test_a_file_given_twice_is_read_once_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    (tmp_path / ".b.jsonl.tmp").write_bytes(b"{}\n")
    (tmp_path / ".c.jsonl").write_bytes(b"{}\n")
    (tmp_path / "manifest.json").write_bytes(b"{}\n")
    (tmp_path / "notes.txt").write_bytes(b"x")
    (tmp_path / "again.jsonl").symlink_to(tmp_path / "a.jsonl")
    sources = find_sources([tmp_path, tmp_path / "a.jsonl"])
    assert [source.location for source in sources] == [str(tmp_path / "a.jsonl")]


def test_a_name_and_a_hash_stay_where_the_folder_is_moved(tmp_path):
    (tmp_path / "here" / "traffic" / "day").mkdir(parents=True)
    (tmp_path / "here" / "traffic" / "day" / "a.jsonl").write_bytes(b"{}\n")
    before = find_sources([tmp_path / "here" / "traffic"])
    (tmp_path / "here").rename(tmp_path / "there")
    after = find_sources([tmp_path / "there" / "traffic"])
    assert [s.meaning for s in before] == [s.meaning for s in after]
    # sha256 of "{}\n"
    assert before[0].meaning == [
        "traffic/day/a.jsonl",
        "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356",
    ]


def test_files_of_one_name_are_told_apart_by_what_they_hold(tmp_path):
    for folder, body in {"one": b"{}\n", "two": b'{"prompt": "a"}\n'}.items():
        (tmp_path / folder / "traffic").mkdir(parents=True)
        (tmp_path / folder / "traffic" / "a.jsonl").write_bytes(body)
    names = {s.name for s in find_sources([tmp_path / "one" / "traffic", tmp_path / "two" / "traffic"])}
    assert names == {s.name for s in find_sources([tmp_path / "two" / "traffic", tmp_path / "one" / "traffic"])}
    assert len(names) == 2 and all(name.startswith("traffic/a.jsonl#") for name in names)


def test_a_log_that_a_server_has_only_opened_is_no_new_traffic(tmp_path):
    (tmp_path / "traffic-1.jsonl").write_text('{"messages": []}\n')
    before = find_sources([tmp_path])
    (tmp_path / "traffic-2.jsonl").touch()
    assert find_sources([tmp_path]) == before
    (tmp_path / "traffic-1.jsonl").write_text("")
    with pytest.raises(ConfigError, match="only empty files"):
        find_sources([tmp_path])


def test_missing_and_empty_sources_say_so(tmp_path):
    with pytest.raises(ConfigError, match="sources is empty"):
        find_sources([])
    with pytest.raises(ConfigError, match="does not exist"):
        find_sources([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"no \.jsonl"):
        find_sources([tmp_path])
    with pytest.raises(ConfigError, match=r"collect\.sources = 'gopher://x': cannot be opened"):
        find_sources(["gopher://x"])


def test_a_sealed_log_is_read_by_its_key_and_what_was_tampered_with_ends_it(tmp_path, monkeypatch):
    from serving.tap.sealing import Key, Seal

    secret = bytes(range(32))
    monkeypatch.setenv("SLIPSTREAM_TAP_KEY", "k1:" + base64.b64encode(secret).decode())
    seal = Seal(Key("k1", secret))
    chunks = [seal.chunk(b'{"prompt": "1"}\n{"prompt": "2"}\n'), seal.chunk(b'{"prompt": "3"}\n'), seal.chunk(b"")]
    log = tmp_path / "traffic-h-1-1700000000000.sealed"
    log.write_bytes(seal.head + b"".join(chunks))
    (source,) = find_sources([tmp_path])
    assert prompts(read_records(source)) == ["1", "2", "3"]
    other = bytearray(seal.head + b"".join(chunks))
    other[len(seal.head) + len(chunks[0]) + 10] ^= 1
    log.write_bytes(other)
    (source,) = find_sources([tmp_path])
    *before, last = read_records(source)
    assert prompts(before) == ["1", "2"]
    assert (last.reason, last.line) == ("file_cut", 3)
    monkeypatch.delenv("SLIPSTREAM_TAP_KEY")
    with pytest.raises(ConfigError, match="was sealed with key 'k1'; known are none"):
        list(read_records(source))


def test_a_sealed_log_that_is_still_open_ends_at_its_last_whole_record(tmp_path, monkeypatch):
    from serving.tap.sealing import Key, Seal

    secret = bytes(range(32))
    monkeypatch.setenv("SLIPSTREAM_TAP_KEY", "k1:" + base64.b64encode(secret).decode())
    seal = Seal(Key("k1", secret))
    log = tmp_path / "traffic-h-1-1700000000000.open.sealed"
    log.write_bytes(seal.head + seal.chunk(b'{"prompt": "1"}\n') + seal.chunk(b'{"prompt": "2"}\n')[:-3])
    (source,) = find_sources([tmp_path])
    assert source.name.endswith("traffic-h-1-1700000000000.sealed")
    assert prompts(read_records(source)) == ["1"]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zst)])
def test_a_line_without_end_takes_no_memory_beyond_the_limit(tmp_path, suffix, pack):
    log = tmp_path / f"log.jsonl{suffix}"
    log.write_bytes(pack(b'{"prompt": "' + b"x" * (64 << 20) + b'"}\n{"prompt": "next"}\n'))
    (source,) = find_sources([log], block_bytes=1 << 20)
    tracemalloc.start()
    try:
        lines = list(read_records(source, max_line_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rejects(lines) == [(1, 0, "too_long")] and prompts(lines) == ["next"]
    assert peak < 10 << 20


def test_a_log_that_is_committed_or_deleted_while_a_folder_is_listed_is_there_once_or_not(tmp_path, monkeypatch):
    for name in ("traffic-1.open.jsonl", "traffic-2.jsonl", "traffic-3.jsonl"):
        (tmp_path / name).write_text(f'{{"prompt": "{name[8]}"}}\n')
    real = Path.rglob

    def found_then_moved(folder, pattern):
        found = list(real(folder, pattern))
        yield from found
        (tmp_path / "traffic-1.open.jsonl").rename(tmp_path / "traffic-1.jsonl")
        (tmp_path / "traffic-3.jsonl").unlink()

    monkeypatch.setattr(Path, "rglob", found_then_moved)
    sources = find_sources([tmp_path])
    assert [Path(source.location).name for source in sources] == ["traffic-1.jsonl", "traffic-2.jsonl"]


def test_files_that_are_no_logs_by_their_names_are_left_out_and_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    for name in ("a.jsonl", "a.jsonl.1", "a.jsonl.2"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    assert [source.name for source in find_sources([tmp_path])] == [f"{tmp_path.name}/a.jsonl"]
    assert f"{tmp_path}: 2 files left out by their names: a.jsonl.1" in caplog.text
