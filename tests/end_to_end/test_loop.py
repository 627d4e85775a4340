"""The whole loop on a real engine and a tiny target: from served prompts to a swapped drafter, and back."""

import os
import time
from itertools import islice

import pytest
import tiny

from jobs import deploy, init_drafter, loop, promote
from jobs.registry import Registry
from jobs.session import ray_session
from pipeline.artifacts import HiddenStateCache, verify
from pipeline.config import Config
from pipeline.stages import current
from pipeline.workloads import support_mails
from serving import deploy as replica
from serving.launch import VllmServer
from serving.load import drive_sync

NUM_MAILS = 40


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("loop")
    return Config.model_validate(
        {
            "workload": "mails",
            "root": root / "runs",
            "target": {
                "model": tiny.tiny_target(root / "target", layers=6, favourite=300),
                "dtype": "float32",
                "max_model_len": 1024,
            },
            "drafter": {"block_size": 4, "target_layer_ids": (1, 3, 4)},
            "init": {"num_prompts": 32, "steps": 6},
            "collect": {"sources": (root / "runs" / "traffic",), "redaction": "none", "gate_share": 0.4},
            "regenerate": {"max_tokens": 24},
            "train": {
                "steps": 12,
                "blocks_per_step": 32,
                "anchors_per_row": 8,
                "checkpoint_every": 6,
                "walk_rows": 4,
                "sampled_vocabulary": 64,
                "control": True,
            },
            # A random target's replies repeat themselves, and nothing here is a claim about speed.
            "evaluate": {
                "concurrency": 4,
                "max_tokens": 24,
                "max_repeat_share": 1.0,
                "blocks": 3,
                "general_prompts": 4,
            },
            "gate": {
                "min_lift": 0.01,
                "min_slice_lift": 0.01,
                "min_general_lift": 0.01,
                "min_position_ratio": 0.0,
                "min_speed_ratio": 0.001,
                "max_tail_ratio": 1000.0,
                "min_clusters": 4,
                "resamples": 1000,
            },
        }
    )


def serve_mails(server, traffic):
    mails = list(islice(support_mails.prompts(NUM_MAILS, seed=3), NUM_MAILS))
    requests = [
        {"model": server.served_name, "messages": m["messages"], "max_tokens": 24, "temperature": 0.0} for m in mails
    ]
    headers = [
        {"x-consent": "yes" if i else "no", "x-subject": m["conversation"], "x-slice": "mail"}
        for i, m in enumerate(mails)
    ]
    replies = drive_sync(server.base_url, requests, concurrency=8, headers=headers)
    assert [reply.error for reply in replies if not reply.ok] == []
    deadline = time.monotonic() + 60
    while sum(log.read_bytes().count(b"\n") for log in traffic.glob("*.jsonl")) < NUM_MAILS - 1:  # one says no
        assert time.monotonic() < deadline, "the tap's process has not written what was served"
        time.sleep(0.1)


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_served_prompts_become_a_swapped_drafter_and_every_stage_runs_once(config, monkeypatch):
    monkeypatch.setenv(config.serving.token_env, "secret")
    registry, model = Registry(None, config.root), config.model_name
    with ray_session():
        champion = init_drafter.run(config)
        assert registry.alias(model, "champion") == "1"
        server = VllmServer(
            model=config.target.model,
            drafter=registry.download(model, "1"),
            port=free_port(),
            log=config.root / "server.log",
            dtype="float32",
            max_model_len=1024,
            tap_dir=config.root / "traffic",
            tap_consent="header:x-consent=yes",
            tap_subject_header="x-subject",
            tap_slice_header="x-slice",
            drafter_roots=[config.root],
            token="secret",
            prefix_caching=False,
        )
        config = config.model_copy(
            update={
                "evaluate": config.evaluate.model_copy(update={"server_url": server.base_url}),
                "serving": config.serving.model_copy(update={"replicas": (server.base_url,)}),
            }
        )
        with server:
            serve_mails(server, config.root / "traffic")
            learned = loop.learn(config)
            report, decision = loop.judge(config, learned)
            version = promote.run(config, decision, learned.drafters["challenger"])
            first = deploy.run(config)
            back = deploy.rollback(config)
            again = deploy.run(config, version)
            serving = replica.status(server.base_url, "secret")
            learned_again = loop.learn(config, champion=champion)

    prompts = learned.prompts.manifest
    assert sum(shard.rows for shard in prompts.shards if shard.path.endswith(".parquet")) == NUM_MAILS - 1  # consent
    for artifact in (learned.prompts, learned.responses, learned.states, *learned.drafters.values(), report, decision):
        verify(artifact.folder, artifact.manifest)

    splits = {row["conversation"]: set() for row in rows_of(learned.responses)}
    for row in rows_of(learned.responses):
        splits[row["conversation"]].add(row["split"])
    assert all(len(one) == 1 for one in splits.values())

    errors = [value for name, value in learned.states.manifest.capture_check.items() if name.endswith("_error")]
    # Three layers; in a batch, answered, and one row read again (most of it and its worst position), against alone.
    assert len(errors) == 7 and max(errors) < 0.01
    assert set(report.manifest.measured) == {"champion", "challenger", "control"}
    for role, measured in report.manifest.measured.items():
        assert measured["walk"]["num_replies"] > 0, role
        # The walk over cached states and the engine take the same steps, but for the states' 16 bits.
        gap = measured["walk"]["emitted_tokens_per_step"] / measured["emitted_tokens_per_step"]
        assert gap == pytest.approx(1.0, abs=0.05), role
        assert measured["num_replies_different"] == 0, role

    assert (first.version, back.version, again.version, version) == ("2", "1", "2", "2")
    assert registry.alias(model, "champion") == serving["version"] == "2"
    assert all(one["change"]["changed_outputs"] == 0 for release in (first, back, again) for one in release.replicas)

    assert {name: a.id for name, a in learned_again.drafters.items()} == {
        name: a.id for name, a in learned.drafters.items()
    }
    assert current(config.root, "states", HiddenStateCache).id == learned.states.id
    assert not any(path.name.endswith(".tmp") for path in config.root.rglob("*")), "leftovers"
    assert os.environ[config.serving.token_env] not in (config.root / "server.log").read_text()


def rows_of(responses):
    from pipeline.schemas import RESPONSES
    from pipeline.shards import read_tables

    return read_tables(responses.folder, responses.manifest.shards, RESPONSES).to_pylist()
