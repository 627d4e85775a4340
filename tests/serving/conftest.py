"""Drafters of a scripted engine, and the endpoint in front of it."""

import json
from types import SimpleNamespace

import pytest
from tiny import tiny_drafter

from serving.kept_drafter import KEEP_ENV, SUPERVISOR_ENV, Supervised
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


@pytest.fixture
def supervised(served, drafters, tmp_path, monkeypatch):
    """The endpoint under a supervisor, whose restarts are noted and not done."""
    restarts, came_up = [], []
    monkeypatch.setattr(Supervised, "restart", lambda self: restarts.append(self.pid))
    monkeypatch.setattr(Supervised, "came_up", lambda self: came_up.append(self.pid))
    monkeypatch.setattr("os.getpgrp", lambda: 4711)
    monkeypatch.setenv(KEEP_ENV, str(tmp_path / "kept.json"))
    monkeypatch.setenv(SUPERVISOR_ENV, "4711")
    return SimpleNamespace(**vars(build(drafters)), restarts=restarts, came_up=came_up, keep=tmp_path / "kept.json")
