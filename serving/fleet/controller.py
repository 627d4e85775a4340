"""Drives a rollout: look at the replicas, decide, write the state down, act."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from serving.deploy import run_probe
from serving.errors import DeployError
from serving.fleet.change import Way, tokens_hash, verify
from serving.fleet.counters import NoCountersError
from serving.fleet.replicas import Address, Discover, Drafter, Seen, look, look_at_all, understood
from serving.fleet.rollout import FORWARD, Policy, Record, Rollout, Soak
from serving.fleet.sample import counts_or_none, sampled
from serving.fleet.soak import Verdict, is_due, judge
from serving.fleet.steps import Change, Enter, Name, Revert, Sample, Step, Wait, next_step, observe

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Orders:
    """What people have asked of a rollout, from another process."""

    aborted: str | None = None
    """Who aborted it."""
    paused: str | None = None
    """Who paused it, and nobody resumed it since."""


class Ledger(Protocol):
    """Where a rollout's state is kept."""

    def save(self, rollout: Rollout) -> None:
        """Return once it would survive a crash. Raises: an error when this controller is not in charge any more."""
        ...

    def orders(self) -> Orders:
        """What was asked so far."""
        ...


class NamingError(Exception):
    """The alias cannot be moved to what the fleet serves: the fleet has to go back."""


@dataclass(frozen=True)
class Fleet:
    """The replicas, and how they are changed."""

    discover: Discover
    token: str
    probe: Sequence[dict[str, Any]]
    in_place: Way
    restart: Way
    """For replicas whose status says that they can't be swapped in place."""
    allow_changed_outputs: bool = False


class Controller:
    """One rollout's driver. Any number of them may have died before it."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        policy: Policy,
        name: Callable[[], None],
        now: Callable[[], float] = time.time,
    ):
        self.fleet, self.ledger, self.policy = fleet, ledger, policy
        self._name, self._now = name, now
        self._told = ""
        self.rollout: Rollout

    def run(self, rollout: Rollout) -> Rollout:
        """The rollout when it has ended: converged, reverted, or stopped."""
        self.rollout = replace(rollout, taken_over_at=self._now())
        self.ledger.save(self.rollout)
        while not self.rollout.has_ended:
            orders = self.ledger.orders()
            if orders.aborted and self.rollout.phase in FORWARD:
                self._revert(f"aborted by {orders.aborted}")
            elif orders.paused:
                self._wait(f"paused by {orders.paused}; `slipstream deploy --resume` goes on, `--abort` goes back")
            else:
                self._round()
        return self.rollout

    def _round(self) -> None:
        try:
            addresses = self.fleet.discover()
        except DeployError as error:
            self._wait(f"the replicas could not be listed: {error}")
            return
        seen = look_at_all(addresses, self.fleet.token)
        self._save(observe(self.rollout, addresses, seen, now=self._now(), policy=self.policy))
        self._take(next_step(self.rollout, seen, now=self._now(), policy=self.policy), seen)

    def _take(self, step: Step, seen: Mapping[str, Seen]) -> None:
        match step:
            case Change(names, is_canary):
                self._change(names, seen, is_canary=is_canary)
            case Sample():
                self._soak(seen)
            case Wait(why):
                self._wait(why)
            case Revert(why):
                self._revert(why)
            case Enter(phase, keep_canary):
                soak = Soak(began_at=self._now()) if phase == "soak" else self.rollout.soak
                canary = self.rollout.canary if keep_canary else None
                self._save(replace(self.rollout, phase=phase, canary=canary, soak=soak))
                self._tell(phase)
            case Name():
                self._name_target()

    def _name_target(self) -> None:
        try:
            self._name()
        except NamingError as error:
            self._revert(str(error))
            return
        self._save(replace(self.rollout, phase="converged"))
        self._tell("converged")

    def _change(self, names: Sequence[str], seen: Mapping[str, Seen], *, is_canary: bool) -> None:
        """Change these replicas at the same time; what is known before, and after, is written down."""
        records = [record for record in self.rollout.replicas if record.name in names]
        with ThreadPoolExecutor(len(records)) as pool:
            begun = list(pool.map(lambda record: self._begun(record, seen[record.name]), records))
            state = self.rollout.with_records(*begun)
            self._save(replace(state, canary=names[0]) if is_canary else state)
            ready = [record for record in begun if record.state == "changing"]
            for record in pool.map(lambda record: self._changed(record, seen[record.name]), ready):
                self._save(self.rollout.with_records(record))
                self._tell_of(record)

    def _begun(self, record: Record, seen: Seen) -> Record:
        """The record as it is written down before the change."""
        goal = self.rollout.goal(record)
        if record.state == "changing" and (self._was_interrupted(record) or goal.same_as(seen.drafter)):
            return record
        if record.changes >= self.policy.max_changes:
            why = f"{record.url}: does not stay up with it, {record.changes} changes were begun"
            return replace(record, state="failed", why=why)
        try:
            with understood(record.url):
                reference = tokens_hash(run_probe(record.url, self.fleet.probe)) if self._compares else None
        except DeployError as error:
            return self._refused(record, error)
        changes = record.changes + 1
        return replace(record, state="changing", reference=reference, changes=changes, began_at=self._now())

    def _changed(self, record: Record, seen: Seen) -> Record:
        goal, now = self.rollout.goal(record), seen.drafter
        reference = record.reference if self._compares else None
        way = self.fleet.in_place if seen.in_place else self.fleet.restart
        try:
            with understood(record.url):
                if goal.same_as(now):  # an interrupted change got so far, and did not prove itself
                    change = verify(record.url, seen, self.fleet.probe, reference=reference)
                else:
                    change = way(record.url, goal, now.version, reference)
        except DeployError as error:
            return self._refused(record, error)
        shown = {"version": goal.version, "since": _iso(self._now()), "counts": counts_or_none(record.url)}
        return replace(record, state="serving", why="", change=change, **shown)

    @property
    def _compares(self) -> bool:
        """Whether greedy tokens must stay what they were. On the way back they may change: the old ones are wanted."""
        return not self.fleet.allow_changed_outputs and self.rollout.phase != "reverting"

    def _was_interrupted(self, record: Record) -> bool:
        """Whether a controller that died not long ago asked for this change: its swap may be running there still."""
        now, taken_over_at = self._now(), self.rollout.taken_over_at
        return (record.began_at or now) < taken_over_at and now - taken_over_at < self.policy.dead_after_s

    def _refused(self, record: Record, error: DeployError) -> Record:
        """A replica that went down in the change is waited for; one that is up has refused."""
        seen = look(Address(record.name, record.url), self.fleet.token)
        if not seen.is_up:
            return replace(record, why=str(error))
        if record.state == "changing" and self._was_interrupted(record):
            logger.warning("deploy: %s; it is asked again", error)
            time.sleep(self.policy.tick_s)
            return replace(record, why=str(error))
        refusals = record.refusals + 1
        state = "failed" if refusals >= self.policy.attempts else "waiting"
        return replace(record, state=state, why=str(error), refusals=refusals)

    def _soak(self, seen: Mapping[str, Seen]) -> None:
        soak, policy = self.rollout.soak, self.policy.soak
        assert soak is not None and policy is not None
        elapsed_s = self._now() - soak.began_at
        try:
            soak = sampled(soak, self.rollout, seen)
            verdict = None
            if is_due(soak.looks, elapsed_s, policy):
                judged = {"looks": soak.looks, "elapsed_s": elapsed_s, "promise": self.rollout.promise}
                verdict = judge(soak.intervals, policy, **judged)
                soak = replace(soak, looks=soak.looks + 1)
        except NoCountersError as error:
            go_on = policy.undecided == "go_on"
            verdict = Verdict("pass" if go_on else "fail", f"the soak cannot be judged: {error}")
        self._save(replace(self.rollout, soak=replace(soak, verdict=verdict.why if verdict else soak.verdict)))
        if verdict is None or verdict.outcome == "extend":
            due_s = min(policy.min_s * 2**soak.looks, policy.max_s)
            told = f"{verdict.why}; " if verdict else ""
            self._wait(f"soak of {self.rollout.canary}: {told}judged after {due_s:g} s", self.policy.soak_tick_s)
        elif verdict.outcome == "fail":
            self._revert(f"soak of {self.rollout.canary}: {verdict.why}")
        else:
            logger.info("deploy: soak of %s passed: %s", self.rollout.canary, verdict.why)
            self._save(replace(self.rollout, phase="waves"))

    def _revert(self, why: str) -> None:
        logger.warning("deploy: going back: %s", why)
        self._save(self.rollout.reverting(why))

    def _wait(self, why: str, seconds: float | None = None) -> None:
        if why != self._told:
            logger.info("deploy: %s", why)
            self._told = why
        time.sleep(self.policy.tick_s if seconds is None else seconds)

    def _tell(self, phase: str) -> None:
        self._told = ""
        serving = sum(record.state == "serving" for record in self.rollout.replicas)
        logger.info("deploy: %s, %d of %d replicas serve %s", phase, serving, len(self.rollout.replicas), self._goal())

    def _tell_of(self, record: Record) -> None:
        goal = self.rollout.goal(record)
        if record.state == "serving" and goal is not None:
            paused = record.change.get("pause_s", 0.0)
            logger.info("deploy: %s serves version %s, paused %.2f s", record.name, goal.version, paused)
        else:
            logger.warning("deploy: %s is %s: %s", record.name, record.state, record.why)

    def _goal(self) -> str:
        is_back = self.rollout.phase in ("reverting", "reverted", "stopped")
        goal: Drafter | None = self.rollout.base if is_back else self.rollout.target
        return f"version {goal.version}" if goal else "what they served before"

    def _save(self, rollout: Rollout) -> None:
        if rollout != self.rollout:
            self.ledger.save(rollout)
            self.rollout = rollout


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
