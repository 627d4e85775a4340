"""What do the target's answers and hidden states cost, are they right, and is a row ever lost?

python bench/capture.py                       every figure; on the real target where the demo has fetched it
python bench/capture.py --small               a quick form, on a toy
python bench/capture.py --only one_pass --target DIR
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.figures import Figure, at_least, at_most, finish, shown  # noqa: E402
from pipeline.workloads import support_mails  # noqa: E402

DEMO_TARGET = ROOT / "runs" / "targets" / "SmolLM2-135M-Instruct"
THREADS = len(os.sched_getaffinity(0))
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on."""

    small: bool
    target: Path
    layers: tuple[int, ...]
    on: str
    workdir: Path

    def config(self, root: Path, **tables: dict[str, Any]) -> Any:
        """A configuration for the target: float32, since half precision is emulated on many processors."""
        from pipeline.config import Config

        return Config.model_validate(
            {
                "root": root,
                "target": {"model": self.target, "dtype": "float32", "max_model_len": 512},
                "drafter": {
                    "block_size": 4,
                    "mask_token_id": 15 if self.on != "toy" else 2,
                    "target_layer_ids": self.layers,
                },
                "collect": {"redaction": "none", "consent": "allow_all"},
                **tables,
            }
        )

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of its engines."""
        return {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 64, "num_threads": THREADS}


def one_pass(setting: Setting) -> dict[str, Figure]:
    """Answering with the states kept, against answering alone, and against answering and then reading it all again."""
    from bench.oracles.one_engine import answer, engine_process, read

    pairs, mails = (2, 16) if setting.small else (5, 48)
    plain_speed, passes, checks, tokens = [], [], [], 0
    with ExitStack() as stack:
        plain = stack.enter_context(engine_process(setting.target, **setting.engine))
        keeping = stack.enter_context(engine_process(setting.target, target_layer_ids=setting.layers, **setting.engine))
        for pair in range(pairs + 1):  # the first warms up
            config = collected_config(setting, setting.workdir / f"pair-{pair}", mails, seed=pair)
            prompts = collected(config)
            taken = {}
            for name in ("alone", "kept") if pair % 2 else ("kept", "alone"):
                at = config.model_copy(update={"root": config.root / name})
                call, layers = (keeping, setting.layers) if name == "kept" else (plain, ())
                responses, taken[name], check = call(answer, at, prompts, layers)
                if name == "alone":
                    _, taken["read"] = keeping(read, at, responses, setting.layers)
                    num_alone = responses.manifest.counts["response_tokens"]
                else:
                    num_kept = responses.manifest.counts["response_tokens"]
                    checks.append(check)
            if pair:
                plain_speed.append((num_kept / taken["kept"]) / (num_alone / taken["alone"]))
                passes.append((taken["alone"] + taken["read"]) / num_alone * num_kept / taken["kept"])
                tokens += num_kept
    note = {"on": setting.on, "n": pairs, "tokens": tokens}
    return {
        "one_pass.against_plain": at_least(statistics.median(plain_speed), 0.97, **note, **spread(plain_speed)),
        "one_pass.against_two_passes": at_least(statistics.median(passes), 1.3, **note, **spread(passes)),
        "one_pass.check_seconds": shown(statistics.median(checks), on=setting.on, n=len(checks)),
    }


def states_against_reference(setting: Setting) -> dict[str, Figure]:
    """Largest relative error of a position's states at any layer, before they are rounded to bf16, in float32."""
    from bench.oracles.one_engine import check, engine_process
    from drafter.families import read_target_shape
    from pipeline.render import Renderer

    num_layers, num_prompts = read_target_shape(setting.target).num_layers, 4 if setting.small else 12
    renderer = Renderer(setting.target)
    prompts = [
        renderer.prompt_ids(mail["messages"])
        for mail in islice(support_mails.prompts(num_prompts, seed=7), num_prompts)
    ]
    with engine_process(
        setting.target, target_layer_ids=range(num_layers), check="reference", **setting.engine
    ) as engine:
        found = [engine(check, ids, prompts[:3]) for ids in prompts]
    note = {"on": setting.on, "n": num_prompts, "positions": sum(map(len, prompts)) - num_prompts}
    wrong = sum(one[f"layer_{layer}_nearest"] != layer for one in found for layer in range(num_layers))
    errors = {name: max(one[name] for one in found) for name in ("batched_error", "answered_error")}
    return {
        "states_against_reference.max_error": at_most(
            max(one[f"layer_{layer}_error"] for one in found for layer in range(num_layers)), 1e-4, **note
        ),
        "states_against_reference.wrong_layers": at_most(wrong, 0, **note),
        "states_against_reference.batched_error": at_most(errors["batched_error"], 1e-4, **note),
        "states_against_reference.answered_error": at_most(errors["answered_error"], 1e-4, **note),
    }


def states_files(setting: Setting) -> dict[str, Figure]:
    """Writing states against plain files of the same bytes; reading them into torch against a copy in memory."""
    from bench.oracles.state_files import copied, rows_of_words, written

    rows = rows_of_words(16 if setting.small else 64, 512)
    write, read = written(rows, setting.workdir, pairs=7), copied(rows, setting.workdir / "read", pairs=7)
    note = {"on": f"{read['mb']:.0f} MB", "n": 7}
    return {
        "states_files.write_ratio": at_least(write["ratio"], 0.5, **note, spread=write["spread"]),
        "states_files.hash_mb_per_s": shown(write["hash_mb_per_s"], **note),
        "states_files.judge_mb_per_s": shown(write["judge_mb_per_s"], **note),
        "states_files.read_ratio": at_least(read["ratio"], 0.5, **note, spread=read["spread"]),
        "states_files.fresh_read_ratio": shown(read["fresh_ratio"], **note),
        "states_files.mapped_ms": shown(read["mapped_ms"], **note),
    }


def eight_bit(setting: Setting) -> dict[str, Figure]:
    """Bytes of the 8-bit form against bf16, and accepted drafts a step of the same training on either."""
    from bench.oracles.eight_bit import rewritten, states_bytes, trained, walked
    from bench.oracles.one_engine import answer, engine_process, read

    mails, steps = (48, 20) if setting.small else (200, 160)
    training = {
        "steps": steps,
        "blocks_per_step": 128,
        "optimizer": "adamw",
        "learning_rate": 4e-3,
        "sampled_vocabulary": 2048 if setting.on != "toy" else None,
        "checkpoint_every": steps,
        "walk_rows": 16,
    }
    config = collected_config(setting, setting.workdir / "eight", mails, seed=50, train=training)
    with engine_process(setting.target, target_layer_ids=setting.layers, **setting.engine) as engine:
        responses, _, _ = engine(answer, config, collected(config), setting.layers)
        words, _ = engine(read, config, responses, setting.layers)
    codes = rewritten(config, words, "int8")
    start = trained(config, words, start=None, seed=SEEDS[-1] + 1)
    # As the loop trains: from a champion, at a smaller rate than a cold start's.
    config = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": 1e-3})})
    accepted = [
        [walked(config, trained(config, states, start=start, seed=seed), words) for seed in SEEDS]
        for states in (words, codes)
    ]
    ratios = [eight / full for full, eight in zip(*accepted, strict=True)]
    note = {"on": setting.on, "n": len(SEEDS), "bf16": accepted[0], "int8": accepted[1], "ratios": ratios}
    note["start"] = walked(config, start, words)
    return {
        "eight_bit.bytes": at_most(states_bytes(codes) / states_bytes(words), 0.53, on=setting.on),
        "eight_bit.accepted_change": at_most(abs(sum(accepted[1]) / sum(accepted[0]) - 1), 0.02, **note),
        "eight_bit.largest_change": shown(max(abs(ratio - 1) for ratio in ratios), on=setting.on, n=len(SEEDS)),
    }


def killed(setting: Setting) -> dict[str, Figure]:
    """Kill -9 at random moments, and again to the end: rows lost or twice, finished files touched, other ids."""
    from bench.oracles.killed_runs import killed_runs

    kills, seed = 3 if setting.small else 20, random.randrange(2**32)
    folder = setting.workdir / "killed"
    config = collected_config(setting, folder, 40, seed=90)
    found = killed_runs(
        folder, target=setting.target, layers=setting.layers, mails=config.collect.sources[0], kills=kills, seed=seed
    )
    note = {"on": setting.on, "n": found["kills"], "amid_parts": found["amid"], "rounds": found["rounds"], "seed": seed}
    return {f"killed.{name}": at_most(found[name], 0, **note) for name in ("missing", "twice", "touched", "other_ids")}


def killed_replica(setting: Setting) -> dict[str, Figure]:
    """One replica of two killed in the middle: rows without a response or states, and retries that were counted."""
    from bench.oracles.killed_replica import killed_replica

    config = collected_config(setting, setting.workdir / "replica", 40, seed=80)
    config = config.model_copy(update={"regenerate": config.regenerate.model_copy(update={"rows_per_part": 4})})
    found = killed_replica(config, collected(config), setting.layers)
    note = {"on": setting.on, "n": found["rows"]}
    wrong = sum(found[f"{kind}_{fault}"] for kind in ("responses", "states") for fault in ("missing", "twice"))
    return {
        "killed_replica.rows_missing_or_twice": at_most(wrong, 0, **note, **found),
        "killed_replica.retries_counted": at_least(found["retries"], 1, **note),
    }


def streamed(setting: Setting) -> dict[str, Figure]:
    """A corpus five times its budget of disk, trained on to its end while its states are captured."""
    from bench.oracles.streamed import streamed

    training = {"steps": 1000, "blocks_per_step": 64, "optimizer": "adamw", "walk_rows": 4}
    config = collected_config(setting, setting.workdir / "streamed", 80, seed=70, train=training)
    update = {
        "regenerate": config.regenerate.model_copy(update={"rows_per_part": 2}),
        "collect": config.collect.model_copy(update={"validation_share": 0.05, "gate_share": 0.03}),
    }
    config = config.model_copy(update=update)
    found = streamed(config, collected(config), setting.layers, times=5)
    note = {"on": setting.on, "n": found["planned_rows"], **found}
    return {
        "streamed.untrained_rows": at_most(
            found["planned_rows"] - found["trained_rows"] - found["rejected_rows"], 0, **note
        ),
        "streamed.corpus_over_budget": at_least(found["times"], 5, **note),
        "streamed.most_mb_over_budget": at_most(found["most_mb"] - found["budget_mb"], found["shard_mb"], **note),
    }


def collected_config(setting: Setting, root: Path, mails: int, *, seed: int, **tables: dict[str, Any]) -> Any:
    """A configuration whose traffic is mails to the shop, no two settings sharing one."""
    from bench.oracles.real_gates import mails as write_mails

    root.mkdir(parents=True, exist_ok=True)
    path = write_mails(root / "mails.jsonl", mails, seed=1000 + seed)
    collect = {"sources": [path], "redaction": "none", "consent": "allow_all"}
    regenerate = {"max_tokens": 48, "rows_per_part": mails, "max_reject_share": 0.2}
    return setting.config(root, **{"collect": collect, "regenerate": regenerate, **tables})


def collected(config: Any) -> Any:
    """Its prompts."""
    from pipeline import collect

    return collect.run(config)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Smallest and largest of the pairs."""
    return {"smallest": min(values), "largest": max(values)}


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f
    for f in (one_pass, states_against_reference, states_files, eight_bit, killed, killed_replica, streamed)
}


def setting_of(arguments: argparse.Namespace, workdir: Path) -> Setting:
    """The real target where there is one, else a toy."""
    from drafter.families import read_target_shape
    from drafter.shape import spread_layers

    target = arguments.target or (None if arguments.small or not DEMO_TARGET.exists() else DEMO_TARGET)
    if target:
        layers = spread_layers(read_target_shape(target).num_layers)
        return Setting(arguments.small, target, layers, target.name, workdir)
    from tests.tiny import TARGET_LAYER_IDS, tiny_target

    return Setting(arguments.small, tiny_target(workdir / "tiny"), TARGET_LAYER_IDS, "toy", workdir)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--target", type=Path, help="the target's folder; without it the demo's, else a toy")
    arguments = parser.parse_args(argv)
    from jobs.target_engine import set_engine_environment

    set_engine_environment(num_threads=THREADS)
    os.environ["SLIPSTREAM_SPLIT_KEY"] = "the split key of the bench"
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as workdir:
        setting = setting_of(arguments, Path(workdir))
        for name in [arguments.only] if arguments.only else MEASURES:
            figures |= (found := MEASURES[name](setting))
            print("\n".join(f"{key}: {one['value']}" for key, one in found.items()), file=sys.stderr, flush=True)
    finish("capture", figures)


if __name__ == "__main__":
    main()
