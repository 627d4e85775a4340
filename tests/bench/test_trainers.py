"""Trainers of other processes: the turns' protocol, the rows that they are given, and what becomes of their weights."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from safetensors.torch import save_file

from bench.oracles.captured import requests_of
from bench.oracles.exported_rows import export
from bench.oracles.peer_drafter import converted
from bench.oracles.peer_environment import SPECFORGE, SPECULATORS, Peer, command_of
from bench.oracles.trainer_speed import PeerSetting, Raced, Tried, fastest
from bench.oracles.trainers import Turn, trainer
from drafter.checkpoint import load_drafter
from pipeline.errors import ConfigError, StageError

SETTINGS = {"threads": 1, "steps": 10}
TRAINER = """
import json, os, sys
answers = os.fdopen(int(os.environ["ANSWERS_FD"]), "w")
say = lambda told: print(json.dumps(told), file=answers, flush=True)
print("noise of an import")
say({"parameters": json.load(open(sys.argv[1]))["steps"]})
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "die":
        sys.exit("out of luck")
    say({"seconds": 2.0, "blocks": 8 * command["steps"], "steps": command["steps"]})
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    return [sys.executable, str(script)]


def test_a_trainer_takes_turns_whatever_else_it_prints(command, tmp_path):
    with trainer(command, SETTINGS, tmp_path, "one") as process:
        assert process.parameters == 10
        assert process.train(3).blocks_per_s == 12
        assert process.train(1) == Turn(2.0, 8, 1)
    assert "noise" in (tmp_path / "one.log").read_text()


def test_a_trainer_that_dies_says_its_last_words(command, tmp_path):
    with trainer(command, SETTINGS, tmp_path, "one") as process:
        with pytest.raises(StageError, match="exit status 1: out of luck"):
            process.ask(do="die")
        with pytest.raises(StageError, match="out of luck"):
            process.train(1)


def test_exported_rows_hold_the_same_ids_and_bits_and_a_zero_state_for_the_last_token(tmp_path):
    rows = [toys.row(9, 3, seed=1), toys.row(12, 5, seed=2)]
    last = [toys.row(12, 5, seed=2, width=10), toys.row(9, 3, seed=1, width=10)]  # in another order
    folder = export(tmp_path, rows, last, hidden_size=10)
    told = json.loads((folder / "rows.json").read_text())
    assert told == {"width": 30, "hidden_size": 10, "rows": [[0, 9, 3], [9, 12, 5]]}
    ids = np.fromfile(folder / "ids.bin", np.int32)
    assert ids.tolist() == [*rows[0].ids.tolist(), *rows[1].ids.tolist()]
    for name, width, expected in (("states.bin", 30, rows), ("last.bin", 10, [last[1], last[0]])):
        words = torch.from_numpy(np.fromfile(folder / name, np.int16)).view(torch.bfloat16).view(-1, width)
        assert torch.equal(words[:8], expected[0].states) and torch.equal(words[9:20], expected[1].states)
        assert not words[[8, 20]].any()


def test_a_peers_weights_become_a_drafters_folder_tensor_by_tensor(tmp_path):
    drafter = toys.drafter(dtype=torch.float32)
    save_file({name: p.detach() for name, p in drafter.named_parameters()}, tmp_path / "peer.safetensors")
    found = converted(tmp_path / "peer.safetensors", drafter.shape, tmp_path / "drafter")
    kept, _ = load_drafter(tmp_path / "drafter")
    for name, parameter in drafter.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter)
        assert torch.equal(kept.get_parameter(name), parameter.bfloat16().float())


@pytest.mark.parametrize("change", [{"fc.weight": None}, {"lm_head.weight": torch.zeros(2, 2)}])
def test_a_peers_weights_with_a_tensor_too_few_or_too_many_are_no_drafter(tmp_path, change):
    drafter = toys.drafter(dtype=torch.float32)
    tensors = {name: p.detach() for name, p in drafter.named_parameters()} | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "peer.safetensors")
    with pytest.raises(RuntimeError, match=next(iter(change))):
        converted(tmp_path / "peer.safetensors", drafter.shape)


def test_prompts_are_read_by_the_usual_names_of_their_text(tmp_path):
    lines = [
        {"question": "a?"},
        {"prompt": "b"},
        {"turns": ["c", "d"], "category": "chat"},
        {"messages": [{"role": "x"}]},
    ]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = requests_of(path, limit=9, max_tokens=5)
    assert [one["messages"][0].get("content") for one in found] == ["a?", "b", "c", None]
    assert [one["slice"] for one in found] == ["set", "set", "chat", "set"]
    assert len({one["conversation"] for one in found}) == 4
    path.write_text('{"body": "x"}\n')
    with pytest.raises(ConfigError, match=r"set.jsonl:1: found the keys \['body'\]"):
        requests_of(path, limit=9, max_tokens=5)


def test_the_fastest_setting_is_found_among_those_that_ran():
    tried = [
        Tried(PeerSetting("eager", "float32"), 10.0),
        Tried(PeerSetting("sdpa", "float32"), 12.0),
        Tried(PeerSetting("sdpa", "bfloat16"), 90.0),
        Tried(PeerSetting("simple_flex_attention", "float32"), None, "no backward"),
    ]
    assert fastest(tried, "float32") == PeerSetting("sdpa", "float32")
    assert fastest(tried[3:], "float32") is None


def test_a_precision_that_the_machine_emulates_takes_no_part():
    tried = [Tried(PeerSetting("eager", "float32"), 50.0), Tried(PeerSetting("eager", "bfloat16"), 10.0)]
    assert fastest(tried, "bfloat16") is None and fastest(tried, "float32")
    tried[1] = Tried(PeerSetting("eager", "bfloat16"), 10.1)
    assert fastest(tried, "bfloat16") == PeerSetting("eager", "bfloat16")


def test_a_race_compares_neighbouring_turns_and_whole_processes():
    ours = [Turn(1.0, 20, 2), Turn(1.0, 10, 2)]
    theirs = [Turn(1.0, 10, 1), Turn(2.0, 10, 1)]
    race = Raced(
        ours, theirs, {"imported": 10.0, "loaded": 20.0, "peak": 40.0}, {"imported": 20.0, "loaded": 30.0, "peak": 80.0}
    )
    assert race.ratios == [2.0, 2.0]
    memory = race.memory()
    assert (memory["ratio"], memory["above_imported"], memory["above_loaded"]) == (0.5, 0.5, 0.4)


def test_a_registry_that_has_no_such_package_is_named_with_pips_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    peer = Peer("speculators", "0.9.0", "speculators_trainer.py", alone=False)
    with pytest.raises(StageError, match=r"No matching distribution.*TORCH_INDEX_URL"):
        command_of(peer, tmp_path)
    assert not list(tmp_path.rglob(".ready"))


def test_the_peers_scripts_are_there():
    for peer in (SPECULATORS, SPECFORGE):
        assert (Path(__file__).parents[2] / "bench" / "peers" / peer.script).exists()
