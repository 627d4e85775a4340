"""Drives a rollout: look at the replicas, decide, write the state down, act."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from serving.deploy import Probe, run_probe
from serving.errors import DeployError, LookAgainError, NoAnswerError
from serving.fleet.change import Way, tokens_hash, verify
from serving.fleet.progress import Progress
from serving.fleet.replicas import Address, Discover, Seen, look, look_at_all, understood
from serving.fleet.rollout import FORWARD, Policy, Record, Rollout, Soak
from serving.fleet.sample import counters_or_none, look_at_soak
from serving.fleet.soak import steps_of
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
    probe_timeout_s: float = 600.0
    """Of one probe prompt."""


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
        self._progress = Progress()
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
                self._progress.phase(self.rollout)
            case Name():
                self._name_target()

    def _name_target(self) -> None:
        try:
            self._name()
        except NamingError as error:
            self._revert(str(error))
            return
        self._save(replace(self.rollout, phase="converged"))
        self._progress.phase(self.rollout)

    def _change(self, names: Sequence[str], seen: Mapping[str, Seen], *, is_canary: bool) -> None:
        """Change these replicas at the same time; what is known before, and after, is written down."""
        records = [record for record in self.rollout.replicas if record.name in names]
        with ThreadPoolExecutor(len(records)) as pool:
            begun = list(pool.map(lambda record: self._begun(record, seen[record.name]), records))
            state = self.rollout.with_records(*begun)
            self._save(replace(state, canary=names[0]) if is_canary else state)
            ready = [record for record in begun if record.state == "changing"]
            for record in ready:
                self._progress.begins(record, self.rollout.goal(record))
            for record in pool.map(lambda record: self._changed(record, seen[record.name]), ready):
                self._save(self.rollout.with_records(record))
                self._progress.changed(record, self.rollout.goal(record))

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
                reference = tokens_hash(self._probed(record)) if self._compares else None
        except DeployError as error:
            return self._refused(record, error)
        stale = seen.live if seen.drafter.sha256 != goal.sha256 else None
        known = {"reference": reference, "stale": stale, "changes": record.changes + 1}
        return replace(record, state="changing", began_at=self._now(), **known)

    def _changed(self, record: Record, seen: Seen) -> Record:
        goal, fleet = self.rollout.goal(record), self.fleet
        reference = record.reference if self._compares else None
        serves_it = goal.same_as(seen.drafter)  # an interrupted change got so far, and did not prove itself
        try:
            with understood(record.url):
                if serves_it:
                    proof = {"reference": reference, "stale": record.stale, "timeout_s": fleet.probe_timeout_s}
                    change = verify(record.url, seen, fleet.probe, **proof)
                else:
                    change = (fleet.in_place if seen.in_place else fleet.restart)(record.url, goal, seen, reference)
        except DeployError as error:
            return self._refused(record, error)
        shown = {"version": goal.version, "since": _iso(self._now()), "counts": counters_or_none(record.url)}
        return replace(record, state="serving", why="", change=change, **shown)

    def _probed(self, record: Record) -> Probe:
        return run_probe(record.url, self.fleet.probe, timeout_s=self.fleet.probe_timeout_s)

    @property
    def _compares(self) -> bool:
        """Whether greedy tokens must stay what they were. On the way back they may change: the old ones are wanted."""
        return not self.fleet.allow_changed_outputs and self.rollout.phase != "reverting"

    def _was_interrupted(self, record: Record) -> bool:
        """Whether a controller that died not long ago asked for this change: its swap may be running there still."""
        now, taken_over_at = self._now(), self.rollout.taken_over_at
        return (record.began_at or now) < taken_over_at and now - taken_over_at < self.policy.dead_after_s

    def _refused(self, record: Record, error: DeployError) -> Record:
        """The record after an error: a replica that is up has refused.

        One that is down is waited for. One whose answer was lost, and which serves the drafter now, proves itself in
        the next round. One that wasn't as it had been seen is looked at again, as often as it may be changed.
        """
        seen = look(Address(record.name, record.url), self.fleet.token)
        took_it = isinstance(error, NoAnswerError) and self.rollout.goal(record).same_as(seen.drafter)
        if not seen.is_up or took_it or isinstance(error, LookAgainError):
            return replace(record, why=str(error))
        if record.state == "changing" and self._was_interrupted(record):
            logger.warning("deploy: %s; it is asked again", error)
            time.sleep(self.policy.tick_s)
            return replace(record, why=str(error))
        refusals = record.refusals + 1
        state = "failed" if refusals >= self.policy.attempts else "waiting"
        return replace(record, state=state, why=str(error), refusals=refusals)

    def _soak(self, seen: Mapping[str, Seen]) -> None:
        soak, verdict = look_at_soak(self.rollout, seen, policy=self.policy, now=self._now())
        self._save(replace(self.rollout, soak=soak))
        told = f"soak of {self.rollout.canary}"
        if verdict is None or verdict.outcome == "extend":
            why = f"{verdict.why}; " if verdict else ""
            policy = self.policy.soak
            due_s = min(policy.min_s * 2**soak.looks, policy.max_s)
            counted = f"{steps_of(soak.intervals)} steps of {policy.min_steps} in {soak.observed_s:.0f} s"
            self._wait(f"{told}: {why}judged after {due_s:g} s", self.policy.soak_tick_s, more=counted)
        elif verdict.outcome == "fail":
            self._revert(f"{told}: {verdict.why}")
        else:
            logger.info("deploy: %s passed: %s", told, verdict.why)
            self._save(replace(self.rollout, phase="waves"))
            self._progress.phase(self.rollout)

    def _revert(self, why: str) -> None:
        logger.warning("deploy: going back: %s", why)
        self._save(self.rollout.reverting(why))

    def _wait(self, why: str, seconds: float | None = None, *, more: str = "") -> None:
        self._progress.waits(why, more)
        time.sleep(self.policy.tick_s if seconds is None else seconds)

    def _save(self, rollout: Rollout) -> None:
        if rollout != self.rollout:
            self.ledger.save(rollout)
            self.rollout = rollout


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
