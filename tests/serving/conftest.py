"""Drafters of a scripted engine, and the endpoint in front of it."""

import json

import pytest
from tiny import tiny_drafter

from tests.serving.scripted_engine import TARGET, TOKEN, build


@pytest.fixture
def drafters(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    return {v: tiny_drafter(tmp_path / "versions" / v, target, seed=int(v)) for v in ("1", "2")}


@pytest.fixture
def served(drafters, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTROL_TOKEN", TOKEN)
    monkeypatch.setenv("SLIPSTREAM_DRAFTER_ROOTS", str(tmp_path / "versions"))
    return build(drafters)
