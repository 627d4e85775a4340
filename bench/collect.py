"""Is what is collected complete, clean of people's data, the same whatever happens, and cheap; and does the tap hurt?

python bench/collect.py                      every figure; the tap on the real target where the demo has fetched it
python bench/collect.py --small              a quick form, on a toy
python bench/collect.py --only redaction

The tap's cost wants a machine with nothing else on it.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.path[1:1] = [str(ROOT / "tests")]  # toys

from bench.figures import Figure, at_most, finish, shown  # noqa: E402

DEMO_TARGET = ROOT / "runs" / "targets" / "SmolLM2-135M-Instruct"
THREADS = len(os.sched_getaffinity(0))
GIB = 1 << 30


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on."""

    small: bool
    target: Path | None
    """None: a toy."""
    work: Path


def tap_cost(setting: Setting) -> dict[str, Figure]:
    """Time between a client's tokens with the tap over without it, at 8 streams; processor time a chunk."""
    from bench.oracles.tap_cost import chunk_cost
    from bench.oracles.tap_cost import tap_cost as measured

    return measured(setting.work, target=setting.target) | chunk_cost(setting.work)


def tap_faults(setting: Setting) -> dict[str, Figure]:
    """Failed requests, changed answers and torn records while the tap's disk, writer or clients misbehave."""
    from bench.oracles.tap_faults import tap_faults as measured

    return measured(setting.work, target=setting.target, seconds=3.0 if setting.small else 6.0)


def records(setting: Setting) -> dict[str, Figure]:
    """Memory and time a record at two sizes, from three sources in three formats, with all pattern kinds redacted."""
    from bench.oracles.collected_runs import cost

    few, many = (2_000, 10_000) if setting.small else (100_000, 1_000_000)
    small = cost(setting.work / "few", few, seed=1)
    large = cost(setting.work / "many", many, seed=1)
    per_row = {few: small.seconds / few, many: large.seconds / many}
    note = {"n": many, "seconds": {few: small.seconds, many: large.seconds}, "counts": large.counts}
    return {
        "records.peak_gib": at_most(large.peak_bytes / GIB, 4.0, on=f"{many} records, Ray included"),
        "records.time_a_row": at_most(per_row[many] / per_row[few], 1.2, on=f"{many} over {few} records", **note),
        "records.rows_per_s_per_core": shown(many / large.seconds / THREADS, on=f"{THREADS} cores"),
    }


def near_duplicates(setting: Setting) -> dict[str, Figure]:
    """Pairs that are found among those that an exact comparison of all pairs finds."""
    from bench.oracles.near_pairs import cost_figures, near_duplicate_figures

    count = 1_000 if setting.small else 5_000
    sizes = (10_000,) if setting.small else (100_000, 1_000_000)
    return near_duplicate_figures(count=count) | cost_figures(sizes)


def redaction(setting: Setting) -> dict[str, Figure]:
    """Recall on labelled values of ten kinds and more, false alarms on clean records, and its cost."""
    from bench.oracles.redaction_recall import redaction_figures

    return redaction_figures()


def killed(setting: Setting) -> dict[str, Figure]:
    """Rows missing, twice or other than an undisturbed run's after kills at random moments."""
    from bench.oracles.collected_runs import killed as measured

    size, kills = (2_000, 2) if setting.small else (30_000, 20)
    found = measured(setting.work, size, kills=kills, seed=3)
    bad = sum(found[name] for name in ("missing", "twice", "different", "other_contents"))
    return {"killed.rows_other_than_undisturbed": at_most(bad, 0, n=found["kills"], on=f"{size} records", **found)}


def erased(setting: Setting) -> dict[str, Figure]:
    """Files that still hold a byte of one erased subject of 1,000, and rows of others that changed."""
    from bench.oracles.collected_runs import erased as measured

    found = measured(setting.work, subjects=100 if setting.small else 1000, seed=4)
    return {
        "erased.files_that_hold_it": at_most(found["files_that_hold_it"] + found["rows_left"], 0, **found),
        "erased.others_changed": at_most(found["others_changed"], 0, n=found["others"]),
    }


def cut_and_reordered(setting: Setting) -> dict[str, Figure]:
    """Runs over the same records, files in another order and cut otherwise, whose rows or contents differ."""
    from bench.oracles.collected_runs import cut_and_reordered as measured

    size = 2_000 if setting.small else 60_000
    found = measured(setting.work, size, seed=5)
    different = found["different_contents"] + found["different_rows"]
    return {"cut_and_reordered.different": at_most(different, 0, n=len(found["contents"]), **found)}


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f
    for f in (tap_cost, tap_faults, records, near_duplicates, redaction, killed, erased, cut_and_reordered)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--target", type=Path, help="the tap's target; without it the demo's, else a toy")
    arguments = parser.parse_args(argv)
    os.environ["SLIPSTREAM_SPLIT_KEY"] = "the split key of the bench"
    target = arguments.target or (None if arguments.small or not DEMO_TARGET.exists() else DEMO_TARGET)
    figures: dict[str, Figure] = {}
    for name in [arguments.only] if arguments.only else MEASURES:
        with tempfile.TemporaryDirectory() as work:
            figures |= (found := MEASURES[name](Setting(arguments.small, target, Path(work))))
        print("\n".join(f"{key}: {one['value']}" for key, one in found.items()), file=sys.stderr, flush=True)
    finish("collect", figures)


if __name__ == "__main__":
    main()
