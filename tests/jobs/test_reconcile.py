"""Replicas that come up later get the champion, and a rollout whose process died is ended: by the running watch."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.oracles.scripted_replica import TOKEN
from jobs import deploy, watch
from jobs.in_charge import in_charge, who_is_in_charge
from jobs.ledger import last_release, releases
from jobs.reconcile import Reconciler, reconcile
from pipeline.artifacts import DrafterCheckpoint
from pipeline.errors import ConfigError, Declined, StageError, SwapError
from pipeline.stages import current
from tests.jobs.rollouts import wait_until
from tests.jobs.test_deploy import champion, fleet, interrupted_at_the_second_replica  # noqa: F401

pytestmark = pytest.mark.timeout(300)  # what hangs fails

ROOT = Path(__file__).resolve().parents[2]


def set_(config, **deploy_settings):
    return config.model_copy(update={"deploy": config.deploy.model_copy(update=deploy_settings)})


def comes_up(replica, registry, config, version):
    """As after a restart with the drafter of its flags."""
    replica.serve(registry.download(config.model_name, version), version)


def test_a_running_watch_gives_the_champion_to_a_replica_that_comes_up_with_another_drafter(fleet, tmp_path):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    toml = tmp_path / "slipstream.toml"
    urls = ", ".join(f'"{replica.url}"' for replica in replicas)
    toml.write_text(
        f'workload = "mails"\nroot = "{config.root}"\n[target]\nmodel = "{config.target.model}"\ndtype = "float32"\n'
        f"[serving]\nreplicas = [{urls}]\n[deploy]\nsoak_min_steps = 0\ntick_s = 0.1\nreconcile_every_s = 0.5\n"
    )
    environment = {**os.environ, "SLIPSTREAM_CONTROL_TOKEN": TOKEN, "SLIPSTREAM_SPLIT_KEY": "k" * 32}
    command = [sys.executable, "-m", "jobs.cli", "watch", "--reconcile", "--config", str(toml)]
    with open(tmp_path / "log", "w") as log:
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        comes_up(replicas[1], registry, config, "1")
        wait_until(lambda: replicas[1].version == "2" or running.poll() is not None, timeout_s=120)
        assert running.poll() is None, (tmp_path / "log").read_text()
        wait_until(lambda: last_release(config.root).phase == "converged", timeout_s=60)
        assert last_release(config.root).reason == "reconcile"
        assert replicas[0].swaps == [("1", "2")]
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(30)


def test_a_rollout_whose_process_died_is_ended_by_the_watch_and_one_that_lives_is_left_alone(fleet):  # noqa: F811
    config, registry, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    with Reconciler(set_(config, reconcile_every_s=60)) as watching:
        wait_until(lambda: champion(config, registry) == "2", timeout_s=60)
        wait_until(lambda: last_release(config.root).ended is not None and who_is_in_charge(config.root) is None)
        assert [replica.version for replica in replicas] == ["2", "2"]
        interrupted_at_the_second_replica(config, replicas, "1")
        with in_charge(config.root, "deploy"):
            assert watching.look() is None
        assert last_release(config.root).phase == "waves"
    assert current(config.root, "champion", DrafterCheckpoint).id == "d2"


def test_a_replica_that_is_down_makes_no_release_and_none_waits_for_it(fleet):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    replicas[1].script.status_code = 503
    assert reconcile(config) is None
    assert len(releases(config.root)) == 1
    comes_up(replicas[1], registry, config, "1")
    replicas[1].script.status_code = 200
    assert reconcile(config).phase == "converged"
    assert replicas[1].version == "2"


def test_a_replica_that_refused_the_champion_is_asked_again_after_a_while_and_not_at_every_look(fleet):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    comes_up(replicas[1], registry, config, "1")
    replicas[1].script.refuses = "2"
    with pytest.raises(SwapError, match="out of memory"):
        reconcile(config)
    assert reconcile(config) is None
    replicas[1].script.refuses = None
    assert reconcile(config) is None, "it is asked again after deploy.retry_after_s"
    assert len(releases(config.root)) == 2
    assert reconcile(set_(config, retry_after_s=0)).phase == "converged"
    assert [replica.version for replica in replicas] == ["2", "2"]


def test_a_replica_that_goes_down_with_the_champion_is_not_brought_down_at_every_look(fleet):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    comes_up(replicas[1], registry, config, "1")
    real = replicas[1].answer

    def answer(path, headers, body):
        if path == "/slipstream/swap":
            replicas[1].script.status_code = 503
            return 503, {"status": "failed", "reason": "the engine is gone"}
        return real(path, headers, body)

    replicas[1].answer = answer
    with pytest.raises(SwapError, match="the engine is gone"):
        reconcile(config)
    replicas[1].script.status_code = 200  # its supervisor has started it again
    assert reconcile(config) is None


def test_an_aborted_reconciliation_leaves_each_replica_as_it_came_up(fleet):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    for replica in replicas:
        comes_up(replica, registry, config, "1")
    real = replicas[1].answer

    def answer(path, headers, body):
        if path == "/slipstream/swap" and body["version"] == "2":
            deploy.give_order(config.root, "abort")
        return real(path, headers, body)

    replicas[1].answer = answer
    with pytest.raises(SwapError, match=r"aborted by .*Every replica serves what they served before"):
        reconcile(config)
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert champion(config, registry) == "2"


@pytest.mark.parametrize("what", ["deploy", "rollback"])
def test_an_unfinished_reconciliation_makes_way_for_a_deploy_and_for_a_rollback(fleet, what):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    for replica in replicas:
        comes_up(replica, registry, config, "1")
    interrupted_at_the_second_replica(config, replicas, work=lambda: reconcile(config))
    registry.set_alias(config.model_name, "approved", "3")
    release = deploy.run(config) if what == "deploy" else deploy.rollback(config)
    expected = "3" if what == "deploy" else "1"
    assert (release.reason, release.version, champion(config, registry)) == (what, expected, expected)
    assert [(one.reason, one.phase) for one in releases(config.root)] == [
        ("deploy", "converged"),
        ("reconcile", "stopped"),
        (what, "converged"),
    ]


def test_a_reconciliation_under_way_is_waited_for_by_a_rollback(fleet):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    comes_up(replicas[1], registry, config, "1")
    replicas[1].script.swap_s = 1.5
    reconciling = threading.Thread(target=reconcile, args=[config], daemon=True)
    reconciling.start()
    wait_until(lambda: replicas[1].paused)
    release = deploy.rollback(config)
    reconciling.join(30)
    assert [one.reason for one in releases(config.root)] == ["deploy", "reconcile", "rollback"]
    assert (release.version, [replica.version for replica in replicas]) == ("1", ["1", "1"])


def test_a_champion_that_was_withdrawn_is_given_to_nobody(fleet):  # noqa: F811
    config, registry, replicas = fleet
    deploy.run(config)
    comes_up(replicas[1], registry, config, "1")
    registry.set_state(config.model_name, "2", "failed", reason="it learned from what was erased")
    with pytest.raises(StageError, match="version 2 is failed now"):
        reconcile(config)
    assert replicas[1].version == "1"


def test_a_deploy_under_way_leaves_nothing_to_reconcile_and_that_is_no_error(fleet):  # noqa: F811
    config, _, _ = fleet
    arguments = parsed(deploy, "--reconcile")
    with in_charge(config.root, "deploy"), pytest.raises(Declined, match="another process is in charge"):
        deploy.main(config, arguments)


def test_a_watch_that_is_to_reconcile_says_at_once_what_it_lacks(fleet, monkeypatch):  # noqa: F811
    config, _, _ = fleet
    with pytest.raises(ConfigError, match=r"once, `slipstream deploy --reconcile` does it"):
        watch.main(config, parsed(watch, "--reconcile", "--once"))
    monkeypatch.delenv("SLIPSTREAM_CONTROL_TOKEN")
    with pytest.raises(ConfigError, match="SLIPSTREAM_CONTROL_TOKEN is not set"):
        Reconciler(config)


def parsed(job, *arguments):
    import argparse

    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    return parser.parse_args(arguments)
