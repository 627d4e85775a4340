"""What a rollout does next, from its state and a look at the replicas alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serving.fleet.replicas import Address, Seen
from serving.fleet.rollout import FORWARD, Phase, Policy, Record, Rollout


@dataclass(frozen=True)
class Change:
    """Have these replicas serve their goal, all at a time."""

    names: tuple[str, ...]
    is_canary: bool = False


@dataclass(frozen=True)
class Sample:
    """Read the counters, and judge the soak where a look is due."""


@dataclass(frozen=True)
class Wait:
    """Look again later."""

    why: str


@dataclass(frozen=True)
class Enter:
    """Go to another phase."""

    phase: Phase
    keep_canary: bool = True


@dataclass(frozen=True)
class Revert:
    """Put every replica back."""

    why: str


@dataclass(frozen=True)
class Name:
    """Move the alias: every replica that counts serves the target."""


Step = Change | Sample | Wait | Enter | Revert | Name


def observe(
    rollout: Rollout, addresses: Sequence[Address], seen: Mapping[str, Seen], *, now: float, policy: Policy
) -> Rollout:
    """The rollout after a look: replicas that came, went, stopped serving, or serve something else than they did."""
    records = []
    for address in addresses:
        record = rollout.record(address.name) or Record(address.name, address.url)
        records.append(_observed(rollout, replace(record, url=address.url), seen[address.name], now, policy))
    return replace(rollout, replicas=tuple(records))


def _observed(rollout: Rollout, record: Record, seen: Seen, now: float, policy: Policy) -> Record:
    if seen.drafter is None:
        return replace(record, down_since=record.down_since or now, why=seen.why)
    record = replace(record, down_since=None, before=record.before or seen.drafter)
    goal = rollout.goal(record)
    if goal is None or goal.same_as(seen.drafter):
        # On the way there, one that failed and serves it did not prove itself with it.
        if record.state not in (("waiting",) if rollout.phase in FORWARD else ("waiting", "failed")):
            return record
        unchanged = {"pause_s": 0.0, "changed_outputs": 0, "live_fingerprint": seen.live}
        return replace(record, state="serving", why="", change=unchanged)
    if record.state != "serving":
        return record
    if record.changes >= policy.max_changes:
        why = f"{record.url}: serves version {seen.drafter.version} again after {record.changes} changes"
        return replace(record, state="failed", why=why)
    return replace(record, state="waiting", why=f"{record.url}: serves version {seen.drafter.version} again")


def next_step(rollout: Rollout, seen: Mapping[str, Seen], *, now: float, policy: Policy) -> Step:
    """The next step of a rollout that has not ended and was just observed."""
    if rollout.phase == "naming":
        return Name()
    lost = lost_records(rollout, now, policy)
    if rollout.phase in FORWARD and policy.turns_back and len(lost) > policy.max_failed:
        return Revert("; ".join(record.why or record.name for record in lost))
    if rollout.phase == "canary":
        return _canary_step(rollout, seen, now, policy)
    if rollout.phase == "soak":
        return _soak_step(rollout, now, policy)
    return _wave_step(rollout, seen, now, policy)


def lost_records(rollout: Rollout, now: float, policy: Policy) -> list[Record]:
    """Replicas that refused, or have been down for so long that nobody waits for them."""
    return [record for record in rollout.replicas if record.state == "failed" or record.is_given_up(now, policy)]


def _canary_step(rollout: Rollout, seen: Mapping[str, Seen], now: float, policy: Policy) -> Step:
    canary, behind = rollout.record(rollout.canary), _behind(rollout)
    if canary is None:
        if not behind:
            return Enter("waves")
        # One whose change was interrupted comes first: it may serve the new drafter already.
        first = min(behind, key=lambda record: record.state != "changing")
        return _change([first], rollout, seen, now, policy, is_canary=True)
    if canary.state == "failed" or canary.is_given_up(now, policy):
        return Enter("canary", keep_canary=False)
    if canary.down_since is not None:
        return Wait(canary.why)
    if canary.state == "serving":
        others_wait = any(record.state != "serving" for record in rollout.replicas if record is not canary)
        return Enter("soak" if policy.soak is not None and others_wait else "waves")
    return _change([canary], rollout, seen, now, policy, is_canary=True)


def _soak_step(rollout: Rollout, now: float, policy: Policy) -> Step:
    canary = rollout.record(rollout.canary)
    if canary is None or canary.state == "failed" or canary.is_given_up(now, policy):
        return Enter("canary", keep_canary=False)
    if canary.down_since is not None:
        return Wait(canary.why)
    return Sample() if canary.state == "serving" else Enter("canary")  # restarted with the old drafter: from the start


def _wave_step(rollout: Rollout, seen: Mapping[str, Seen], now: float, policy: Policy) -> Step:
    if behind := _behind(rollout):
        return _change(behind, rollout, seen, now, policy)
    if down := _awaited(rollout, now, policy):
        return Wait(f"{_names(down)} down: {down[0].why}")
    if rollout.phase == "reverting":
        return Enter("stopped" if lost_records(rollout, now, policy) else "reverted")
    if not any(record.state == "serving" for record in rollout.replicas):
        return Revert("no replica took it")
    return Enter("naming")


def _change(
    behind: Sequence[Record],
    rollout: Rollout,
    seen: Mapping[str, Seen],
    now: float,
    policy: Policy,
    *,
    is_canary: bool = False,
) -> Step:
    """As many of these as may be out of service now."""
    awaited = _awaited(rollout, now, policy)
    room = policy.max_unavailable - len(awaited)
    # A swap in place holds its requests for a moment. A restart takes capacity away, beside what is lost for good.
    num_down = sum(record.down_since is not None for record in rollout.replicas)
    restart_room = min(room, policy.max_unavailable + policy.max_failed - num_down)
    wave: list[str] = []
    for record in behind:
        if len(wave) < (room if seen[record.name].in_place else restart_room):
            wave.append(record.name)
    if wave:
        return Change(tuple(wave), is_canary)
    if not awaited:  # what is left can only be restarted, and too many are down for that
        return Enter("stopped" if rollout.phase == "reverting" else "naming")
    return Wait(f"{_names(awaited)} down, and max_unavailable is {policy.max_unavailable}")


def _behind(rollout: Rollout) -> list[Record]:
    """Replicas that are up and have to be changed, or to prove a change that was interrupted."""
    return [
        record for record in rollout.replicas if record.state in ("waiting", "changing") and record.down_since is None
    ]


def _awaited(rollout: Rollout, now: float, policy: Policy) -> list[Record]:
    return [r for r in rollout.replicas if r.down_since is not None and not r.is_given_up(now, policy)]


def _names(records: Sequence[Record]) -> str:
    names = ", ".join(record.name for record in records)
    return f"{names} {'is' if len(records) == 1 else 'are'}"
