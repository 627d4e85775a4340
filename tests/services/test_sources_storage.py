"""Logs on real S3: found, cut into pieces and read as the same files on disk; what is missing or refused is named."""

import gzip

import pyarrow as pa
import pytest

from pipeline.collect_config import SourceConfig
from pipeline.errors import ConfigError, StageError
from pipeline.sources import find_sources, pieces, read_piece

BUCKET = "logs"
PLAIN = b"".join(b'{"prompt": "number %d"}\n' % n for n in range(20_000))


FILES = {
    "a.jsonl": PLAIN,
    "day/b.jsonl.gz": gzip.compress(PLAIN),
    "day/c.jsonl.zst": bytes(pa.compress(PLAIN, codec="zstd", asbytes=True)),
    "day/an odd é%20name, day=1.jsonl": PLAIN,
    "day/d.open.jsonl": PLAIN + b'{"prom',
    "notes.txt": b"x",
    "day/.e.jsonl": PLAIN,
}


def read(places, *, block_bytes=1 << 16, piece_bytes=1 << 17):
    sources = find_sources(places, block_bytes=block_bytes)
    lines = [line for piece in pieces(sources, piece_bytes) for line in read_piece(piece)]
    return [source.meaning for source in sources], lines


def test_the_same_files_give_the_same_names_hashes_and_records_wherever_they_lie(s3, tmp_path):
    for name, body in FILES.items():
        s3.client().put_object(Bucket=BUCKET, Key=f"same/traffic/{name}", Body=body)
        path = tmp_path / "traffic" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    stored, here = read([f"s3://{BUCKET}/same/traffic"]), read([tmp_path / "traffic"])
    assert stored == here
    assert [name for name, _ in here[0]] == [
        *(
            "traffic/a.jsonl",
            "traffic/day/an odd é%20name, day=1.jsonl",
            "traffic/day/b.jsonl.gz",
            "traffic/day/c.jsonl.zst",
            "traffic/day/d.jsonl",
        ),
    ]
    assert len(here[1]) == 5 * 20_000


def test_one_object_a_trailing_slash_and_a_table_are_places_too(s3):
    s3.client().put_object(Bucket=BUCKET, Key="one/traffic/a.jsonl", Body=PLAIN)
    folder = f"s3://{BUCKET}/one/traffic"
    assert read([f"{folder}/a.jsonl"])[0][0][0] == "a.jsonl"
    assert read([f"{folder}/"]) == read([folder])
    table = SourceConfig(path=folder, format="prompts", name="gateway")
    assert read([table])[0][0][::2] == ["gateway/a.jsonl", {"format": "prompts"}]


def test_a_cut_object_is_flagged_and_one_that_became_shorter_or_went_stops_the_reader(s3):
    packed = gzip.compress(PLAIN)
    s3.client().put_object(Bucket=BUCKET, Key="cut/a.jsonl.gz", Body=packed[: len(packed) // 2])
    _, lines = read([f"s3://{BUCKET}/cut"])
    assert lines[-1].reason == "file_cut" and len(lines) > 1000
    s3.client().put_object(Bucket=BUCKET, Key="short/a.jsonl", Body=PLAIN)
    (piece,) = pieces(find_sources([f"s3://{BUCKET}/short"]))
    s3.client().put_object(Bucket=BUCKET, Key="short/a.jsonl", Body=PLAIN[:1000])
    with pytest.raises(StageError, match="shorter than it was"):
        list(read_piece(piece))
    s3.client().delete_object(Bucket=BUCKET, Key="short/a.jsonl")
    with pytest.raises(StageError, match=r"s3://logs/short/a\.jsonl: .* is gone"):
        list(read_piece(piece))


def test_an_object_that_was_committed_between_finding_and_reading_is_found(s3):
    s3.client().put_object(Bucket=BUCKET, Key="open/a.open.jsonl", Body=PLAIN + b'{"prom')
    (piece,) = pieces(find_sources([f"s3://{BUCKET}/open"]))
    s3.client().put_object(Bucket=BUCKET, Key="open/a.jsonl", Body=PLAIN)
    s3.client().delete_object(Bucket=BUCKET, Key="open/a.open.jsonl")
    assert len(list(read_piece(piece))) == 20_000


def test_nothing_there_says_so(s3, monkeypatch):
    with pytest.raises(ConfigError, match=r"s3://logs/nowhere does not exist"):
        find_sources([f"s3://{BUCKET}/nowhere"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another key")
    with pytest.raises(StageError, match="failed 4 times"):
        find_sources([f"s3://{BUCKET}/one"])
