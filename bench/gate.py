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
    target: Path | None = None  # None: a toy
    drafter: Path | None = None

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

    def pair(self, favourite: int) -> tuple[Path, Path, str]:
        """Target, drafter and what they are: those that were given, else toys whose drafts are often accepted."""
        if self.target and self.drafter:
            return self.target, self.drafter, self.target.name
        from tiny import tiny_drafter, tiny_target

        toys = self.folder("toys")
        if not (toys / "target").exists():
            tiny_drafter(toys / "drafter", tiny_target(toys / "target", favourite=favourite), proposes=favourite)
        return toys / "target", toys / "drafter", "toy"

    def folder(self, name: str) -> Path:
        """A folder of a figure's own."""
        (folder := self.workdir / name).mkdir(exist_ok=True)
        return folder


def false_promotions(setting: Setting) -> dict[str, Figure]:
    """Of 400 gates without a lift, those that found one, at a nominal 5%: at the end, and over all looks on the way.

    The mean of five sets of 400: one set's count alone scatters by 4 around its mean of 20. Gates that promoted are
    fewer, since everything else has to hold as well; the stricter count is held to the limit.
    """
    from scipy import stats

    from bench.oracles.simulated_gates import many, passes, stops

    sets = 1 if setting.small else 5
    # What 5% gives in 97.5% of all tries: 29 of 400.
    limit = int(stats.binom.ppf(0.975, setting.gates, _NOMINAL)) if setting.small else 29
    figures = {}
    for name, simulate in (("at_the_end", passes), ("with_looks", stops)):
        outcomes = many(
            simulate, setting.records, sets * setting.gates, setting.workers, num_prompts=_PROMPTS, lift=1.0
        )
        found = [bool(one[0] if simulate is passes else one[2]) for one in outcomes]
        promoted = sum(one[1] if simulate is passes else one[0] == "promote" for one in outcomes)
        counts = [sum(found[i * setting.gates : (i + 1) * setting.gates]) for i in range(sets)]
        figures[f"false_promotions.{name}"] = at_most(
            sum(counts) / sets,
            limit,
            **setting.note | {"n": len(outcomes)},
            sets=counts,
            spread=max(counts) - min(counts),
            promoted=promoted / sets,
        )
    return figures


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

    work = setting.folder("sabotages")
    target = tiny_target(work / "target")
    scene = Scene(setting.records, target, tiny_drafter(work / "drafter", target), work)
    if (reason := control(scene)) is not None:
        return {"sabotages": unknown(f"the drafter with nothing done to it is stopped too: {reason}")}
    stopped = {}
    for name, sabotage in ALL.items():
        reason = sabotage(scene)
        stopped[name] = reason is not None and NAMES[name] in reason
        print(f"{'stopped' if stopped[name] else 'NOT STOPPED':12}{name}: {reason}")
    return {"sabotages": at_least(sum(stopped.values()), len(ALL), on=setting.records.name, n=len(ALL))}


def counts(setting: Setting) -> dict[str, Figure]:
    """Requests of a real engine whose counts are those of a hand count of every step."""
    from bench.oracles.bench_serve import counts_by_hand

    found = counts_by_hand(setting.folder("counts"), num_requests=12 if setting.small else 50)
    ended_inside = {"ended_inside": found["num_ended_inside"], "steps": found["num_steps"]}
    return {"counts": at_least(found["num_equal"], found["num_requests"], on="toy", **ended_inside)}


def acceptance_length(setting: Setting) -> dict[str, Figure]:
    """Relative difference of our acceptance length and ``vllm bench serve``'s, of the same prompts on one server."""
    from bench.oracles.bench_serve import FAVOURITE, acceptance_length_against_bench_serve

    target, drafter, on = setting.pair(FAVOURITE)
    prompts = [[0, 5, 20 + i, 120 + 3 * i, 40 + 2 * i] for i in range(12 if setting.small else 50)]
    found = acceptance_length_against_bench_serve(
        setting.folder("bench_serve"), target=target, drafter=drafter, prompts=prompts
    )
    note = {"ours": found["ours"], "theirs": found["theirs"], "n": found["num_requests"]}
    return {"acceptance_length.difference": at_most(abs(found["ratio"] - 1), 0.01, on=on, **note)}


def real_gates(setting: Setting) -> dict[str, Figure]:
    """Real gates of a drafter against its twin that promoted: each is wrong."""
    from bench.oracles.bench_serve import FAVOURITE
    from bench.oracles.real_gates import aa_gates

    target, drafter, on = setting.pair(FAVOURITE)
    gates, prompts = (1, 32) if setting.small else (3, 60)
    # Float32: half precision is emulated on many processors, a hundred times slower.
    settings = (
        "evaluate.general_prompts=0",
        "evaluate.max_tokens=32",
        "target.max_model_len=1024",
        "target.dtype=float32",
    )
    work = setting.folder("real_gates")
    verdicts = list(aa_gates(target, drafter, work, gates=gates, prompts=prompts, settings=settings))
    promoted = sum(one["decision"] == "promote" for one in verdicts)
    return {"real_gates.promoted": shown(promoted, on=on, n=gates, verdicts=verdicts)}


def promoters(setting: Setting) -> dict[str, Figure]:
    """Promoters at once on one registry, some killed: winners a round, versions lost, and moves without a record."""
    from bench.oracles.promoters import concurrent_promoters

    found = concurrent_promoters(rounds=1 if setting.small else 3)
    note = {"on": "SQLite", "n": found["promoters"], "rounds": found["rounds"], "killed": found["killed"]}
    incomplete = 0 if found["history_complete"] else 1
    return {
        "promoters.champions": at_most(found["champions"], 1, **note),
        "promoters.lost_versions": at_most(found["lost"], 0, **note),
        "promoters.history_incomplete": at_most(incomplete, 0, **note, faults=found["faults"]),
    }


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f
    for f in (
        false_promotions,
        power,
        early_stopping,
        sabotages,
        counts,
        acceptance_length,
        real_gates,
        promoters,
    )
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--records", type=Path, default=RECORDS, help="acceptance.parquet of a real comparison")
    parser.add_argument("--target", type=Path, help="target folder of the figures on a real engine; a toy without it")
    parser.add_argument("--drafter", type=Path, help="its drafter, in the z-lab layout")
    arguments = parser.parse_args(argv)
    from jobs.target_engine import set_engine_environment

    # Toys gain nothing from more, and every simulated gate is a process of its own.
    set_engine_environment(num_threads=1)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as workdir:
        setting = Setting(
            arguments.small,
            arguments.records,
            len(os.sched_getaffinity(0)),
            Path(workdir),
            arguments.target,
            arguments.drafter,
        )
        for name in [arguments.only] if arguments.only else MEASURES:
            figures |= (found := MEASURES[name](setting))
            print("\n".join(f"{key}: {one['value']}" for key, one in found.items()), file=sys.stderr, flush=True)
    finish("gate", figures)


if __name__ == "__main__":
    main()
