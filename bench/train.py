"""Is the trainer right, faster and leaner than public ones, and does it turn traffic into more acceptance?

python bench/train.py                               every figure; on the real target where the demo has fetched it
python bench/train.py --small                       a quick form, on a toy
python bench/train.py --only speed --target DIR
python bench/train.py --only four_workloads --prompts a.jsonl b.jsonl

Peers are installed from the package registry, each into an environment under --work. What is captured and trained is
kept there too: the same command again goes on where it stopped. Timings want a machine with nothing else on it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "drafter")]  # toys

from bench.figures import Figure, above, at_least, at_most, finish, shown, unknown  # noqa: E402
from pipeline.errors import StageError  # noqa: E402

DEMO_TARGET = ROOT / "runs" / "targets" / "SmolLM2-135M-Instruct"
THREADS = len(os.sched_getaffinity(0))
MAILS, MAILS_SEED = 2000, 11
# What our trainer learns most from in a given time on a few cores (acceptance_at_equal_time).
SMALL_STEPS = {"blocks_per_step": 64, "anchors_per_row": 16, "sampled_vocabulary": 2048, "muon_turns": 2}
FAVOURITE = 433  # a token that the toy target says often: there is something to learn


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on, and for how long."""

    small: bool
    target: Path
    layers: tuple[int, ...]
    mask_token_id: int
    on: str
    work: Path
    prompts: tuple[Path, ...]
    seconds: float
    trial_seconds: float
    seeds: int
    workloads: tuple[str, ...]

    def config(self, root: Path, sources: Sequence[Path] = (), **tables: dict[str, Any]) -> Any:
        """A configuration for the target: float32, since half precision is emulated on many processors."""
        from pipeline.config import Config

        collect = {"sources": list(sources), "redaction": "none", "consent": "allow_all"}
        shares = {"validation_share": 0.12, "gate_share": 0.2}
        told = {
            "root": root,
            "target": {"model": self.target, "dtype": "float32", "max_model_len": 512},
            "drafter": {
                "block_size": 4 if self.small else 8,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": self.layers,
            },
            "collect": {**collect, **shares},
            "regenerate": {"rows_per_part": 64, "max_reject_share": 0.2, "temperature": 0.0},
            "evaluate": {
                "early_stop": False,
                "concurrency": 16,
                "blocks": 4,
                "general_prompts": 0,
                "max_prompts": 120,
                "max_repeat_share": 1.0 if self.on == "toy" else 0.5,  # a toy says little else
            },
            "serving": {"max_num_seqs": 16},
        }
        return Config.model_validate({name: {**told.get(name, {}), **tables.get(name, {})}
                                      if isinstance(told.get(name, {}), dict) else told[name]
                                      for name in {**told, **tables}})  # fmt: skip

    def mails(self) -> tuple[Any, Any]:
        """The mails' configuration, and what was captured of them."""
        from bench.oracles.captured import captured, write_requests
        from pipeline.workloads import support_mails

        wanted = 60 if self.small else MAILS
        requests = islice(support_mails.prompts(wanted, seed=MAILS_SEED), wanted)
        path = write_requests(self.work / f"mails-{wanted}.jsonl", requests)
        train = {"blocks_per_step": 64, "anchors_per_row": 16} if self.small else {"blocks_per_step": 256}
        config = self.config(self.work, [path], train=train)
        return config, captured(config, self.layers, num_threads=THREADS)

    def ground(self) -> tuple[Any, Any]:
        """What trainers are compared on: the captured mails, and the same rows as plain files."""
        from bench.oracles.captured import last_layer
        from bench.oracles.exported_rows import export
        from bench.oracles.trainer_speed import Ground
        from drafter.dataset import read_rows
        from drafter.families import read_target_shape
        from drafter.trainer import trainable_rows

        config, found = self.mails()
        last = last_layer(config, found, read_target_shape(self.target).num_layers - 1, num_threads=THREADS)
        rows = trainable_rows(read_rows(found.states, "train"), config.drafter.block_size)
        folder = self.work / "exported" / found.states.id
        if not (folder / "rows.json").exists():
            export(folder, rows, read_rows(last, "train"), hidden_size=found.states.manifest.hidden_size)
        longest = tuple(sorted((row.num_tokens for row in rows), reverse=True))
        return Ground(config, found.states.id, folder, self.work, THREADS, longest=longest), found


def speed(setting: Setting) -> dict[str, Figure]:
    """Trained blocks a second and peak memory against speculators in its fastest setting, in turns."""
    from bench.oracles.peer_environment import SPECULATORS
    from bench.oracles.trainer_speed import PRECISIONS, fastest, paced, raced, scanned

    ground, _ = setting.ground()
    tried = scanned(SPECULATORS, ground, small=setting.small)
    best = {dtype: one for dtype in PRECISIONS if (one := fastest(tried, dtype))}
    if not best:
        reason = f"no setting of speculators ran: {tried[0].why}"
        return {"speed_vs_speculators": unknown(reason), "memory_vs_speculators": unknown(reason)}
    paces = {dtype: max(one.blocks_per_s or 0 for one in tried if one.setting.dtype == dtype) for dtype in best}
    counts = max(paces, key=lambda dtype: paces[dtype])  # the peer's fastest precision on this machine
    figures, steps = {}, (1, 1) if setting.small else (6, 3)
    for dtype, one in best.items():
        for optimizer in ("muon", "adamw"):  # Muon is what both recommend, so it is what counts
            is_counted = (dtype, optimizer) == (counts, "muon")
            pairs = 2 if setting.small else 6 if is_counted else 3
            race = raced(SPECULATORS, ground, one, optimizer=optimizer, pairs=pairs, steps=steps)
            ratio, memory = median(race.ratios), race.memory()
            note = {"on": f"{setting.on}, {dtype}, {optimizer}", "peer": str(one)}
            name = "" if is_counted else f".{dtype}_{optimizer}"
            speed_note, memory_note = {**note, **race.note()}, {**note, **memory}
            share = memory_note.pop("ratio")
            figures |= {
                f"speed_vs_speculators{name}": (at_least(ratio, 2.0, **speed_note, tried=[t.told() for t in tried])
                                                if is_counted else shown(ratio, **speed_note)),
                f"memory_vs_speculators{name}": (at_most(share, 0.7, **memory_note)
                                                 if is_counted else shown(share, **memory_note)),
            }  # fmt: skip
    sampled = {"compute": counts, "optimizer": "muon", "sampled_vocabulary": 64 if setting.small else 2048}
    pace = paced(ground, turns=2, **sampled)
    return figures | {"speed.sampled_vocabulary": shown(pace, on=f"{setting.on}, ours alone", **sampled)}


def speed_specforge(setting: Setting) -> dict[str, Figure]:
    """The same against SpecForge's model, strategy, backend and optimiser, which has AdamW alone."""
    from bench.oracles.peer_environment import SPECFORGE
    from bench.oracles.trainer_speed import PRECISIONS, fastest, raced, scanned

    ground, _ = setting.ground()
    tried = scanned(SPECFORGE, ground, small=setting.small)
    figures = {}
    for dtype in PRECISIONS:
        one = fastest(tried, dtype)
        if one is None:
            figures[f"speed_vs_specforge.{dtype}"] = unknown(
                next(t.why for t in tried if t.setting.dtype == dtype and t.why)
            )
            continue
        pairs, steps = (2, (1, 1)) if setting.small else (6, (6, 3))
        race = raced(SPECFORGE, ground, one, optimizer="adamw", pairs=pairs, steps=steps)
        note, memory = {"on": f"{setting.on}, {dtype}, adamw", "peer": str(one)}, race.memory()
        share = memory.pop("ratio")
        figures[f"speed_vs_specforge.{dtype}"] = at_least(median(race.ratios), 2.0, **note, **race.note())
        figures[f"memory_vs_specforge.{dtype}"] = at_most(share, 0.7, **note, **memory)
    return figures


def acceptance_at_equal_time(setting: Setting) -> dict[str, Figure]:
    """Served accepted drafts a step after the same seconds, ours over speculators' recommended DFlash recipe."""
    from bench.oracles.equal_time import Held, Side, final, tuned
    from bench.oracles.peer_environment import SPECULATORS
    from bench.oracles.served_pairs import accepted_per_step, accepted_ratio, checkpoint, served
    from bench.oracles.trainer_speed import fastest_of_all, with_train
    from drafter.dataset import read_rows
    from drafter.frozen import read_frozen
    from drafter.start import new_drafter
    from drafter.trainer import trainable_rows

    ground, found = setting.ground()
    frozen = read_frozen(setting.target)
    block = ground.config.drafter.block_size
    held = Held(
        read_rows(found.states, "validation"),
        frozen,
        new_drafter(ground.config, frozen).shape,
        trainable_rows(read_rows(found.states, "train"), block)[:3],
    )
    peer = fastest_of_all(SPECULATORS, ground, small=setting.small)
    ground = with_train(ground, anchors_per_row=SMALL_STEPS["anchors_per_row"])
    vocabulary = 64 if setting.small else SMALL_STEPS["sampled_vocabulary"]
    # The peer has neither.
    fast = with_train(ground, sampled_vocabulary=vocabulary, muon_turns=SMALL_STEPS["muon_turns"])
    sides = (Side("ours", fast, held, None), Side("speculators", ground, held, peer))
    rates, batches = ((2e-3,), (64,)) if setting.small else ((4e-3, 8e-3, 1.6e-2, 3.2e-2), (32, 64))
    trials = {side.name: tuned(side, rates=rates, batches=batches, seconds=setting.trial_seconds) for side in sides}
    ratios, lows, notes, same = [], [], [], 1.0
    for seed in range(setting.seeds):
        ours, theirs = (final(side, trials[side.name][0], seconds=setting.seconds, seed=seed) for side in sides)
        drafters = {"champion": checkpoint(theirs.folder), "challenger": checkpoint(ours.folder)}
        rows = served(ground.config, drafters, found.responses)
        interval = accepted_ratio(rows, "challenger", "champion")
        ratios.append(interval.ratio)
        lows.append((interval.low, interval.high) if interval.is_known else None)
        same = min(same, theirs.same_drafts)
        accepted = {role: round(accepted_per_step(rows, role), 3) for role in drafters}
        notes.append({"seed": seed, "ours": ours.told(), "theirs": theirs.told(), "served": accepted})
    note = {
        "on": f"{setting.on}, {setting.seconds:g} s, Muon; ours with a sampled vocabulary and matrices in turns",
        "peer": str(peer),
        "n": setting.seeds,
        "intervals": lows,
        "runs": notes,
    }
    note["trials"] = {name: [run.told() for run in runs] for name, runs in trials.items()}
    is_told = all(map(isfinite, ratios))
    return {
        "acceptance_at_equal_time": at_least(median(ratios), 1.3, **note, ratios=ratios)
        if is_told
        else unknown("too short a run: a drafter has no draft accepted") | note,
        "acceptance_at_equal_time.same_drafts_converted": at_least(same, 0.999, on="float32, both forward passes"),
    }


def on_policy_vs_uniform(setting: Setting) -> dict[str, Figure]:
    """Walked accepted drafts a step on held-out rows: on-policy anchors over uniform ones, three seeds."""
    from bench.oracles.anchors_compared import compared

    config, found = setting.mails()
    steps = 6 if setting.small else 200
    update = {"steps": steps} if setting.small else {"steps": steps, "learning_rate": 8e-3, **SMALL_STEPS}
    train = config.train.model_copy(update=update)
    runs = compared(config.model_copy(update={"train": train}), found.states, seeds=range(max(3, setting.seeds)))
    figures = {}
    for name in ("on_policy", "on_policy_equal_time"):
        ratios = [
            a.accepted / b.accepted if b.accepted else 1.0 for a, b in zip(runs[name], runs["uniform"], strict=True)
        ]
        note = {"smallest": min(ratios), "largest": max(ratios), "n": len(ratios), "steps": steps}
        note["accepted"] = {key: [round(run.accepted, 4) for run in those] for key, those in runs.items()}
        note["seconds"] = {key: [round(run.seconds, 1) for run in those] for key, those in runs.items()}
        at = "equal_time" if name.endswith("time") else "equal_steps"
        figures[f"on_policy_vs_uniform.{at}"] = shown(mean(ratios), on=setting.on, **note)
    return figures


def four_workloads(setting: Setting) -> dict[str, Figure]:
    """Challengers over the general champion and over a control of the same budget, served on held-out prompts."""
    from bench.oracles.four_workloads import Budget, general_champion, more_general, won, workload_files

    root = setting.work / "four"
    budget = Budget(48, 48, 24, 80, 8, 2e-3, 1e-3) if setting.small else Budget(400, 300, 96, 800, 320, 8e-3, 2e-3)
    train = {"blocks_per_step": 64, "checkpoint_every": 4} if setting.small else {**SMALL_STEPS, "checkpoint_every": 50}
    evaluate = {"early_stop": False, "concurrency": 16, "blocks": 1, "general_prompts": 4 if setting.small else 64,
                "max_tokens": budget.max_tokens}  # fmt: skip
    target = {"model": setting.target, "dtype": "float32", "max_model_len": 512 if setting.small else 1024}
    config = setting.config(root, train=train, evaluate=evaluate, target=target)
    files = workload_files(root, budget, setting.prompts)
    wanted = setting.workloads or tuple(files)
    if unknown_names := set(wanted) - set(files):
        raise SystemExit(f"--workloads {sorted(unknown_names)}: there are {sorted(files)}")
    states, champion = general_champion(config, budget, threads=THREADS)
    more = more_general(config, budget, threads=THREADS)
    found = {name: won(config, budget, files[name], (states, more), champion, threads=THREADS) for name in wanted}
    figures = {}
    for name, one in found.items():
        note = {"on": f"{setting.on}, {name}", "accepted_per_step": one.accepted}
        figures[f"four_workloads.{name}"] = above_one(one.over_champion, **note)
        figures[f"four_workloads.{name}.over_control"] = above_one(one.over_control, **note)
    ratios = {name: one.over_champion.ratio for name, one in found.items() if one.over_champion.is_known}
    note = {"on": setting.on, "ratios": ratios, "n": len(found)}
    won_much = sum(ratio >= 1.2 for ratio in ratios.values())
    figures["four_workloads.at_1.2"] = at_least(won_much, 2, **note)
    general = {name: one.general for name, one in found.items() if one.general.is_known}
    if not general:
        return figures | {"four_workloads.general_fall": unknown("no draft was accepted on general prompts")}
    worst = min(general, key=lambda name: general[name].ratio)
    note = {"low": general[worst].low, "high": general[worst].high, "n": general[worst].num_clusters}
    note["ratios"] = {name: interval.ratio for name, interval in general.items()}
    fall = at_most(1 - general[worst].ratio, 0.03, on=f"{setting.on}, {worst}", **note)
    return figures | {"four_workloads.general_fall": fall}


def above_one(interval: Any, **note: Any) -> Figure:
    """The lower end of a ratio's interval, which must be above 1."""
    if not interval.is_known:
        return unknown("too few drafts accepted to tell a ratio") | note
    ends = {"ratio": interval.ratio, "low": interval.low, "high": interval.high, "n": interval.num_clusters}
    return above(interval.low, 1.0, **note, **ends)


def resume_identical(setting: Setting) -> dict[str, Figure]:
    """Runs killed at random steps and gone on with: tensors and curves that differ from an uninterrupted run's."""
    from bench.oracles.resumed_runs import resumed_at_random_steps

    config, states = toy_training(setting.work / "resume", steps=24, checkpoint_every=4)
    count = 2 if setting.small else 5
    found = resumed_at_random_steps(setting.work / "resume" / "runs", config, states, count=count, seed=setting.seeds)
    note = {"on": "toy", **found}
    return {
        "resume_identical.different_tensors": at_most(found["different_tensors"], 0, **note),
        "resume_identical.different_curves": at_most(found["different_curves"], 0, **note),
    }


def two_uneven_workers(setting: Setting) -> dict[str, Figure]:
    """Two processes on gloo over uneven, too short and empty rows: do both finish, with equal step counts?"""
    from bench.oracles.two_workers import uneven_workers

    config, states = toy_training(
        setting.work / "workers", steps=8, checkpoint_every=4, blocks_per_step=24, compute="float32"
    )
    figures = {}
    for parallel, found in uneven_workers(setting.work / "workers" / "runs", config, states).items():
        difference = found.get("largest_difference")
        equal = found["finished"] == 2 and len(set(found["steps"])) == 1
        figures[f"two_uneven_workers.{parallel}"] = at_least(int(equal), 1, on="toy, gloo", **found)
        figures[f"two_uneven_workers.{parallel}.difference"] = (
            unknown("a worker did not finish") if difference is None else at_most(difference, 1e-4, on="toy, gloo")
        )
    return figures


def float64_vs_reference(setting: Setting) -> dict[str, Figure]:
    """Largest difference of loss and gradients from the dense reference, over every kind of drafter."""
    from bench.oracles.every_variant import largest_differences

    found = largest_differences()
    worst = max(found, key=lambda name: found[name])
    return {"float64_vs_reference": at_most(found[worst], 1e-9, on="toys", n=len(found), worst=worst)}


def toy_training(root: Path, **train: Any) -> tuple[Any, Any]:
    """A toy target's configuration and cache, for runs of the trainer alone."""
    import shutil

    import toys

    shutil.rmtree(root, ignore_errors=True)
    toys.target_folder(root / "target")
    rows = [("train", toys.counting_row(3 * i, 14 + i % 7, 3, name=f"row-{i}")) for i in range(12)]
    rows += [("validation", toys.counting_row(5 * i + 1, 16, 3, name=f"held-{i}")) for i in range(3)]
    return toys.config(root, patience=None, **train), toys.cache(root, rows)


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f
    for f in (
        float64_vs_reference,
        resume_identical,
        two_uneven_workers,
        speed,
        speed_specforge,
        acceptance_at_equal_time,
        on_policy_vs_uniform,
        four_workloads,
    )
}


def setting_of(arguments: argparse.Namespace) -> Setting:
    """The real target where there is one, else a toy."""
    from drafter.families import read_target_shape
    from drafter.shape import spread_layers

    work = (arguments.work or ROOT / "runs" / "bench" / ("train-small" if arguments.small else "train")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    target = arguments.target or (None if arguments.small or not DEMO_TARGET.exists() else DEMO_TARGET)
    is_toy = target is None
    if is_toy:
        from tiny import TARGET_LAYER_IDS, tiny_target

        target = work / "toy-target"
        layers, mask, on = TARGET_LAYER_IDS, 2, "toy"
        if not target.exists():
            tiny_target(target, favourite=FAVOURITE)
    else:
        layers, mask, on = spread_layers(read_target_shape(target).num_layers), arguments.mask_token_id, target.name
    small = arguments.small or is_toy
    return Setting(
        small,
        target.resolve(),
        tuple(layers),
        mask,
        on,
        work,
        tuple(path.resolve() for path in arguments.prompts),
        arguments.seconds or (4.0 if small else 240.0),
        arguments.trial_seconds or (2.0 if small else 40.0),
        arguments.seeds,
        tuple(arguments.workloads),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--target", type=Path, help="the target's folder; without it the demo's, else a toy")
    parser.add_argument("--mask-token-id", type=int, default=15, help="a token of it that never occurs (15)")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="files of outside prompts, a workload each")
    parser.add_argument("--workloads", nargs="+", default=[], help="some of the workloads alone")
    parser.add_argument("--work", type=Path, help="what is installed, captured and trained is kept here")
    parser.add_argument("--seconds", type=float, help="of each run at equal time (240)")
    parser.add_argument("--trial-seconds", type=float, help="of each run that tunes it (40)")
    parser.add_argument("--seeds", type=int, default=1, help="runs at equal time")
    arguments = parser.parse_args(argv)
    from jobs.session import start_logging
    from jobs.target_engine import set_engine_environment

    set_engine_environment(num_threads=THREADS)
    os.environ["SLIPSTREAM_SPLIT_KEY"] = "the split key of the bench"
    start_logging()
    setting, figures = setting_of(arguments), {}
    for name in [arguments.only] if arguments.only else MEASURES:
        try:
            found = MEASURES[name](setting)
        except StageError as error:  # a peer that cannot be had, a worker that died: the others still count
            found = {name: unknown(str(error))}
        figures |= found
        print("\n".join(f"{key}: {one['value']}" for key, one in found.items()), file=sys.stderr, flush=True)
        (setting.work / f"{name}.json").write_text(json.dumps(found, indent=1))
    finish("train", figures)


if __name__ == "__main__":
    main()
