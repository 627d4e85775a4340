"""Made-up traffic holds what it says, by a count of its own: what is read of it is what was written."""

import hashlib
from collections import Counter

import pytest

from bench.oracles.traffic_records import write_traffic
from pipeline.canonical import canonical_request
from pipeline.collect_config import SourceConfig
from pipeline.errors import Rejected
from pipeline.sources import Unreadable, find_sources, pieces, read_piece, watermarks


def read(traffic):
    sources = find_sources([SourceConfig(**table) for table in traffic.sources], block_bytes=1 << 16)
    return [line for piece in pieces(sources, 1 << 17) for line in read_piece(piece)]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    formats = ("tap", "litellm", "otel", "openai")
    return write_traffic(tmp_path_factory.mktemp("traffic"), 4000, seed=3, formats=formats)


def test_what_is_read_of_three_formats_is_what_was_written(traffic):
    rejects, prompts, subjects, tenants = Counter(), set(), set(), Counter()
    kept = 0
    lines = read(traffic)
    for line in lines:
        try:
            if isinstance(line, Unreadable):
                raise Rejected(line.reason)
            subjects.add(line.body["subject"])
            tenants[f"tenant:{line.body['tenant']}"] += 1
            if line.body.get("consent") != "recorded":
                raise Rejected("no_consent")
            prompts.add(canonical_request(line.body).prompt)
            kept += 1
        except Rejected as reason:
            rejects[str(reason)] += 1
    assert rejects == traffic.rejects
    assert (kept, len(prompts)) == (traffic.counts["kept"], len(traffic.prompts))
    assert subjects == traffic.subjects
    assert tenants == Counter({name: n for name, n in traffic.counts.items() if name.startswith("tenant:")})
    assert max(watermarks(lines).values()) == pytest.approx(traffic.latest, abs=1e-3)
    assert traffic.counts["records"] == 4000 == sum(traffic.counts[f"format:{one}"] for one in FORMATS)
    assert 300 < traffic.counts["duplicates"] < 500 and 130 < traffic.counts["near_duplicates"] < 270
    assert len(traffic.subjects) > 250 and len(tenants) == 5


FORMATS = ("tap", "litellm", "otel", "openai")


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    def hashes(folder, seed):
        write_traffic(folder, 300, seed=seed)
        files = sorted(path for path in folder.rglob("*.*") if path.is_file())
        return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]

    first = hashes(tmp_path / "a", 1)
    assert len(first) == 12
    assert first == hashes(tmp_path / "b", 1) != hashes(tmp_path / "c", 2)
