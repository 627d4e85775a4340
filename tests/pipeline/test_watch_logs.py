import base64
import gzip
import json

from pipeline.collect_config import SourceConfig
from pipeline.sources import Record
from pipeline.watch import logs


def record(number):
    return {"id": str(number), "ts": 1.0, "messages": [{"role": "user", "content": "x"}], "params": {}}


def lines(*numbers):
    return b"".join(json.dumps(record(number)).encode() + b"\n" for number in numbers)


def look(folder, positions):
    """The ids of what is new, and the positions afterwards."""
    ids, positions = [], dict(positions)
    for new in logs.unread([SourceConfig(path=folder)], positions):
        found = list(logs.read(new, max_line_bytes=1 << 20))
        ids += [one.body["id"] if isinstance(one, Record) else one.reason for one in found]
        positions[new.key] = logs.after(new, sum(not logs.is_cut(one) for one in found))
    return ids, logs.kept(positions, [SourceConfig(path=folder)])


def test_a_file_that_grows_is_read_on_and_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "traffic-h-1-1700000000000.open.jsonl"
    path.write_bytes(lines(1, 2) + lines(3)[:20])
    ids, positions = look(tmp_path, {})
    assert ids == ["1", "2"]
    assert look(tmp_path, positions) == ([], positions)
    with path.open("ab") as file:
        file.write(lines(3)[20:] + lines(4))
    ids, positions = look(tmp_path, positions)
    assert ids == ["3", "4"]


def test_a_large_file_is_read_in_parts_and_every_line_once(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "PART_BYTES", 100)  # less than two lines
    (tmp_path / "a.jsonl").write_bytes(lines(*range(20)))
    ids, positions = [], {}
    for _ in range(100):
        found, positions = look(tmp_path, positions)
        ids += found
    assert ids == [str(number) for number in range(20)]


def test_a_packed_file_that_breaks_off_is_read_on_from_the_record_where_it_did(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(1, 2, 3)))
    (new,) = logs.unread([SourceConfig(path=tmp_path)], {})
    positions = {new.key: logs.broken_off(new, 2)}
    assert look(tmp_path, positions)[0] == ["3"]


def test_a_file_that_is_committed_is_not_read_again(tmp_path):
    path = tmp_path / "traffic-h-1-1700000000000.open.jsonl"
    path.write_bytes(lines(1))
    ids, positions = look(tmp_path, {})
    path.rename(tmp_path / "traffic-h-1-1700000000000.jsonl")
    ids, positions = look(tmp_path, positions)
    assert ids == []
    with (tmp_path / "traffic-h-1-1700000000000.jsonl").open("ab") as file:
        file.write(lines(2))
    assert look(tmp_path, positions)[0] == ["2"]


def test_a_packed_file_is_read_once_and_what_is_added_to_it_too(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(1, 2)))
    ids, positions = look(tmp_path, {})
    assert ids == ["1", "2"] and look(tmp_path, positions)[0] == []
    with path.open("ab") as file:
        file.write(gzip.compress(lines(3)))
    ids, positions = look(tmp_path, positions)
    assert ids == ["3"]


def test_records_that_are_blanked_in_place_leave_every_other_where_it_was(tmp_path):
    path = tmp_path / "traffic-h-1-1700000000000.jsonl"
    path.write_bytes(lines(1, 2))
    _, positions = look(tmp_path, {})
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b" " * len(first) + b"\n" + second + b"\n" + lines(3))
    assert look(tmp_path, positions)[0] == ["3"]


def test_a_damaged_line_is_told_and_files_that_are_gone_are_forgotten(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(1) + b"{broken\n" + lines(2))
    ids, positions = look(tmp_path, {})
    assert ids == ["1", "not_json", "2"] and list(positions) == [str(path)]
    path.unlink()
    assert look(tmp_path, positions) == ([], {})


def test_a_file_that_became_shorter_holds_nothing_new(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(1, 2, 3))
    _, positions = look(tmp_path, {})
    path.write_bytes(lines(1))
    assert look(tmp_path, positions)[0] == []


def test_a_log_that_was_rotated_away_leaves_its_name_to_another_which_is_read_whole(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(lines(1, 2, 3))
    ids, positions = look(tmp_path, {})
    path.rename(tmp_path / "requests.jsonl.1")
    path.write_bytes(lines(4))
    ids, positions = look(tmp_path, positions)
    assert ids == ["4"]  # shorter than the one before it
    path.write_bytes(lines(5, 6, 7, 8))
    ids, positions = look(tmp_path, positions)
    assert ids == ["5", "6", "7", "8"]  # and longer
    packed = tmp_path / "old.jsonl.gz"
    for numbers in ((1, 2, 3), (4, 5), (6, 7, 8, 9)):
        packed.write_bytes(gzip.compress(lines(*numbers), mtime=numbers[0]))
        ids, positions = look(tmp_path, positions)
        assert ids == [str(number) for number in numbers]


def test_a_first_record_that_is_erased_makes_no_other_file_of_it(tmp_path):
    path = tmp_path / "traffic-h-1-1700000000000.jsonl"
    path.write_bytes(lines(1, 2))
    _, positions = look(tmp_path, {})
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b" " * len(first) + b"\n" + second + b"\n" + lines(3))
    ids, positions = look(tmp_path, positions)
    assert ids == ["3"]
    with path.open("ab") as file:
        file.write(lines(4))
    assert look(tmp_path, positions)[0] == ["4"]


def test_where_a_committed_packed_file_breaks_off_is_told_and_is_no_record(tmp_path):
    path, whole = tmp_path / "a.jsonl.gz", gzip.compress(lines(1, 2, 3)) + gzip.compress(lines(4, 5))
    cut = len(gzip.compress(lines(1, 2, 3))) + 3
    path.write_bytes(whole[:cut])
    ids, positions = look(tmp_path, {})
    assert ids == ["1", "2", "3", "file_cut"]
    path.write_bytes(whole)
    assert look(tmp_path, positions)[0] == ["4", "5"]


def test_a_sealed_log_is_read_on_while_it_is_written_and_once_it_is_committed(tmp_path, monkeypatch):
    from serving.tap.sealing import Key, Seal

    secret = bytes(range(32))
    monkeypatch.setenv("SLIPSTREAM_TAP_KEY", f"k1:{base64.b64encode(secret).decode()}")
    seal = Seal(Key("k1", secret))
    one, two, three, end = (seal.chunk(part) for part in (lines(1, 2), lines(3), lines(4), b""))
    path = tmp_path / "traffic-h-1-1700000000000.open.sealed"
    path.write_bytes(seal.head + one + two[:9])
    ids, positions = look(tmp_path, {})
    assert ids == ["1", "2"]
    path.write_bytes(seal.head + one + two)
    ids, positions = look(tmp_path, positions)
    assert ids == ["3"]
    path.unlink()
    (tmp_path / "traffic-h-1-1700000000000.sealed").write_bytes(seal.head + one + two + three + end)
    assert look(tmp_path, positions)[0] == ["4"]
