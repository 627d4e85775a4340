"""Every line is in exactly one piece, by its own number, however a file is cut."""

import gzip
import json
import pickle
import random

import pytest

from pipeline.sources import Record, Unreadable, find_sources, pieces, read_piece, read_records


def plain_lines(body):
    """What a file holds, by splitting it whole: number, offset and text of each line that isn't blank."""
    found, offset = [], 0
    for number, line in enumerate(body.split(b"\n"), start=1):
        if line.strip():
            found.append((number, offset, line))
        offset += len(line) + 1
    return found


def a_log(seed):
    """Lines of every length down to nothing, with and without a line end at the end of the file."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rng.randrange(1, 60)):
        kind = rng.randrange(10)
        text = "é" * rng.choice((0, 1, 5, 80, 400))
        good = json.dumps({"prompt": text}, ensure_ascii=False).encode()
        lines.append(b"" if kind == 0 else b"\r" if kind == 1 else b"{broken" if kind == 2 else good)
    return b"\n".join(lines) + (b"\n" if rng.random() < 0.5 else b"")


@pytest.mark.parametrize("seed", range(40))
def test_a_line_belongs_to_the_piece_in_which_it_begins_and_keeps_its_number(tmp_path, seed):
    body = a_log(seed) or b"{}"
    log = tmp_path / "log.jsonl"
    log.write_bytes(body)
    block = random.Random(seed).choice((1, 3, 16, 64, 1000, 1 << 20))
    if not body.strip():
        return
    sources = find_sources([log], block_bytes=block)
    for piece_bytes in (1, 2 * block, 5 * block, len(body), 10 * len(body)):
        cut = pieces(sources, piece_bytes)
        assert sum(piece.num_bytes for piece in cut) == len(body)
        found = [line for piece in cut for line in read_piece(pickle.loads(pickle.dumps(piece)))]
        assert [(line.line, line.offset) for line in found] == [line[:2] for line in plain_lines(body)]
        kept = [line.body["prompt"] for line in found if isinstance(line, Record)]
        assert kept == [json.loads(raw)["prompt"] for _, _, raw in plain_lines(body) if raw != b"{broken"]
        assert {line.reason for line in found if isinstance(line, Unreadable)} <= {"not_json"}
        assert found == list(read_records(sources[0]))


def test_many_pieces_of_one_line_read_it_once(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"prompt": "' + b"x" * 1000 + b'"}\n{"prompt": "last"}')
    cut = pieces(find_sources([log], block_bytes=100), 100)
    assert [[line.line for line in read_piece(piece)] for piece in cut] == [[1], *[[] for _ in range(9)], [2]]


def test_a_line_over_the_limit_is_one_reject_in_one_piece(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"prompt": "' + b"x" * 1000 + b'"}\n{"prompt": "last"}')
    cut = pieces(find_sources([log], block_bytes=100), 100)
    found = [line for piece in cut for line in read_piece(piece, max_line_bytes=300)]
    assert [(line.line, line.offset) for line in found] == [(1, 0), (2, 1015)]
    assert (found[0].reason, found[1].body) == ("too_long", {"prompt": "last"})


def test_small_files_share_a_piece_and_a_large_one_has_several(tmp_path):
    for n in range(10):
        (tmp_path / f"small-{n}.jsonl").write_bytes(b'{"prompt": "a"}\n')  # 16 bytes
    (tmp_path / "large.jsonl").write_bytes(b'{"prompt": "a"}\n' * 100)
    cut = pieces(find_sources([tmp_path], block_bytes=16), 64)
    assert [piece.num_bytes for piece in cut] == [64] * 25 + [64, 64, 32]
    assert [len(piece.ranges) for piece in cut] == [1] * 25 + [4, 4, 2]


def test_a_packed_file_is_one_piece_whatever_its_size(tmp_path):
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000))
    (piece,) = pieces(find_sources([tmp_path], block_bytes=16), 16)
    assert len(list(read_piece(piece))) == 1000


def test_a_piece_is_small_to_send(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"prompt": "a"}\n' * 100_000)
    cut = pieces(find_sources([tmp_path], block_bytes=16), 800_000)
    assert [len(pickle.dumps(piece)) < 1500 for piece in cut] == [True, True]
