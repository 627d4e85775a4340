"""Whoever asks the cluster for more than it has is told: Ray waits without a word."""

import re

import pytest

from jobs import resources


def machine(is_alive=True, **has):
    return {"Alive": is_alive, "Resources": {"CPU": 4.0, **has}}


@pytest.mark.parametrize(
    ("gpus", "machines", "words"),
    [
        ([1, 1], [machine(GPU=2.0)], None),
        ([2, 1], [machine(GPU=2.0), machine(GPU=1.0)], None),
        ([1, 1], [machine(GPU=1.0)], "2 processes take 1 + 1 GPUs at the same time.*have 1:"),
        ([2], [machine(GPU=1.0), machine(GPU=1.0)], "take 2 GPUs.*have 1 + 1:"),
        ([1, 1], [machine(GPU=1.0), machine(GPU=1.0, is_alive=False)], "have 1:"),
        ([8, 1], [machine()], None),
        ([1] * 5, [machine()], "5 processes take 1 + 1 + 1 + 1 + 1 CPUs.*have 4:"),
    ],
    ids=["fits", "fits apart", "one for two", "none is large enough", "one is gone", "CPUs", "too few CPUs"],
)
def test_more_than_there_is_is_said_by_the_numbers(gpus, machines, words, monkeypatch, caplog):
    alive = [one["Resources"] for one in machines if one["Alive"]]
    total = {name: sum(has.get(name, 0.0) for has in alive) for name in ("CPU", "GPU")}
    monkeypatch.setattr(resources.ray, "cluster_resources", lambda: total)
    monkeypatch.setattr(resources.ray, "nodes", lambda: machines)
    monkeypatch.setattr(resources.logger, "propagate", True)
    resources.say_if_lacking("stream", gpus)
    assert bool(caplog.messages) == bool(words)
    assert not words or re.search(words.replace("+", r"\+"), caplog.text)
