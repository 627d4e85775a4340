"""The order of a rollout and its failures, against scripted replicas that speak the control protocol."""

import _thread
import argparse
import json
import shutil
import signal
import threading
import time
from datetime import UTC, datetime

import pytest

from bench.oracles.scripted_replica import TOKEN, ScriptedReplica
from jobs import deploy, status
from jobs.adopt import first_champion
from jobs.in_charge import in_charge
from jobs.ledger import releases, unfinished
from jobs.registry import PASSED, Registry
from pipeline.artifacts import DrafterCheckpoint, Release, verify
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError, SwapError
from pipeline.stages import current, open_artifact
from tests.jobs.checkpoints import as_checkpoint

pytestmark = pytest.mark.timeout(300)  # what hangs fails

NO_SOAK = {"soak_min_steps": 0, "tick_s": 0.02, "dead_after_s": 0.3}


@pytest.fixture
def fleet(mlflow_root, tiny, monkeypatch):
    """Config, registry and two replicas that serve version 1, the champion; versions 2 and 3 exist, 2 is approved."""
    target, folders = tiny
    monkeypatch.setenv("SLIPSTREAM_CONTROL_TOKEN", TOKEN)
    base = {"workload": "mails", "root": mlflow_root, "target": {"model": target, "dtype": "float32"}}
    checkpoints = [as_checkpoint(mlflow_root, folder) for folder in folders]
    config = Config.model_validate(base)
    registry = Registry(None, mlflow_root)
    assert first_champion(config, checkpoints[0]) == "1"
    for checkpoint in checkpoints[1:]:
        registry.set_state(config.model_name, registry.register(config.model_name, checkpoint), PASSED, reason="a test")
    registry.set_alias(config.model_name, "approved", "2")
    served = registry.download(config.model_name, "1")
    replicas = [ScriptedReplica(served, "1") for _ in range(2)]
    urls = [replica.url for replica in replicas]
    yield Config.model_validate({**base, "serving": {"replicas": urls}, "deploy": NO_SOAK}), registry, replicas
    for replica in replicas:
        replica.close()


def champion(config, registry):
    return registry.alias(config.model_name, "champion")


def test_the_champion_moves_once_every_replica_has_swapped(fleet):
    config, registry, replicas = fleet
    release = deploy.run(config)
    assert [replica.swaps for replica in replicas] == [[("1", "2")], [("1", "2")]]
    assert champion(config, registry) == "2"
    assert (release.version, release.previous, release.reason) == ("2", "1", "deploy")
    assert [(r["url"], r["change"]["pause_s"], r["change"]["changed_outputs"]) for r in release.replicas] == [
        (replica.url, 0.25, 0) for replica in replicas
    ]
    assert (release.phase, release.canary) == ("converged", replicas[0].url)
    assert open_artifact(config.root, Release, release.derivation_id).manifest == release
    assert replicas[0].folder == config.root / "versions" / config.model_name / "2"


def test_deploying_what_serves_swaps_nothing_and_tells_of_the_same_release(fleet):
    config, _, replicas = fleet
    first = deploy.run(config)
    assert deploy.run(config) == first
    assert [len(replica.swaps) for replica in replicas] == [1, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_refuses_leaves_the_whole_fleet_as_it_was(fleet, failing):
    config, registry, replicas = fleet
    replicas[failing].script.refuses = "2"
    with pytest.raises(SwapError, match="out of memory") as failure:
        deploy.run(config)
    assert "Champion is still version 1" in str(failure.value)
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert replicas[0].swaps == ([] if failing == 0 else [("1", "2"), ("2", "1")])
    assert champion(config, registry) == "1"
    (release,) = releases(config.root)
    assert (release.phase, release.version, release.ended is not None) == ("reverted", "2", True)


@pytest.mark.parametrize("fault", ["weights stay", "answers change"])
def test_a_swap_that_does_not_prove_itself_is_undone_everywhere(fleet, fault):
    config, registry, replicas = fleet
    if fault == "weights stay":
        replicas[1].script.keeps_weights = True
    else:
        replicas[1].script.tokens_after_swap = [7, 8, 1]
    with pytest.raises(SwapError):
        deploy.run(config)
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert champion(config, registry) == "1"


def test_a_deploy_that_was_killed_halfway_is_finished_by_the_next(fleet):
    config, registry, replicas = fleet
    replicas[0].version, replicas[0].folder = "2", registry.download(config.model_name, "2")
    release = deploy.run(config)
    assert replicas[0].swaps == [] and replicas[1].swaps == [("1", "2")]
    assert [r["change"]["pause_s"] for r in release.replicas] == [0.0, 0.25]
    assert champion(config, registry) == "2"


def test_someone_who_moved_the_champion_meanwhile_wins_and_the_fleet_goes_back(fleet):
    config, registry, replicas = fleet
    real = replicas[1].answer

    def meanwhile(path, headers, body):
        if path == "/slipstream/swap" and body["version"] == "2":
            registry.set_alias(config.model_name, "champion", "3")
        return real(path, headers, body)

    replicas[1].answer = meanwhile
    with pytest.raises(SwapError, match="someone moved it"):
        deploy.run(config)
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert champion(config, registry) == "3"


def test_rollback_serves_the_champion_before_and_then_the_one_before_that(fleet):
    config, registry, replicas = fleet
    deploy.run(config)
    registry.set_alias(config.model_name, "approved", "3")
    deploy.run(config)
    assert deploy.rollback(config).version == "2"
    release = deploy.rollback(config)
    assert (release.version, release.previous, release.reason) == ("1", "2", "rollback")
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert champion(config, registry) == "1"
    with pytest.raises(StageError, match="no earlier champion"):
        deploy.rollback(config)


def test_the_next_round_starts_from_what_serves_also_where_it_was_trained_elsewhere(fleet):
    config, _, _ = fleet
    shutil.rmtree(config.root / "drafters")
    second = deploy.run(config)
    champion = current(config.root, "champion", DrafterCheckpoint)
    assert champion.id == second.parents["drafter"] == "d2"
    verify(champion.folder, champion.manifest)
    deploy.rollback(config)
    assert current(config.root, "champion", DrafterCheckpoint).id == "d1"


def test_what_was_rolled_back_comes_back_by_its_number_alone(fleet):
    config, registry, _ = fleet
    deploy.run(config)
    deploy.rollback(config)
    with pytest.raises(StageError, match="slipstream deploy 2"):
        deploy.run(config)
    assert deploy.run(config, "2").version == "2"
    assert champion(config, registry) == "2"
    assert deploy.rollback(config).version == "1"


def test_a_version_that_the_gate_never_passed_is_not_deployed(fleet):
    config, _, replicas = fleet
    with pytest.raises(StageError, match=r"version 3 never was approved.*1, 2"):
        deploy.run(config, "3")
    assert [replica.swaps for replica in replicas] == [[], []]


def test_without_an_approved_version_the_message_names_the_step_before(fleet):
    config, registry, _ = fleet
    registry.mlflow.client.delete_registered_model_alias(config.model_name, "approved")
    with pytest.raises(StageError, match="no approved version; `slipstream promote`"):
        deploy.run(config)


def test_each_thing_an_operator_forgets_has_its_own_message(fleet, monkeypatch):
    config, registry, replicas = fleet
    none = config.model_copy(update={"serving": config.serving.model_copy(update={"replicas": ()})})
    with pytest.raises(ConfigError, match=r"serving\.replicas is empty.*--set"):
        deploy.run(none)
    gone = (replicas[0].url, "http://127.0.0.1:18498")
    unreachable = config.model_copy(update={"serving": config.serving.model_copy(update={"replicas": gone})})
    with pytest.raises(SwapError, match=r"http://127\.0\.0\.1:18498\S*: not reachable"):
        deploy.run(unreachable)
    assert replicas[0].swaps == []
    monkeypatch.setenv("SLIPSTREAM_CONTROL_TOKEN", "other")
    with pytest.raises(SwapError, match=r"token is missing or wrong.*is SLIPSTREAM_CONTROL_TOKEN the replica's"):
        deploy.run(config)
    monkeypatch.delenv("SLIPSTREAM_CONTROL_TOKEN")
    with pytest.raises(ConfigError, match="SLIPSTREAM_CONTROL_TOKEN is not set"):
        deploy.run(config)
    assert champion(config, registry) == "1"


def test_two_deploys_at_once_are_one_deploy_and_one_refusal(fleet):
    config, _, _ = fleet
    with in_charge(config.root, "deploy"), pytest.raises(StageError, match=r"another process is in charge, pid \d+ on"):
        deploy.run(config)


def test_a_champion_that_was_moved_by_hand_stops_a_deploy_before_any_replica_swaps(fleet):
    config, registry, replicas = fleet
    registry.mlflow.client.set_registered_model_alias(config.model_name, "champion", "3")
    with pytest.raises(StageError, match=r"moved by hand.*set it back to version 1"):
        deploy.run(config)
    assert [replica.swaps for replica in replicas] == [[], []]
    assert champion(config, registry) == "3"


@pytest.mark.parametrize("state", ["pending", "failed"])
def test_a_version_whose_last_verdict_withdrew_it_is_not_deployed(fleet, state):
    config, registry, replicas = fleet
    registry.set_state(config.model_name, "2", state, reason="decision g9 is hold")
    with pytest.raises(StageError, match=rf"version 2 is {state} now \(decision g9 is hold\)"):
        deploy.run(config)
    assert [replica.swaps for replica in replicas] == [[], []]


def interrupted_at_the_second_replica(config, replicas, version=None, *, work=None):
    """A deploy, or what else is to be done, that ends with Ctrl-C while the second replica swaps."""
    real, once = replicas[1].answer, []

    def answer(path, headers, body):
        if path == "/slipstream/swap" and not once:
            once.append(True)
            _thread.interrupt_main()
            time.sleep(0.2)
        return real(path, headers, body)

    replicas[1].answer = answer
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, shells ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            work() if work else deploy.run(config, version)
    finally:
        signal.signal(signal.SIGINT, before)
    assert unfinished(config.root).phase == "waves"


def test_an_interrupted_deploy_is_gone_on_with_before_what_is_approved_by_now(fleet):
    config, registry, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    registry.set_alias(config.model_name, "approved", "3")
    with pytest.raises(StageError, match=r"release 000001-v2 \(deploy of version 2\) is not finished.*version 3 can"):
        deploy.run(config, "3")
    with pytest.raises(StageError, match=r"not finished.*`slipstream deploy --abort` serves version 1 again"):
        deploy.rollback(config)
    release = deploy.run(config, "2")
    assert (release.derivation_id, release.version, release.phase) == ("000001-v2", "2", "converged")
    assert [replica.swaps for replica in replicas] == [[("1", "2")], [("1", "2")]]
    interrupted_at_the_second_replica(config, replicas)
    registry.set_alias(config.model_name, "approved", "1")
    assert [one.version for one in (deploy.run(config), *releases(config.root))] == ["1", "2", "3", "1"]
    assert champion(config, registry) == "1"


def test_an_abort_where_nobody_is_in_charge_puts_the_fleet_back_itself(fleet):
    config, registry, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    release = deploy.abort(config)
    assert (release.phase, release.why.startswith("aborted by ")) == ("reverted", True)
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert champion(config, registry) == "1"
    with pytest.raises(StageError, match="no deploy is under way, so there is nothing to abort"):
        deploy.abort(config)


def test_a_pause_holds_for_the_next_controller_too_until_somebody_resumes(fleet):
    config, registry, replicas = fleet
    with pytest.raises(StageError, match="nothing to pause"):
        deploy.pause(config)
    interrupted_at_the_second_replica(config, replicas)
    assert deploy.pause(config).derivation_id == "000001-v2"
    with in_charge(config.root, "deploy"):
        assert deploy.resume(config).ended is None  # whoever is in charge goes on
    deploy.pause(config)
    release = deploy.resume(config)
    assert (release.phase, champion(config, registry)) == ("converged", "2")


def test_a_replica_that_came_up_with_something_else_gets_the_champion(fleet):
    config, registry, replicas = fleet
    deploy.run(config)
    assert deploy.reconcile(config) is None
    replicas[1].serve(registry.download(config.model_name, "1"), "1")
    release = deploy.reconcile(config)
    assert (release.version, release.previous, release.reason) == ("2", "2", "reconcile")
    assert [replica.version for replica in replicas] == ["2", "2"]
    assert replicas[0].swaps == [("1", "2")]
    assert [move.reason for move in registry.history(config.model_name, "champion")][-1] == "deploy"
    assert deploy.reconcile(config) is None


def test_a_version_that_is_withdrawn_while_its_deploy_is_dead_goes_back(fleet):
    config, registry, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    registry.set_state(config.model_name, "2", "failed", reason="it learned from what was erased")
    with pytest.raises(SwapError, match=r"version 2 is failed now.*Every replica serves version 1"):
        deploy.run(config)
    assert [replica.version for replica in replicas] == ["1", "1"]
    assert champion(config, registry) == "1"


def test_a_process_that_dies_between_the_alias_and_its_last_word_leaves_the_rest_to_the_next(fleet, monkeypatch):
    config, registry, _ = fleet
    shutil.rmtree(config.root / "drafters" / "d2")

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", full)
        with pytest.raises(OSError, match="no space left"):
            deploy.run(config)
    assert (champion(config, registry), unfinished(config.root).phase) == ("2", "naming")
    assert deploy.run(config).phase == "converged"
    assert current(config.root, "champion", DrafterCheckpoint).id == "d2"


def test_an_abort_reaches_a_deploy_whose_machine_is_gone(fleet, monkeypatch):
    from jobs import in_charge as terms

    config, _, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    (path,) = (config.root / "in_charge").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "a pod that was killed", "over": False}))
    monkeypatch.setattr(terms, "SILENT_S", 0.3)
    assert deploy.abort(config).phase == "reverted"
    assert [replica.version for replica in replicas] == ["1", "1"]


def test_reconciling_goes_on_with_the_others_and_names_who_is_left(fleet):
    config, registry, replicas = fleet
    deploy.run(config)
    for replica in replicas:
        replica.serve(registry.download(config.model_name, "1"), "1")
    replicas[0].script.status_code = 503
    with pytest.raises(SwapError, match=r"the engine is gone\. These do not serve version 2; the others do"):
        deploy.reconcile(config)
    assert [replica.version for replica in replicas] == ["1", "2"]
    replicas[0].script.status_code = 200
    deploy.reconcile(config)
    assert [replica.version for replica in replicas] == ["2", "2"]


def test_what_the_gate_measured_is_what_a_soak_without_other_traffic_compares_with(fleet):
    config, registry, _ = fleet
    report = {
        "kind": "reports",
        "derivation_id": "r1",
        "parents": {"champion": "d1", "challenger": "d2"},
        "measured": {"champion": {"served_acceptance_length": 2.1}, "challenger": {"served_acceptance_length": 2.4}},
    }
    body = json.dumps(report).encode()
    registry.attach(config.model_name, "2", {"manifests/reports-r1.json": body}, folder="attached/g1")
    assert deploy.run(config).promise == 2.4


def test_the_command_takes_one_thing_at_a_time_and_says_what_it_did(fleet, capsys):
    config, _, replicas = fleet

    def command(*arguments):
        parser = argparse.ArgumentParser()
        deploy.add_arguments(parser)
        deploy.main(config, parser.parse_args(arguments))
        return capsys.readouterr().out.splitlines()[-1]

    assert command() == "version 2 serves on 2 replica(s), champion (was 1)"
    assert command("--reconcile").startswith("nothing to change: every replica that answers serves the champion")
    assert command("--rollback") == "version 1 serves on 2 replica(s), champion (was 2)"
    with pytest.raises(ConfigError, match="give a version or one of --rollback"):
        command("2", "--abort")
    interrupted_at_the_second_replica(config, replicas, "2")
    assert command("--pause") == "release 000003-v2: asked to pause; `slipstream status` shows how far it is"
    assert command("--abort").startswith("release 000003-v2 was put back, version 1 serves: aborted by ")


def test_status_tells_what_each_replica_serves_since_when_and_what_it_accepts(fleet):
    config, _, replicas = fleet
    deploy.run(config)
    replicas[0].counts.update(num_drafts=1000, num_draft_tokens=7000, num_accepted_tokens=1000)
    replicas[0].script.accepted_per_draft = {"2": 3}
    replicas[1].script.status_code = 503
    lines = [line.split(None, 3) for line in status.run(config)]
    shown = {line[0]: line[1:] for line in lines if line and line[0] in {replica.url for replica in replicas}}
    version, since, acceptance = shown[replicas[0].url]
    told = datetime.fromtimestamp(replicas[0].since, UTC).isoformat(timespec="seconds")
    assert (version, since, acceptance.strip()[:4]) == ("2", told, "1.96")
    assert shown[replicas[1].url][:2] == ["-", "-"] and "the engine is gone" in shown[replicas[1].url][2]


def test_acceptance_is_of_what_the_present_drafter_counted_or_it_is_not_told(fleet):
    config, registry, replicas = fleet

    def shown():
        rows = {line.split()[0]: line.split() for line in status.run(config) if "http" in line}
        return [rows[replica.url][1:4:2] for replica in replicas]

    for replica in replicas:
        replica.counts.update(num_drafts=100, num_draft_tokens=700, num_accepted_tokens=50)
    assert shown() == [["1", "1.50"], ["1", "1.50"]]  # of what they started with
    replicas[1].swaps.append(("1", "2"))  # by hand: nobody knows what of it was version 2's
    replicas[1].version, replicas[1].folder = "2", registry.download(config.model_name, "2")
    assert shown() == [["1", "1.50"], ["2", "-"]]
    replicas[1].swaps.clear()
    replicas[1].serve(registry.download(config.model_name, "1"), "1")
    replicas[1].counts.update(num_drafts=10, num_draft_tokens=70, num_accepted_tokens=20)
    assert shown() == [["1", "1.50"], ["1", "3.00"]]


def test_status_names_the_deploy_under_way_and_who_is_in_charge(fleet):
    config, _, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    deploy.pause(config)
    (line,) = [line for line in status.run(config) if line.startswith("release")]
    assert "release 000001-v2 (deploy of version 2): waves, 1 of 2 replicas done, paused by " in line
    assert line.endswith("(nobody is in charge: slipstream deploy goes on)")
    with in_charge(config.root, "deploy"):
        assert any("another process is in charge" in line for line in status.run(config))


def test_status_follows_a_deploy_to_its_end(fleet, capsys):
    config, _, replicas = fleet
    interrupted_at_the_second_replica(config, replicas)
    following = threading.Thread(target=status.follow, args=[config], daemon=True)
    following.start()
    deploy.run(config)
    following.join(30)
    assert not following.is_alive()
    shown = capsys.readouterr().out
    assert "release 000001-v2 (deploy of version 2): waves, 1 of 2 replicas done" in shown
    last = shown.rstrip().split("\n\n")[-1]
    assert "release" not in last and [last.count(f"{replica.url}  2 ") for replica in replicas] == [1, 1]
