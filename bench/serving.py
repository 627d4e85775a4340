"""Swaps, a fleet's rollouts, the monitor, the schedule: does each do what it says, and does nobody notice?

python bench/serving.py                  every figure, toys unless drafters are named
python bench/serving.py --small          a quick form
python bench/serving.py --only swaps --target DIR --drafter DIR --drafter DIR

scheduled_cycle needs the scheduler, in an environment of its own: make airflow. A GPU's swap: bench/gpu_swap.py.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.figures import Figure, at_least, at_most, finish, shown, unknown  # noqa: E402


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on."""

    small: bool
    work: Path
    target: Path | None
    """None: toys."""
    drafters: tuple[Path, ...]

    @property
    def server(self) -> dict[str, Any]:
        """What a server of the bench serves, where it is no toy."""
        return {"target": self.target, "drafters": self.drafters} if self.target else {}


def swaps(setting: Setting) -> dict[str, Figure]:
    """100 swaps back and forth in float32 under 8 clients, streaming and not: failures, tokens, pause, memory."""
    from bench.oracles.many_swaps import many_swaps

    return many_swaps(setting.work, swaps=20 if setting.small else 100, **setting.server)


def swap_vs_restart(setting: Setting) -> dict[str, Figure]:
    """Time without an answer around a swap, over that around a restart with the same flags."""
    from bench.oracles.many_swaps import swap_against_restart

    return swap_against_restart(
        setting.work, swaps=3 if setting.small else 9, restarts=1 if setting.small else 3, **setting.server
    )


def bad_swaps(setting: Setting) -> dict[str, Figure]:
    """Drafters that must not be served: refused or put back for the right reason, with nobody disturbed."""
    from bench.oracles.bad_swaps import bad_swaps as measured

    return measured(setting.work)


def endpoint(setting: Setting) -> dict[str, Figure]:
    """Callers without the right, path tricks, replays, twenty swaps at once, clients that hang up, bodies too large."""
    from bench.oracles.endpoint_attacks import endpoint_attacks

    return endpoint_attacks(setting.work)


def fleet(setting: Setting) -> dict[str, Figure]:
    """Rollouts over 3 replicas in waves of 1: controllers killed with -9, a replica killed, a replica that refuses."""
    from bench.oracles.fleet_kills import fleet_kills

    found = fleet_kills(setting.work, kills=3 if setting.small else 10)
    note = {"n": found["rounds"], "on": f"{found['kills']} kills of the controller in {found['rounds']} rollouts"}
    return {
        "fleet.not_converged": at_most(found["not_converged"], 0, **note, reconciled=found["reconciled"]),
        "fleet.min_serving_of_3": at_least(found["min_serving"], 2, **note, replica_kills=found["replica_kills"]),
        "fleet.lost_requests": at_most(found["lost_requests"], 0, n=found["num_requests"], errors=found["errors"]),
    }


def monitor(setting: Setting) -> dict[str, Figure]:
    """The monitor on simulated months with three shifts of 10%: what it finds within a day, and what for nothing."""
    from bench.oracles.monitor_months import monitor_month

    found = monitor_month(months=2 if setting.small else 10, report=lambda line: print(line, file=sys.stderr))
    return {f"monitor.{name.removeprefix('monitor_')}": figure for name, figure in found.items()}


def scheduled_cycle(setting: Setting) -> dict[str, Figure]:
    """A drift alarm, and from there to a new champion that serves, by the real scheduler alone."""
    from bench.oracles.airflow_standalone import AIRFLOW
    from bench.oracles.scheduled_cycle import scheduled_cycle as cycle

    if not AIRFLOW.exists():
        return {"scheduled_cycle.new_champion": unknown("no scheduler here: make airflow")}
    found = cycle(setting.work)
    new = found.champion_after not in (None, found.champion_before)
    untouched = found.began_by == "asset_triggered" and found.state == "success" and found.runs == 1
    return {
        "scheduled_cycle.new_champion": at_least(
            int(new and untouched and found.serves == found.champion_after),
            1,
            on=f"champion {found.champion_before} to {found.champion_after}, which serves",
            reasons=found.reasons,
            tasks=found.tasks,
        ),
        "scheduled_cycle.seconds": shown(found.seconds, on="from the alarm to the end of the run"),
    }


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f for f in (swaps, swap_vs_restart, fleet, bad_swaps, endpoint, monitor, scheduled_cycle)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--target", type=Path, help="a target's folder; without it toys")
    parser.add_argument("--drafter", type=Path, action="append", default=[], help="two of its drafters' folders")
    arguments = parser.parse_args(argv)
    if bool(arguments.target) != (len(arguments.drafter) == 2):
        parser.error("--target comes with two --drafter")
    figures: dict[str, Figure] = {}
    for name in [arguments.only] if arguments.only else MEASURES:
        with tempfile.TemporaryDirectory() as work:
            setting = Setting(arguments.small, Path(work), arguments.target, tuple(arguments.drafter))
            figures |= (found := MEASURES[name](setting))
        print("\n".join(f"{key}: {one['value']}" for key, one in found.items()), file=sys.stderr, flush=True)
    finish("serving", figures)


if __name__ == "__main__":
    main()
