"""What a rollout does next, from literal states."""

from dataclasses import replace

import pytest

from serving.fleet.replicas import Address, Drafter, Seen
from serving.fleet.rollout import Policy, Record, Rollout
from serving.fleet.soak import SoakPolicy
from serving.fleet.steps import Change, Enter, Name, Revert, Sample, Wait, next_step, observe

OLD, NEW = Drafter("1", "/v/1", "aa"), Drafter("2", "/v/2", "bb")
POLICY = Policy(max_unavailable=2, dead_after_s=60, soak=SoakPolicy(10, 1, 2, 0.9))
STATUS = {"live_fingerprint": ["live"]}
UP = {"old": Seen(OLD, status=STATUS), "new": Seen(NEW, status=STATUS), "down": Seen(None, "gone")}
RESTARTS = Seen(OLD, in_place=False, status=STATUS)


def look(rollout, *kinds, now=0.0, policy=POLICY):
    """The rollout after a look, and its next step; replicas are a, b, c …"""
    addresses = [Address(name, f"http://{name}") for name, _ in zip("abcdef", kinds, strict=False)]
    seen = {one.name: UP[kind] if isinstance(kind, str) else kind for one, kind in zip(addresses, kinds, strict=True)}
    after = observe(rollout, addresses, seen, now=now, policy=policy)
    return after, next_step(after, seen, now=now, policy=policy)


def at(phase, *states, **more):
    records = tuple(
        Record(name, f"http://{name}", state, before=OLD) for name, state in zip("abcdef", states, strict=False)
    )
    return Rollout(NEW, OLD, phase, canary="a", replicas=records, **more)


def step(*arguments, **more):
    return look(*arguments, **more)[1]


def test_one_replica_goes_first_and_the_soak_follows_where_there_are_others():
    assert step(Rollout(NEW, OLD), "old", "old", "old") == Change(("a",), is_canary=True)
    assert step(at("canary", "serving", "waiting"), "new", "old") == Enter("soak")
    assert step(at("canary", "serving"), "new") == Enter("waves")
    assert step(at("soak", "serving", "waiting"), "new", "old") == Sample()


def test_a_fleet_that_serves_it_already_has_nothing_to_do_but_the_alias():
    rollout, first = look(Rollout(NEW, OLD), "new", "new")
    assert first == Enter("waves")
    assert step(replace(rollout, phase="waves"), "new", "new") == Enter("naming")
    assert step(replace(rollout, phase="naming"), "new", "new") == Name()


def test_an_interrupted_change_proves_itself_first():
    assert step(Rollout(NEW, OLD, replicas=at("canary", "waiting", "changing").replicas), "old", "new") == Change(
        ("b",), is_canary=True
    )


def test_a_wave_is_as_large_as_what_may_be_out_of_service_less_what_is_down():
    waves = at("waves", "serving", "waiting", "waiting", "waiting")
    assert step(waves, "new", "old", "old", "old") == Change(("b", "c"))
    assert step(waves, "new", "old", "old", "down") == Change(("b",))
    assert step(waves, "new", "old", "down", "down") == Wait("c, d are down, and max_unavailable is 2")


def test_who_is_down_for_too_long_is_lost_and_too_many_lost_turn_the_rollout_round():
    waves = at("waves", "serving", "serving", "waiting")
    seen, first = look(waves, "new", "new", "down", now=100.0)
    assert first == Wait("c is down: gone")
    assert step(seen, "new", "new", "down", now=159.0) == Wait("c is down: gone")
    assert step(seen, "new", "new", "down", now=160.0) == Revert("gone")
    tolerant = replace(POLICY, max_failed=1)
    assert step(seen, "new", "new", "down", now=160.0, policy=tolerant) == Enter("naming")
    back, again = look(seen, "new", "new", "old", now=170.0)
    assert (again, back.replicas[2].down_since) == (Change(("c",)), None)


def test_on_the_way_back_nobody_is_turned_round_and_the_end_tells_whether_all_are_back():
    back = at("waves", "serving", "failed", "waiting").reverting("why")
    rollout, first = look(back, "new", "old", "old")
    assert first == Change(("a",))
    assert [record.state for record in rollout.replicas] == ["waiting", "serving", "serving"]
    assert step(rollout, "old", "old", "old") == Enter("reverted")
    down, _ = look(rollout, "old", "old", "down", now=1.0)
    assert step(down, "old", "old", "down", now=61.0) == Enter("stopped")
    failed = at("reverting", "failed", "serving", "serving")
    assert step(failed, "new", "old", "old") == Enter("stopped")


def test_a_restart_takes_capacity_and_is_counted_with_what_is_lost_for_good():
    policy = replace(POLICY, max_unavailable=1)
    lost, _ = look(at("reverting", "serving", "serving", "serving"), "old", "new", "down", now=1.0, policy=policy)
    in_place = step(lost, "old", "new", "down", now=100.0, policy=policy)
    serves_new = Seen(NEW, in_place=False, status=STATUS)
    by_restart = step(lost, "old", serves_new, "down", now=100.0, policy=policy)
    assert (in_place, by_restart) == (Change(("b",)), Enter("stopped"))
    assert step(at("waves", "serving", "waiting"), "new", RESTARTS, policy=policy) == Change(("b",))


def test_a_canary_replica_that_is_lost_makes_way_for_another_where_the_policy_allows():
    policy = replace(POLICY, max_failed=1)
    failed = at("soak", "failed", "waiting")
    assert step(failed, "old", "old", policy=policy) == Enter("canary", keep_canary=False)
    assert step(failed, "old", "old") == Revert("a")
    assert step(at("soak", "serving", "waiting"), "old", "old") == Enter("canary")  # restarted: from the start


def test_a_replica_that_keeps_coming_back_with_the_old_drafter_is_given_up():
    flapping = replace(at("waves", "serving"), replicas=(Record("a", "http://a", "serving", before=OLD, changes=3),))
    rollout, first = look(flapping, "old")
    assert (rollout.replicas[0].state, isinstance(first, Revert)) == ("failed", True)


def test_replicas_come_and_go():
    rollout, _ = look(at("waves", "serving", "waiting"), "new", "old", "old")
    assert [(record.name, record.state) for record in rollout.replicas] == [
        ("a", "serving"),
        ("b", "waiting"),
        ("c", "waiting"),
    ]
    assert [record.name for record in look(rollout, "new")[0].replicas] == ["a"]


@pytest.mark.parametrize("phase", ["canary", "soak", "waves", "naming", "reverting", "converged"])
def test_a_state_survives_being_written_down(phase):
    rollout = at(phase, "serving", "changing", promise=2.5, why="because")
    assert Rollout.from_dict(rollout.as_dict()) == rollout


def test_without_a_champion_each_replica_goes_back_to_what_it_served():
    odd = Drafter("0", "/v/0", "cc")
    records = (Record("a", "http://a", before=OLD), Record("b", "http://b", before=odd), Record("c", "http://c"))
    rollout = Rollout(NEW, None, "reverting", replicas=records)
    assert [rollout.goal(record) for record in records] == [OLD, odd, None]
