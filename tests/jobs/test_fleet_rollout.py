"""What a rollout does with a fleet that misbehaves, and with what people ask of it; replicas are scripted servers."""

import logging
import threading
from contextlib import contextmanager

import pytest

from bench.oracles.scripted_replica import TOKEN, Script, ScriptedReplica
from jobs.in_charge import in_charge
from jobs.ledger import give_order, last_release, orders, unfinished
from pipeline.artifacts import commit
from pipeline.errors import StageError
from serving.errors import LookAgainError
from serving.fleet import progress
from serving.fleet.change import ByCommand, ByEndpoint
from serving.fleet.controller import Fleet, NamingError, Orders
from serving.fleet.replicas import Address, look, static
from serving.fleet.soak import SoakPolicy
from serving.load import Driver
from tests.jobs.rollouts import PROBE, drafter, fleet, folders, roll, start, wait_until, with_policy

pytestmark = pytest.mark.timeout(120)  # what hangs fails

CHAT = [{"model": "toy", "messages": [{"role": "user", "content": "Where is it?"}]}]
SOAK = SoakPolicy(min_steps=100, min_s=0.5, max_s=8.0, min_ratio=0.9)


@pytest.fixture
def made(tmp_path):
    return folders(tmp_path, "1", "2")


@pytest.fixture
def replicas(made):
    started = start(3, made["1"])
    yield started
    for replica in started:
        replica.close()


class Rolling(threading.Thread):
    """A rollout in a thread of its own; ``release`` is what came of it."""

    def __init__(self, *arguments, **more):
        super().__init__(daemon=True)
        self.work, self.release, self.error = lambda: roll(*arguments, **more), None, None
        self.start()

    def run(self):
        try:
            self.release = self.work()
        except Exception as error:
            self.error = error

    def end(self):
        self.join(30)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return self.release


def versions(replicas):
    return [replica.version for replica in replicas]


@contextmanager
def traffic(replicas):
    drivers = [Driver(replica.url, CHAT, concurrency=2) for replica in replicas]
    for driver in drivers:
        driver.__enter__()
    try:
        yield drivers
    finally:
        for driver in drivers:
            driver.stop()


def test_the_canary_replica_goes_first_and_the_waves_are_no_larger_than_asked(made, tmp_path):
    replicas = start(5, made["1"], swap_s=0.15)
    rolling = Rolling(tmp_path, made, replicas, policy=with_policy(max_unavailable=2))
    seen = set()
    while rolling.is_alive():
        seen.add(tuple(i for i, replica in enumerate(replicas) if replica.paused))
    assert rolling.end().phase == "converged"
    assert max(map(len, seen)) == 2
    assert {paused for paused in seen if 0 in paused} == {(0,)}
    for replica in replicas:
        replica.close()


def test_the_alias_is_moved_once_and_only_when_every_replica_serves(made, tmp_path, replicas):
    moves = []
    roll(tmp_path, made, replicas, name=lambda: moves.append(versions(replicas)))
    assert moves == [["2", "2", "2"]]


def test_an_alias_that_cannot_be_moved_takes_the_fleet_back(made, tmp_path, replicas):
    def refuse():
        raise NamingError("someone moved it")

    release = roll(tmp_path, made, replicas, name=refuse)
    assert (release.phase, release.why, versions(replicas)) == ("reverted", "someone moved it", ["1", "1", "1"])


def test_a_registry_that_is_gone_at_the_end_leaves_the_last_step_to_the_next_deploy(made, tmp_path, replicas):
    def down():
        raise ConnectionError("the registry is down")

    with pytest.raises(ConnectionError):
        roll(tmp_path, made, replicas, name=down)
    assert (unfinished(tmp_path).phase, versions(replicas)) == ("naming", ["2", "2", "2"])
    assert roll(tmp_path, made, replicas).phase == "converged"


def test_a_soak_that_holds_lets_the_others_follow(made, tmp_path, replicas):
    with traffic(replicas):
        release = roll(tmp_path, made, replicas, policy=with_policy(soak=SOAK, soak_tick_s=0.03))
    assert (release.phase, versions(replicas)) == ("converged", ["2", "2", "2"])
    assert release.soak["looks"] >= 1 and len(release.soak["intervals"]) >= 8
    assert "of the other replicas'" in release.soak["verdict"]


def test_a_canary_replica_that_accepts_less_goes_back_before_another_one_has_swapped(made, tmp_path, replicas):
    for replica in replicas:
        replica.script.accepted_per_draft = {"1": 3, "2": 1}
    with traffic(replicas):
        release = roll(tmp_path, made, replicas, policy=with_policy(soak=SOAK, soak_tick_s=0.03))
    assert (release.phase, versions(replicas)) == ("reverted", ["1", "1", "1"])
    assert "acceptance length is 0.500 of the other replicas'" in release.why
    assert [replica.swaps for replica in replicas] == [[("1", "2"), ("2", "1")], [], []]


@pytest.mark.parametrize("undecided", ["abort", "go_on"])
def test_a_soak_without_traffic_ends_at_its_limit_as_the_policy_says(made, tmp_path, replicas, undecided):
    soak = SoakPolicy(100, 0.1, 0.2, 0.9, undecided=undecided)
    release = roll(tmp_path, made, replicas, policy=with_policy(soak=soak, soak_tick_s=0.02))
    assert release.phase == {"abort": "reverted", "go_on": "converged"}[undecided]


def test_a_canary_replica_without_counters_cannot_be_judged_and_goes_back(made, tmp_path, replicas):
    replicas[0].script.has_counters = False
    release = roll(tmp_path, made, replicas, policy=with_policy(soak=SOAK, soak_tick_s=0.02))
    assert (release.phase, versions(replicas)) == ("reverted", ["1", "1", "1"])
    assert "the soak cannot be judged" in release.why


def test_paused_by_another_process_nothing_begins_and_resumed_it_goes_on(made, tmp_path):
    replicas = start(3, made["1"], swap_s=0.2)
    rolling = Rolling(tmp_path, made, replicas)
    wait_until(lambda: replicas[0].paused)
    give_order(tmp_path, "pause")
    wait_until(lambda: replicas[0].version == "2")
    with pytest.raises(AssertionError, match="it never held"):
        wait_until(lambda: replicas[1].paused or replicas[1].version == "2", timeout_s=0.5)
    with pytest.raises(StageError, match="another process is in charge"), in_charge(tmp_path, "deploy"):
        pass
    give_order(tmp_path, "resume")
    assert rolling.end().phase == "converged"
    assert versions(replicas) == ["2", "2", "2"]
    for replica in replicas:
        replica.close()


def test_aborted_amid_a_wave_every_replica_is_put_back_also_out_of_a_pause(made, tmp_path):
    replicas = start(3, made["1"], swap_s=0.2)
    rolling = Rolling(tmp_path, made, replicas)
    wait_until(lambda: replicas[1].paused)
    give_order(tmp_path, "pause")
    give_order(tmp_path, "abort")
    release = rolling.end()
    assert (release.phase, versions(replicas), replicas[2].swaps) == ("reverted", ["1", "1", "1"], [])
    assert release.why.startswith("aborted by ")
    for replica in replicas:
        replica.close()


def test_an_abort_stands_and_of_pause_and_resume_the_last_one_counts(made, tmp_path, replicas):
    with pytest.raises(StageError, match="no deploy is under way, so there is nothing to pause"):
        give_order(tmp_path, "pause")
    with pytest.raises(ConnectionError):
        roll(tmp_path, made, replicas, name=lambda: (_ for _ in ()).throw(ConnectionError()))
    folder = tmp_path / "releases" / last_release(tmp_path).derivation_id
    found = []
    for order in ("pause", "resume", "pause", "abort", "resume"):
        give_order(tmp_path, order)
        asked = orders(folder)
        found.append((asked.aborted is not None, asked.paused is not None))
    assert found == [(False, True), (False, False), (False, True), (True, False), (True, False)]
    assert orders(tmp_path / "nothing") == Orders()


def test_a_replica_that_comes_back_with_the_old_drafter_gets_the_new_one(made, tmp_path):
    replicas = start(3, made["1"], swap_s=0.3)
    rolling = Rolling(tmp_path, made, replicas)
    wait_until(lambda: replicas[1].paused)
    replicas[0].serve(made["1"], "1")
    assert rolling.end().phase == "converged"
    assert versions(replicas) == ["2", "2", "2"]
    assert [len(replica.swaps) for replica in replicas] == [2, 1, 1]
    for replica in replicas:
        replica.close()


def test_a_replica_that_is_down_stops_the_wave_until_it_is_back(made, tmp_path, replicas):
    replicas[2].script.status_code = 503
    rolling = Rolling(tmp_path, made, replicas)
    with pytest.raises(AssertionError, match="it never held"):
        wait_until(lambda: any(replica.swaps for replica in replicas), timeout_s=0.5)
    replicas[2].script.status_code = 200
    assert rolling.end().phase == "converged"
    assert versions(replicas) == ["2", "2", "2"]


def test_a_replica_that_stays_down_takes_the_others_back(made, tmp_path, replicas):
    rolling = Rolling(tmp_path, made, replicas, policy=with_policy(dead_after_s=0.3))
    wait_until(lambda: replicas[0].version == "2")
    replicas[2].script.status_code = 503
    release = rolling.end()
    assert release.phase == "stopped"
    assert versions(replicas)[:2] == ["1", "1"]
    assert "the engine is gone" in release.why


def test_so_many_may_refuse_as_the_policy_allows_and_the_record_says_which(made, tmp_path, replicas):
    replicas[1].script.refuses = "2"
    release = roll(tmp_path, made, replicas, policy=with_policy(max_failed=1))
    assert (release.phase, versions(replicas)) == ("converged", ["2", "1", "2"])
    assert [(one["state"], "out of memory" in one["why"]) for one in release.replicas] == [
        ("serving", False),
        ("failed", True),
        ("serving", False),
    ]


def test_a_fleet_of_which_none_takes_it_has_not_converged_whatever_the_policy_allows(made, tmp_path, replicas):
    for replica in replicas:
        replica.script.refuses = "2"
    release = roll(tmp_path, made, replicas, policy=with_policy(max_failed=3))
    assert (release.phase, release.why) == ("reverted", "no replica took it")


def test_a_replica_is_asked_as_often_as_the_policy_says(made, tmp_path, replicas):
    asked = []
    real = replicas[1].answer

    def twice(path, headers, body):
        if path == "/slipstream/swap":
            asked.append(body["version"])
            if len(asked) == 1:
                return 503, {"status": "refused", "reason": "busy"}
        return real(path, headers, body)

    replicas[1].answer = twice
    assert roll(tmp_path, made, replicas, policy=with_policy(attempts=2)).phase == "converged"
    assert asked == ["2", "2"]


def test_replicas_that_are_started_meanwhile_get_it_and_those_that_went_are_forgotten(made, tmp_path, replicas):
    listed = [replicas[:2]]

    def discover():
        return static([replica.url for replica in listed[0]])()

    def name():
        assert versions(listed[0]) == ["2", "2"]

    real = replicas[0].answer

    def exchanged(path, headers, body):
        if path == "/slipstream/swap":
            listed[0] = [replicas[0], replicas[2]]
        return real(path, headers, body)

    replicas[0].answer = exchanged
    release = roll(tmp_path, made, replicas, fleet=fleet(replicas, discover), name=name)
    assert [one["url"] for one in release.replicas] == [replicas[0].url, replicas[2].url]
    assert versions(replicas) == ["2", "1", "2"]


def test_a_pod_that_is_not_ready_is_waited_for_and_not_asked(made, tmp_path, replicas):
    ready = []

    def discover():
        return [Address(f"pod-{i}", replica.url, i < 2 or bool(ready)) for i, replica in enumerate(replicas)]

    rolling = Rolling(tmp_path, made, replicas, fleet=fleet(replicas, discover))
    with pytest.raises(AssertionError, match="it never held"):
        wait_until(lambda: any(replica.swaps for replica in replicas), timeout_s=0.4)
    ready.append(True)
    assert rolling.end().phase == "converged"
    assert [one["name"] for one in rolling.release.replicas] == ["pod-0", "pod-1", "pod-2"]


def test_a_replica_that_cannot_swap_in_place_is_restarted_by_the_same_rollout(made, tmp_path):
    restart = {"how": None, "reason": "this engine captures CUDA graphs"}
    replicas = [ScriptedReplica(made["1"], "1", Script(swap=restart)), ScriptedReplica(made["1"], "1")]
    asked = tmp_path / "asked"
    command = ("/bin/sh", "-c", f'echo "$0 $1" >> {asked}', "{url}", "{folder}")
    by_command = ByCommand(command, TOKEN, PROBE, timeout_s=10)
    urls = static([replica.url for replica in replicas])
    mixed = Fleet(urls, TOKEN, PROBE, in_place=ByEndpoint(TOKEN, PROBE), restart=by_command)
    rolling = Rolling(tmp_path, made, replicas, fleet=mixed)
    wait_until(asked.exists)
    assert asked.read_text() == f"{replicas[0].url} {made['2']}\n"
    replicas[0].script.status_code = 503
    replicas[0].serve(made["2"], "2")
    replicas[0].script.status_code = 200
    release = rolling.end()
    assert (release.phase, versions(replicas), replicas[0].swaps) == ("converged", ["2", "2"], [])
    assert release.replicas[0]["change"]["restarted"] is True
    for replica in replicas:
        replica.close()


def test_a_restart_command_that_fails_says_so_and_the_fleet_goes_back(made, tmp_path, replicas):
    replicas[1].script.swap = {"how": None, "reason": "sharded"}
    failing = ByCommand(("/bin/sh", "-c", "echo no such unit >&2; exit 5"), TOKEN, PROBE)
    urls = static([replica.url for replica in replicas])
    mixed = Fleet(urls, TOKEN, PROBE, in_place=ByEndpoint(TOKEN, PROBE), restart=failing)
    release = roll(tmp_path, made, replicas, fleet=mixed)
    assert (release.phase, versions(replicas)) == ("reverted", ["1", "1", "1"])
    assert "ended with status 5: no such unit" in release.why


def test_an_interrupted_change_that_cannot_prove_itself_is_put_back_and_never_counts_as_done(made, tmp_path, replicas):
    def killed():
        raise ConnectionError

    with pytest.raises(ConnectionError):
        roll(tmp_path, made, replicas, name=killed)
    as_if_interrupted(tmp_path, replicas[1])
    replicas[1].script.tokens_after_swap = [7, 8, 1]
    release = roll(tmp_path, made, replicas, policy=with_policy(dead_after_s=0.3))
    assert (release.phase, versions(replicas)) == ("reverted", ["1", "1", "1"])
    assert "other greedy tokens than before the change" in release.why


def test_a_swap_whose_answer_is_lost_and_whose_weights_stayed_takes_the_others_back(made, tmp_path, replicas):
    replicas[1].script.breaks_off = replicas[1].script.keeps_weights = True
    release = roll(tmp_path, made, replicas)
    assert (release.phase, versions(replicas)) == ("reverted", ["1", "1", "1"])
    assert "the live weights did not change (live-stale)" in release.why


def as_if_interrupted(root, replica):
    """The release under way, as a controller leaves it that dies amid this replica's change."""
    release = last_release(root)
    records = [{**one, "state": "changing"} if one["url"] == replica.url else one for one in release.replicas]
    changed = {"phase": "waves", "replicas": records}
    commit(root / "releases" / release.derivation_id, release.model_copy(update=changed))


def test_a_swap_whose_answer_is_lost_proves_itself_in_the_next_round(made, tmp_path, replicas):
    replicas[1].script.breaks_off = True
    release = roll(tmp_path, made, replicas)
    assert (release.phase, versions(replicas)) == ("converged", ["2", "2", "2"])
    assert [replica.swaps for replica in replicas] == [[("1", "2")]] * 3


def test_a_swap_that_outlasts_its_callers_patience_is_waited_for_and_not_taken_for_a_refusal(made, tmp_path):
    replicas = start(2, made["1"], swap_s=1.0)
    hasty = ByEndpoint(TOKEN, PROBE, timeout_s=0.4)
    urls = static([replica.url for replica in replicas])
    release = roll(tmp_path, made, replicas, fleet=Fleet(urls, TOKEN, PROBE, in_place=hasty, restart=hasty))
    assert (release.phase, versions(replicas)) == ("converged", ["2", "2"])
    assert [replica.swaps for replica in replicas] == [[("1", "2")]] * 2
    for replica in replicas:
        replica.close()


def test_a_replica_that_somebody_else_swaps_meanwhile_is_looked_at_again(made, tmp_path, replicas):
    real, once = replicas[1].answer, []

    def answer(path, headers, body):
        if path == "/slipstream/swap" and not once:
            once.append(True)
            replicas[1].swaps += [("1", "9"), ("9", "1")]  # there and back: another epoch of the same version
        return real(path, headers, body)

    replicas[1].answer = answer
    release = roll(tmp_path, made, replicas)
    assert (release.phase, versions(replicas)) == ("converged", ["2", "2", "2"])
    assert release.replicas[1]["changes"] == 2


def test_an_order_of_a_controller_that_was_taken_for_dead_comes_too_late(made, tmp_path, replicas):
    before = look(Address(replicas[0].url, replicas[0].url), TOKEN)
    roll(tmp_path, made, replicas)
    replicas[0].version, replicas[0].folder = "1", made["1"]
    replicas[0].swaps.append(("2", "1"))
    with pytest.raises(LookAgainError, match="epoch"):
        ByEndpoint(TOKEN, PROBE)(replicas[0].url, drafter(made["2"], "2"), before, None)
    assert replicas[0].version == "1"


def test_a_soaks_clock_stands_while_it_is_paused(made, tmp_path, replicas):
    soak = SoakPolicy(100, 0.6, 9.0, 0.9)
    rolling = Rolling(tmp_path, made, replicas, policy=with_policy(soak=soak, soak_tick_s=0.02))
    wait_until(lambda: (last := last_release(tmp_path)) is not None and last.phase == "soak")
    give_order(tmp_path, "pause")
    with pytest.raises(AssertionError, match="it never held"):
        wait_until(lambda: last_release(tmp_path).phase != "soak", timeout_s=1.5)
    with traffic(replicas):
        give_order(tmp_path, "resume")
        release = rolling.end()
    assert (release.phase, versions(replicas)) == ("converged", ["2", "2", "2"])
    began_at, last_at, observed_s = (release.soak[name] for name in ("began_at", "last_at", "observed_s"))
    assert last_at - began_at - observed_s > 1.3


def test_who_goes_on_whoever_is_lost_still_restarts_no_replica_while_too_many_are_down(made, tmp_path):
    restart = {"how": None, "reason": "this engine captures CUDA graphs"}
    replicas = [ScriptedReplica(made["1"], "1", Script(swap=restart)) for _ in range(2)]
    replicas[1].script.status_code = 503
    release = roll(tmp_path, made, replicas, policy=with_policy(turns_back=False, dead_after_s=0.2))
    assert (release.phase, [one["state"] for one in release.replicas]) == ("converged", ["waiting", "waiting"])
    assert [replica.swaps for replica in replicas] == [[], []]
    for replica in replicas:
        replica.close()


def test_a_long_wait_and_every_change_is_told(made, tmp_path, replicas, caplog, monkeypatch):
    monkeypatch.setattr(progress, "AGAIN_S", 0.1)
    caplog.set_level("INFO", logger="slipstream")
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    with traffic(replicas):
        roll(tmp_path, made, replicas, policy=with_policy(soak=SOAK, soak_tick_s=0.03))
    told = [record.getMessage() for record in caplog.records]
    waits = [line for line in told if "judged after 0.5 s (" in line]
    assert len(waits) >= 3 and all("steps of 100 in" in line for line in waits)
    for replica in replicas:
        assert f"deploy: {replica.url} is changed to version 2" in told
        assert f"deploy: {replica.url} serves version 2, paused 0.25 s" in told
