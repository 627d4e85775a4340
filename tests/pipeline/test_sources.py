import gzip
import json

import pytest

from pipeline.errors import ConfigError
from pipeline.sources import Record, Unreadable, find_sources, read_records


def read(path):
    return list(read_records(find_sources([path])[0]))


def test_a_bad_line_costs_itself_alone_and_is_named_by_file_line_and_offset(tmp_path):
    good, cut, array = b'{"messages":[1]}\n', b'{"messages": [{"ro\n', b'["a"]\n'
    log = tmp_path / "log.jsonl"
    log.write_bytes(good + b"\n" + cut + good + array + good[:-1])
    lines = read(log)
    assert [line.line for line in lines if isinstance(line, Record)] == [1, 4, 6]
    bad = [line for line in lines if isinstance(line, Unreadable)]
    assert [(b.file, b.line, b.offset, b.reason) for b in bad] == [
        ("log.jsonl", 3, len(good) + 1, "not_json"),
        ("log.jsonl", 5, len(good) * 2 + 1 + len(cut), "not_an_object"),
    ]
    assert all(b.error for b in bad)


def test_a_cut_gz_gives_what_came_before_the_cut_and_flags_the_file(tmp_path):
    # Noise, so that the compressed bytes grow with the rows and the cut falls among them.
    rows = [{"n": n, "noise": format(pow(7, n * 1009, 2**521 - 1), "x")} for n in range(2000)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    log = tmp_path / "log.jsonl.gz"
    log.write_bytes(whole[: len(whole) // 2])
    lines = read(log)
    kept = [line.body for line in lines if isinstance(line, Record)]
    assert 500 < len(kept) < 1500
    assert kept == rows[: len(kept)]
    assert isinstance(lines[-1], Unreadable)
    assert (lines[-1].reason, lines[-1].line) == ("file_cut", len(kept) + 1)
    assert sum(isinstance(line, Unreadable) for line in lines) == 1


def test_a_whole_gz_and_the_plain_file_hold_the_same_records(tmp_path):
    text = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(50))
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
    plain, zipped = (list(read_records(source)) for source in find_sources([tmp_path]))
    assert [(r.line, r.offset, r.body) for r in plain] == [(r.line, r.offset, r.body) for r in zipped]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a": "\xff"}', "not_utf8"),
        (b"[" * 100_000, "not_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not_json"),
        (b"null", "not_an_object"),
        (b"plain text", "not_json"),
    ],
)
def test_no_line_can_stop_the_reader(tmp_path, raw, reason):
    log = tmp_path / "log.jsonl"
    log.write_bytes(raw + b'\n{"a": 1}\n')
    bad, good = read(log)
    assert (bad.reason, good.body) == (reason, {"a": 1})


def test_the_error_of_a_line_never_quotes_its_text(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"content": "my secret plan" "x"}\n{"content": "my secret \xff plan"}\n"my secret string"\n')
    assert all("secret" not in line.error for line in read(log))


def test_a_byte_order_mark_and_windows_line_ends_are_no_damage(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [line.body for line in read(log)] == [{"a": 1}, {"a": 2}]


def test_a_log_that_grows_while_it_is_read_counts_as_it_was_when_found(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"a": 1}\n')
    (source,) = find_sources([log])
    with open(log, "ab") as file:
        file.write(b'{"a": 2}\n{"a"')
    assert [line.body for line in read_records(source)] == [{"a": 1}]


def test_a_file_given_twice_is_read_once_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert [source.path.name for source in find_sources([tmp_path, tmp_path / "a.jsonl"])] == ["a.jsonl"]


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
