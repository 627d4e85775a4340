"""How often is the gate wrong, does it find what is there, and what does it let through?

python bench/gate.py                              every figure
python bench/gate.py --small                      the same with fewer simulated gates and fewer real requests
python bench/gate.py --only false_promotions --records RECORDS.parquet

Simulated gates draw whole conversations from real records (schemas.ACCEPTANCE) again; see bench/oracles.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "drafter")]  # toys

from bench.figures import Figure, at_least, at_most, finish, shown, unknown  # noqa: E402

if TYPE_CHECKING:
    from bench.oracles.simulated_gates import Records

RECORDS = ROOT / "bench" / "records" / "support_mails.parquet"
_PROMPTS = 400
_NOMINAL = 0.05


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on."""

    small: bool
    path: Path
    workers: int
    workdir: Path

    @property
    def gates(self) -> int:
        """Simulated gates a figure."""
        return 60 if self.small else 400

    @cached_property
    def records(self) -> "Records":
        """The real records that gates are drawn from."""
        from bench.oracles.simulated_gates import read

        return read(self.path)

    @property
    def note(self) -> dict[str, object]:
        """Where a figure comes from."""
        return {"on": self.records.name, "n": self.gates}


def false_promotions(setting: Setting) -> dict[str, Figure]:
    """Gates that found a lift where there is none, at a nominal 5%: at the end, and over all looks on the way.

    Gates that promoted are fewer, since everything else has to hold as well; the stricter count is held to the limit.
    """
    from scipy import stats

    from bench.oracles.simulated_gates import many, passes, stops

    # What 5% gives in 97.5% of all tries: 29 of 400.
    limit = int(stats.binom.ppf(0.975, setting.gates, _NOMINAL)) if setting.small else 29
    settings = {"num_prompts": _PROMPTS, "lift": 1.0}
    fixed = many(passes, setting.records, setting.gates, setting.workers, **settings)
    looked = many(stops, setting.records, setting.gates, setting.workers, **settings)
    return {
        "false_promotions.at_the_end": at_most(
            sum(found for found, _, _ in fixed), limit, **setting.note, promoted=sum(one for _, one, _ in fixed)
        ),
        "false_promotions.with_looks": at_most(
            sum(found for _, _, found in looked),
            limit,
            **setting.note,
            promoted=sum(ended == "promote" for ended, _, _ in looked),
        ),
    }


def power(setting: Setting) -> dict[str, Figure]:
    """Gates that promote a true lift of 5% on 400 prompts; and the power calculation against counting."""
    from statistics import median

    from bench.oracles.simulated_gates import POLICY, many, needed_by_simulation, passes

    lift = POLICY.worthwhile_lift
    fixed = many(passes, setting.records, setting.gates, setting.workers, num_prompts=_PROMPTS, lift=lift)
    guesses = [needed for _, _, needed in fixed if needed is not None]
    guess = round(median(guesses))
    found, seen = needed_by_simulation(
        setting.records,
        lift=lift,
        guess=guess,
        gates=setting.gates,
        power=POLICY.power,
        workers=setting.workers,
    )
    spread = sorted(guesses)[len(guesses) // 20], sorted(guesses)[-len(guesses) // 20 - 1]
    return {
        "power.promoted": at_least(sum(one for _, one, _ in fixed) / setting.gates, 0.8, **setting.note, lift=lift),
        "power.needed_over_simulated": at_most(
            abs(guess / found - 1),
            0.15,
            **setting.note | {"n": 5 * setting.gates},
            needed=guess,
            simulated=round(found),
            spread=spread,
            shown_at=seen,
        ),
    }


def early_stopping(setting: Setting) -> dict[str, Figure]:
    """The share of a fixed sample's prompts that a lift of 20% takes with looks after every sitting."""
    from bench.oracles.simulated_gates import NUM_BLOCKS, many, stops

    ended = many(stops, setting.records, setting.gates, setting.workers, num_prompts=_PROMPTS, lift=1.2)
    losses = setting.gates // 4
    worse = many(stops, setting.records, losses, setting.workers, num_prompts=_PROMPTS, lift=1 / 1.2)
    note = setting.note | {"looks": NUM_BLOCKS}
    return {
        "early_stopping.share_of_prompts": at_most(
            sum(share for _, share, _ in ended) / setting.gates,
            0.5,
            **note,
            promoted=sum(one == "promote" for one, _, _ in ended),
        ),
        "early_stopping.share_of_prompts_on_a_loss": shown(
            sum(share for _, share, _ in worse) / losses,
            **note | {"n": losses},
            rejected=sum(one == "reject" for one, _, _ in worse),
        ),
    }


def sabotages(setting: Setting) -> dict[str, Figure]:
    """Ways in which gates were fooled that are stopped, each for a reason that names the fault or its symptom."""
    from tiny import tiny_drafter, tiny_target

    from bench.oracles.sabotages import ALL, NAMES, Scene, control

    target = tiny_target(setting.workdir / "target")
    drafter = tiny_drafter(setting.workdir / "drafter", target)
    scene = Scene(setting.records, target, drafter, setting.workdir)
    if (reason := control(scene)) is not None:
        return {"sabotages": unknown(f"the drafter with nothing done to it is stopped too: {reason}")}
    stopped = {}
    for name, sabotage in ALL.items():
        reason = sabotage(scene)
        stopped[name] = reason is not None and NAMES[name] in reason
        print(f"{'stopped' if stopped[name] else 'NOT STOPPED':12}{name}: {reason}")
    return {"sabotages": at_least(sum(stopped.values()), len(ALL), on=setting.records.name, n=len(ALL))}


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f for f in (false_promotions, power, early_stopping, sabotages)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--records", type=Path, default=RECORDS, help="acceptance.parquet of a real comparison")
    arguments = parser.parse_args(argv)
    # Every simulated gate is a process of its own; more threads in each would only get in the way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as workdir:
        setting = Setting(arguments.small, arguments.records, len(os.sched_getaffinity(0)), Path(workdir))
        for name in [arguments.only] if arguments.only else MEASURES:
            figures |= MEASURES[name](setting)
    finish("gate", figures)


if __name__ == "__main__":
    main()
