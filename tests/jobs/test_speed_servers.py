"""The servers that `slipstream speed` starts, and what it prints; nothing is started here."""

import json
from pathlib import Path

import pytest

from jobs.speed import OwnServers, current_drafter, summary
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, SpeedReport, commit
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.stages import Artifact

REPLICA = {
    "dtype": "float16", "max_model_len": 4096, "max_num_seqs": 48, "max_num_batched_tokens": 8192, "kv_block_size": 32,
    "prefix_caching": True, "enforce_eager": False, "speculation": {"num_speculative_tokens": 7},
}  # fmt: skip


@pytest.fixture
def drafter(tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"block_size": 8}))
    return folder


def config(root):
    return Config.model_validate({"root": root, "target": {"model": root / "target", "max_model_len": 1024}})


def last(command, option):
    """The value that the server takes: of an option that is given twice, the last."""
    return command[len(command) - 1 - command[::-1].index(option) + 1]


def test_the_target_alone_has_no_drafter_and_every_other_server_its_number(tmp_path, drafter):
    servers = OwnServers(config(tmp_path), drafter, flags={})
    assert "--speculative-config" not in servers.server(0).command()
    for number in (3, 7):
        speculative = json.loads(last(servers.server(number).command(), "--speculative-config"))
        assert (speculative["num_speculative_tokens"], speculative["model"]) == (number, str(drafter.resolve()))


def test_servers_are_like_the_named_replica_but_for_its_prefix_cache(tmp_path, drafter):
    servers = OwnServers(config(tmp_path), drafter, flags=REPLICA)
    for number in (0, 7):
        command = servers.server(number).command()
        for option, value in (
            ("--dtype", "float16"),
            ("--max-model-len", "4096"),
            ("--max-num-seqs", "48"),
            ("--max-num-batched-tokens", "8192"),
            ("--block-size", "32"),
        ):
            assert last(command, option) == value
        assert "--no-enable-prefix-caching" in command and "--enable-prefix-caching" not in command
        assert command.index("--no-enforce-eager") > command.index("--enforce-eager")


def test_the_summary_shows_every_point_where_speculation_stops_paying_and_the_flag():
    points = [
        {
            "num_speculative_tokens": k, "concurrency": c, "tokens_per_s": v, "ttft_p50_s": 0.05, "ttft_p99_s": 0.2,
            "itl_p50_s": 0.01, "itl_p99_s": None, **({"acceptance_length": 2.5} if k else {}),
        }
        for (k, c), v in {(0, 1): 25.4, (0, 16): 254.5, (7, 1): 55.1, (7, 16): 142.0}.items()
    ]  # fmt: skip
    lossless = {"num_prompts": 16, "num_different": 1, "num_different_plain": 3, "dtype": "bfloat16"}
    report = SpeedReport(derivation_id="x", parents={}, points=points, recommended={"1": 7, "16": 0}, lossless=lossless)
    text = summary(report, Path("/models/drafter"))
    assert all(f"{value:.1f}" in text for value in (25.4, 254.5, 55.1, 142.0))
    assert "speculation is faster up to concurrency 1" in text
    assert "1 of 16 greedy replies differ with speculation (bfloat16; the target alone changed 3" in text
    flag = json.loads(text.splitlines()[-1].split("'")[1])
    assert flag["num_speculative_tokens"] == 7
    assert flag["num_speculative_tokens_per_batch_size"] == [[1, 4, 7], [5, 16, 0]]


def test_where_speculation_never_pays_no_drafter_is_recommended():
    report = SpeedReport(derivation_id="x", parents={}, recommended={"1": 0, "16": 0})
    assert summary(report, Path("/models/drafter")).splitlines()[-1] == "recommended: serve without a drafter"


def test_the_challenger_is_measured_where_there_is_one_and_else_the_champion(tmp_path):
    with pytest.raises(StageError, match="no champion yet"):
        current_drafter(config(tmp_path))
    for role in ("champion", "challenger"):
        manifest = DrafterCheckpoint(derivation_id=role, parents={}, role=role, block_size=8, mask_token_id=2)
        folder = tmp_path / "drafters" / role
        commit(folder, manifest)
        stages.set_current(tmp_path, role, Artifact(folder, manifest))
        assert current_drafter(config(tmp_path)).id == role
    assert current_drafter(config(tmp_path), "champion").id == "champion"
