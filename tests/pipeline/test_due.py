"""Is a retraining due, and why: by time, by new traffic, by an alarm; and what stands against one."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from pipeline import due, lease, retrainings
from pipeline.artifacts import DrafterCheckpoint, GateDecision, PromptSet, artifact_dir, commit
from pipeline.config import Config
from pipeline.errors import SchemaError
from pipeline.fingerprint import target_fingerprint
from pipeline.sources.found import stored_logs
from pipeline.stages import Artifact, set_current

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
LINE = json.dumps({"prompt": "x" * 80}) + "\n"


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


class Site:
    """A root with a champion, a log of 100 requests, and what happens to them."""

    def __init__(self, tmp_path, **retrain):
        self.root, self.log, self.model = tmp_path / "root", tmp_path / "traffic" / "a.jsonl", tmp_path / "model"
        self.log.parent.mkdir()
        self.model.mkdir()
        self.serve(100)
        (self.model / "config.json").write_text("{}")
        self.weights(b"one")
        fingerprint = target_fingerprint(self.model, dtype="bfloat16", target_layer_ids=(1, 3))
        self.champion("c0", fingerprint)

    def config(self, **retrain):
        tables = {"target": {"model": self.model}, "collect": {"sources": [self.log.parent]}, "retrain": retrain}
        return Config.model_validate({"root": self.root, **tables})

    def weights(self, body):
        (self.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + body)

    def serve(self, requests):
        with open(self.log, "a") as file:
            file.write(LINE * requests)

    def champion(self, name, fingerprint):
        made = DrafterCheckpoint(
            derivation_id=name, parents={}, fingerprint=fingerprint, role="champion", block_size=4, mask_token_id=2
        )
        self.current("champion", made)

    def current(self, name, manifest):
        folder = artifact_dir(self.root, type(manifest), manifest.derivation_id)
        commit(folder, manifest)
        set_current(self.root, name, Artifact(folder, manifest))

    def retrain(self, run, at, *, verdict="reject", alarms=()):
        """A run that began at a time, has read everything, and came to a verdict (None: to none)."""
        sizes = {name: stored.size_bytes for name, stored in stored_logs([self.log.parent]).items()}
        began = {"now": at.timestamp(), "reasons": ["x"], "alarms": alarms, "sources": sizes}
        retrainings.begin(self.root, run, **began)
        records = self.log.read_text().count("\n")
        self.current("prompts", PromptSet(derivation_id=f"p-{run}", parents={}, counts={"records": records}))
        if verdict:
            measured = {"decision": verdict, "lift": 1.0, "ci_low": 1.0, "ci_high": 1.0}
            self.current("decision", GateDecision(derivation_id=f"d-{run}", parents={}, **measured))
        return retrainings.end(self.root, run, now=at.timestamp() + 60)

    def alarm(self, *ids, kind="accepted"):
        path = self.root / "watch" / "alarms.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([{"id": one, "kind": kind, "at": "2026-03-02", "slice": "mail"} for one in ids]))


def kinds(answer):
    return [reason.split(":")[0] for reason in answer.reasons]


def test_the_first_one_is_due_as_soon_as_there_is_traffic(site):
    answer = due.run(site.config(), now=START)
    assert (answer.due, kinds(answer), answer.new_requests, answer.last) == (True, ["first"], 100, None)
    site.log.write_text("")
    empty = due.run(site.config(), now=START)
    assert (empty.due, empty.waits) == (False, "no traffic that the last retraining has not seen")


def test_the_first_one_waits_for_enough_traffic_where_that_is_asked_for(site):
    assert not due.run(site.config(min_new_requests=101), now=START).due
    assert due.run(site.config(min_new_requests=100), now=START).due


@pytest.mark.parametrize(("days", "is_due"), [(6.9, False), (7.1, True)])
def test_by_time_it_is_due_so_many_days_after_the_last_began(site, days, is_due):
    site.retrain("one", START)
    site.serve(1)
    answer = due.run(site.config(every_days=7), now=START + days * DAY)
    assert (answer.due, kinds(answer)) == (is_due, ["time"] if is_due else [])
    assert answer.last == "2026-03-01T12:00:00+00:00"


def test_by_volume_only_what_the_last_has_not_seen_counts(site):
    site.retrain("one", START)
    site.serve(40)
    config = site.config(min_new_requests=50)
    answer = due.run(config, now=START + DAY)
    assert (answer.due, answer.new_requests, answer.new_bytes) == (False, 40, 40 * len(LINE))
    site.serve(10)
    assert kinds(due.run(config, now=START + DAY)) == ["volume"]


def test_a_log_that_is_committed_under_its_own_name_is_no_new_traffic(site):
    being_written = site.log.with_name("a.open.jsonl")
    site.log.rename(being_written)
    assert due.run(site.config(), now=START).new_requests == 100
    sizes = {name: one.size_bytes for name, one in stored_logs([site.log.parent]).items()}
    being_written.rename(site.log)
    assert sizes == {name: one.size_bytes for name, one in stored_logs([site.log.parent]).items()}


def test_an_alarm_makes_it_due_at_once_and_is_answered_by_one_run(site):
    site.retrain("one", START)
    site.serve(1)
    site.alarm("a1")
    answer = due.run(site.config(), now=START + DAY)
    assert (answer.due, kinds(answer), answer.alarms) == (True, ["alarm"], ("a1",))
    site.retrain("two", START + DAY, alarms=["a1"])
    site.serve(1)
    assert not due.run(site.config(), now=START + 2 * DAY).due
    site.alarm("a1", "a2")
    assert due.run(site.config(), now=START + 2 * DAY).alarms == ("a2",)


def test_of_what_the_monitor_writes_the_alarms_that_a_retraining_helps_against_count(site):
    site.retrain("one", START)
    site.serve(1)
    site.alarm()
    alarms = [
        {"id": "accepted-1", "kind": "accepted", "at": 1772500000, "fires": True, "retrains": True, "slices": ["mail"]},
        {"id": "pays-1", "kind": "pays", "at": 1772500000, "fires": True, "retrains": False},
        {"id": "asked-1", "kind": "asked", "at": 1772400000, "fires": False, "retrains": False, "over": "it ended"},
    ]
    (site.root / "watch" / "alarms.json").write_text(json.dumps({"at": "now", "firing": [], "alarms": alarms}))
    answer = due.run(site.config(), now=START + DAY)
    assert answer.alarms == ("accepted-1",)
    assert answer.reasons == ("alarm: accepted at 2026-03-03T01:06:40+00:00 (accepted-1)",)


def test_a_run_that_came_to_no_verdict_answers_no_alarm_and_no_traffic(site):
    site.retrain("one", START)
    site.serve(20)
    site.alarm("a1")
    assert site.retrain("two", START + DAY, verdict=None, alarms=["a1"]).outcome == "unfinished"
    answer = due.run(site.config(), now=START + 2 * DAY)
    assert (answer.due, answer.alarms, answer.new_requests) == (True, ("a1",), 20)


@pytest.mark.parametrize(
    ("settings", "is_due"),
    [({"on_alarm": False}, False), ({"alarm_kinds": ["asked"]}, False), ({"alarm_kinds": ["accepted"]}, True)],
)
def test_the_config_says_which_alarms_count(site, settings, is_due):
    site.retrain("one", START)
    site.serve(1)
    site.alarm("a1", kind="accepted")
    assert due.run(site.config(**settings), now=START + DAY).due is is_due


def test_alarms_that_come_in_a_flock_begin_one_run(site):
    site.retrain("one", START)
    site.serve(1)
    site.alarm("a1")
    answer = due.run(site.config(min_hours_between=6), now=START + 5 * HOUR)
    assert (answer.due, answer.waits) == (False, "the last run began at 2026-03-01T12:00:00+00:00: "
                                                 "not before 2026-03-01T18:00:00+00:00")  # fmt: skip
    assert due.run(site.config(min_hours_between=6), now=START + 6 * HOUR).due


def test_while_a_run_is_under_way_none_is_due(site):
    lease.take(site.root, "theirs", with_process=False)
    answer = due.run(site.config(), now=START)
    assert (answer.due, kinds(answer)) == (False, ["first"])
    assert answer.waits.startswith("run theirs is under way on ")


def test_another_revision_of_the_target_stops_it_with_what_to_do(site):
    site.weights(b"two")
    answer = due.run(site.config(), now=START)
    assert not answer.due
    assert "slipstream retire" in answer.waits


def test_without_a_champion_there_is_nothing_to_train_from(site):
    (site.root / "current.json").write_text("{}")
    assert "init-drafter" in due.run(site.config(), now=START).waits


@pytest.mark.parametrize("body", ["{", "{}", '[{"id": 3}]', "[1]", "null"])
def test_alarms_of_another_shape_are_named_and_not_ignored(site, body):
    site.alarm("a1")
    (site.root / "watch" / "alarms.json").write_text(body)
    with pytest.raises(SchemaError, match=r"alarms.json: expected alarms"):
        due.run(site.config(), now=START)


def test_asking_leaves_nothing_behind(site):
    before = sorted(site.root.rglob("*"))
    due.run(site.config(), now=START)
    assert sorted(site.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("verdict", "outcome"), [("promote", "approved"), ("hold", "not_promoted"), (None, "unfinished")]
)
def test_what_came_of_a_run_is_told_from_what_it_left(site, verdict, outcome):
    assert site.retrain("one", START, verdict=verdict).outcome == outcome


@pytest.mark.parametrize(("champion", "outcome"), [("c1", "deployed"), ("c9", "unfinished")])
def test_a_run_deployed_where_its_own_challenger_is_champion_and_not_where_somebody_rolled_back(
    site, champion, outcome
):
    retrainings.begin(site.root, "one", now=0, reasons=["x"], alarms=[], sources={})
    made = DrafterCheckpoint(derivation_id="c1", parents={}, role="challenger", block_size=4, mask_token_id=2)
    site.current("challenger", made)
    site.champion(champion, None)
    assert retrainings.end(site.root, "one", now=1).outcome == outcome


def test_a_run_that_was_killed_is_gone_on_with_at_once_as_often_as_a_run_is_tried(site):
    config = site.config(tries=2)
    for run, at, is_due in [("one", START, True), ("two", START + HOUR, False)]:
        retrainings.begin(site.root, run, now=at.timestamp(), reasons=["x"], alarms=[], sources={})
        answer = due.run(config, now=at + HOUR / 2)
        assert answer.due is is_due
    assert answer.waits == (
        "the last run began at 2026-03-01T13:00:00+00:00 and was killed: not before 2026-03-01T19:00:00+00:00"
    )
    assert due.run(config, now=START + 7 * HOUR).due


def test_a_run_whose_tries_failed_says_so_and_the_next_waits(site):
    retrainings.begin(site.root, "one", now=START.timestamp(), reasons=["x"], alarms=[], sources={})
    assert retrainings.end(site.root, "one", now=START.timestamp() + 9, failed=True).outcome == "failed"
    assert due.run(site.config(), now=START + HOUR).waits.startswith("the last run began at 2026-03-01T12:00:00+00:00 "
                                                                     "and failed: not before")  # fmt: skip


def test_a_run_that_ended_without_a_verdict_goes_on_under_its_name_and_one_with_a_verdict_begins_anew(site):
    first = site.retrain("dag-1", START, verdict=None)
    again = site.retrain("dag-1", START + DAY)
    assert (first.number, first.outcome) == (1, "unfinished")
    assert (again.number, again.began, again.outcome) == (1, first.began, "not_promoted")
    assert site.retrain("dag-1", START + 2 * DAY, verdict=None).number == 2


def test_a_run_whose_challenger_was_approved_and_not_deployed_goes_on_under_its_name(site):
    assert site.retrain("dag-1", START, verdict="promote").outcome == "approved"
    assert retrainings.goes_on(retrainings.on_record(site.root), "dag-1").number == 1
    assert retrainings.goes_on(retrainings.on_record(site.root), "dag-2") is None


def test_a_nightly_scheduler_that_asks_for_a_daily_run_gets_one_every_night(site):
    site.retrain("one", START)  # begun some minutes after it was asked for
    site.serve(1)
    assert due.run(site.config(every_days=1), now=START + DAY - HOUR / 10).due
    assert not due.run(site.config(every_days=1), now=START + DAY - 2 * HOUR).due


def test_of_a_log_that_groups_share_the_requests_of_its_own_tenants_count(site):
    retrainings.begin(site.root, "one", now=0, reasons=["x"], alarms=[], sources={"a.jsonl": 1000})
    prompts = PromptSet(derivation_id="p", parents={}, counts={"records": 100}, rejects={"other_tenant": 75})
    site.current("prompts", prompts)
    assert retrainings.end(site.root, "one", now=1).records == 25


def test_a_run_that_goes_on_with_a_killed_ones_verdict_has_come_to_it(site):
    site.retrain("one", START)
    retrainings.begin(site.root, "killed", now=0, reasons=["x"], alarms=[], sources={})
    measured = {"decision": "promote", "lift": 1.1, "ci_low": 1.0, "ci_high": 1.2}
    site.current("decision", GateDecision(derivation_id="d2", parents={}, **measured))
    retrainings.begin(site.root, "next", now=1, reasons=["x"], alarms=[], sources={})
    assert retrainings.end(site.root, "next", now=2).outcome == "approved"


def test_the_same_run_begins_and_ends_once(site):
    begun = {"now": 5, "reasons": ["x"], "alarms": [], "sources": {}}
    first = retrainings.begin(site.root, "one", **begun)
    assert retrainings.begin(site.root, "one", **{**begun, "now": 9}) == first
    assert retrainings.end(site.root, "one", now=10) == retrainings.end(site.root, "one", now=99)
    assert [one.number for one in retrainings.on_record(site.root)] == [1]
    assert retrainings.end(site.root, "never", now=1) is None
