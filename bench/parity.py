"""Does the trainer run the drafter that vLLM serves, and does serving change no answer?

python bench/parity.py                              every figure; the real target and the demo's drafter where present
python bench/parity.py --small                      the same on a toy target, in a few minutes
python bench/parity.py --only losslessness --target DIR --drafter DIR
"""

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "drafter")]  # toys

from bench.figures import Figure, above, at_least, at_most, finish, unknown  # noqa: E402

FAVOURITE = 433  # a token that the toy target says often, and that the toy drafter proposes


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on."""

    small: bool
    target: Path | None  # None: a toy
    drafter: Path | None
    champion: Path | None  # the demo's first drafter, to swap from
    why_toy: str | None
    demo: Path
    workdir: Path

    @property
    def note(self) -> dict[str, str]:
        """Where a figure comes from."""
        return {"on": self.target.name if self.target else f"toy ({self.why_toy})"}


def training_step_vs_reference(setting: Setting) -> dict[str, Figure]:
    """Largest difference of loss and gradients of one training step from the plain reference, in float64."""
    import torch
    import toys

    from bench.oracles import plain_reference as plain
    from drafter.deal import Deal
    from drafter.loss import decay_weights, dpace_weights
    from drafter.step import backward

    differences = []
    for slot_weights, weigh in ((dpace_weights(0.5), plain.dpace(0.5)), (decay_weights(4), plain.decay(1.75))):
        model, frozen = toys.drafter(), toys.frozen()
        rows = [toys.row(18, 3, seed=1), toys.row(10, 5, seed=2), toys.row(13, 2, seed=3)]
        anchors = [[3, 6, 14], [5], [2, 9]]
        deals = [Deal(row, torch.tensor(some), 1.0) for row, some in zip(rows, anchors, strict=True)]
        found = backward(model, frozen, deals, slot_weights, normalizer=6, tokens_per_pass=20)
        weights = toys.weights_of(model)
        documents = [toys.document(row, some) for row, some in zip(rows, anchors, strict=True)]
        numbers = toys.numbers(model.shape)
        hidden = plain.draft_hidden(weights, numbers, documents, frozen.embedding, toys.MASK_TOKEN_ID)
        labels = torch.stack([row.ids[a + 1 : a + 4] for row, some in zip(rows, anchors, strict=True) for a in some])
        expected = plain.full_logit_loss(hidden, frozen.head, labels, weigh, 6)
        expected.backward()
        differences.append(abs(found.loss - float(expected.detach())))
        differences += [float((p.grad - weights[name].grad).abs().max()) for name, p in model.named_parameters()]
    return {"training_step_vs_reference": at_most(max(differences), 1e-9, n=len(differences))}


def draft_logits_vs_vllm(setting: Setting) -> dict[str, Figure]:
    """Every draft that vLLM's drafter makes against ours: same prompt, states and weights, float32."""
    from bench.oracles.real_drafts import Comparison, Recorder, close_engine, greedy, open_engine
    from drafter.checkpoint import load_drafter
    from drafter.frozen import read_frozen

    target, folder = setting.target or toy_target(setting), setting.drafter or toy_drafter(setting, proposes=None)
    model, _ = load_drafter(folder)
    frozen = read_frozen(target)
    recorder, comparison = Recorder(), Comparison()
    llm = open_engine(target, folder, num_draft_tokens=model.shape.num_draft_tokens)
    llm.collective_rpc(recorder.install)
    count = 4 if setting.small else 12
    for prompt_ids, stop_ids in prompts(setting, count):
        recorder.clear()
        greedy(llm, prompt_ids, max_tokens=32, stop_ids=stop_ids)
        comparison.add(recorder, model, frozen)
    del llm
    close_engine()
    note = setting.note | {"n": comparison.num_slots}
    return {
        "draft_logits_vs_vllm.same_argmax": at_least(comparison.num_same / comparison.num_slots, 0.999, **note),
        "draft_logits_vs_vllm.max_abs_difference": at_most(
            comparison.max_abs_difference, 1e-3, **note, largest_logit=comparison.largest_logit
        ),
    }


def losslessness(setting: Setting) -> dict[str, Figure]:
    """Greedy replies, one request at a time, float32: speculation on against off, token for token."""
    from bench.oracles.real_drafts import accepted_per_step, close_engine, greedy, open_engine

    target, folder = setting.target or toy_target(setting), setting.drafter or toy_drafter(setting, proposes=FAVOURITE)
    num_draft_tokens = json.loads((folder / "config.json").read_text())["block_size"] - 1
    asked = list(prompts(setting, 10 if setting.small else 50))
    replies, accepted = [], 0.0
    for drafter in (folder, None):
        llm = open_engine(target, drafter, num_draft_tokens=num_draft_tokens)
        replies.append([greedy(llm, ids, max_tokens=48, stop_ids=stop) for ids, stop in asked])
        if drafter:
            accepted = accepted_per_step(llm)
        del llm
        close_engine()
    equal = sum(a == b for a, b in zip(*replies, strict=True))
    tokens = sum(map(len, replies[1]))
    return {
        "losslessness": at_least(
            equal, len(asked), **setting.note, n=len(asked), num_tokens=tokens, accepted_per_step=round(accepted, 3)
        )
    }


def swap_under_load(setting: Setting) -> dict[str, Figure]:
    """Swaps of a running float32 server under four clients: pause, failed requests, changed greedy outputs."""
    from bench.oracles.swap_under_load import swap_under_load

    swaps = 1 if setting.small else 3
    real = {"target": setting.target, "drafters": [setting.champion, setting.drafter]} if setting.champion else {}
    found = swap_under_load(setting.workdir / "swap", swaps=swaps, port=free_port(), **real)
    pauses = found["pause_s"]
    note = {"on": setting.target.name if real else "toy", "n": found["num_replies"]}
    spread = max(pauses) - min(pauses)
    return {
        "swap_under_load.pause_s": at_most(max(pauses), 1.5, **note | {"n": len(pauses)}, spread=spread),
        "swap_under_load.failed_requests": at_most(found["failed_requests"], 0, **note),
        "swap_under_load.changed_outputs": at_most(found["changed_outputs"], 0, **note),
    }


def demo(setting: Setting) -> dict[str, Figure]:
    """The last demo's figures against what it must show."""
    path = setting.demo / "summary.json"
    if not path.exists():
        return {"demo": unknown(f"{path} is absent: run `make demo` first")}
    summary = json.loads(path.read_text())
    gate, swap = summary["gate"], summary["swap"]
    if swap is None:
        return {"demo": unknown(f"the gate said {gate['decision']}, so nothing was swapped")}
    served = {role: summary[role]["served_acceptance_length"] for role in ROLES if role in summary}
    figures = {
        "demo.acceptance_ratio": at_least(served["challenger"] / served["champion"], 1.3),
        "demo.ci_low": above(gate["ci_low"], 1.1),
        "demo.over_control": above(served["challenger"] / served["control"], 1.0)
        if "control" in served
        else unknown("the demo trained no control: set train.control = true"),
        "demo.seconds": at_most(summary["seconds"], 1200),
        "demo.swap_pause_s": at_most(swap["pause_s"], 1.5),
        "demo.swap_failed_requests": at_most(swap["failed_requests"], 0),
        "demo.swap_changed_outputs": at_most(swap["changed_outputs"], 0),
    }
    for role in ("challenger", "control"):
        figures[f"demo.walk_gap_{role}"] = walk_gap(summary.get(role))
    return figures


ROLES = ("champion", "challenger", "control")
MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f for f in (training_step_vs_reference, draft_logits_vs_vllm, losslessness, swap_under_load, demo)
}


def walk_gap(measured: dict[str, Any] | None) -> Figure:
    """Relative difference of accepted drafts a step, served against walked, both to the ends of the replies."""
    if not measured or measured.get("walk_gap") is None:
        return unknown("the demo has no walk of this drafter")
    return at_most(measured["walk_gap"], 0.05, n=measured["num_drafts"])


def prompts(setting: Setting, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, stop ids): shop mails through the chat template, or random ids for the toy."""
    if setting.target is None:
        import random

        rng = random.Random(7)
        for i in range(count):
            yield [0] + [rng.randrange(6, 512) for _ in range(4 + 7 * i % 60)], []
        return
    from transformers import AutoTokenizer

    from pipeline.workloads import support_mails

    tokenizer = AutoTokenizer.from_pretrained(setting.target)
    for mail in islice(support_mails.prompts(count, seed=3), count):
        ids = tokenizer.apply_chat_template(mail["messages"], add_generation_prompt=True, return_dict=False)
        yield list(ids), [tokenizer.eos_token_id]


def toy_target(setting: Setting) -> Path:
    """A random target that tests/tiny.py makes."""
    import tiny

    folder = setting.workdir / "toy-target"
    return folder if folder.exists() else tiny.tiny_target(folder, favourite=FAVOURITE)


def toy_drafter(setting: Setting, *, proposes: int | None) -> Path:
    """A random drafter, or one whose drafts are often accepted."""
    import tiny

    return tiny.tiny_drafter(setting.workdir / f"toy-drafter-{proposes}", toy_target(setting), proposes=proposes)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def setting_of(arguments: argparse.Namespace) -> Iterator[Setting]:
    """What to measure on: what was given, else the demo's target and challenger, else a toy and why."""
    target, drafter, champion, why = arguments.target, arguments.drafter, None, None
    demo = ROOT / "runs" / "demo"
    if (target is None) != (drafter is None):
        raise SystemExit("--target and --drafter belong together: a drafter is of one target")
    if target is None and arguments.small:
        why = "--small"
    elif target is None:
        target = ROOT / "runs" / "targets" / "SmolLM2-135M-Instruct"
        names = json.loads((demo / "current.json").read_text()) if (demo / "current.json").exists() else {}
        found = names.get("challenger") or names.get("champion")
        drafter = demo / "drafters" / found if found else None
        champion = next((demo / "versions").glob("*/1"), None) if names.get("challenger") else None
        if not (target / "config.json").exists() or drafter is None or not (drafter / "config.json").exists():
            target, drafter, champion, why = (
                None,
                None,
                None,
                "no target and drafter under runs/: run `make demo`, or give both",
            )
    with tempfile.TemporaryDirectory() as workdir:
        yield Setting(arguments.small, target, drafter, champion, why, demo, Path(workdir))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--target", type=Path, help="target folder")
    parser.add_argument("--drafter", type=Path, help="drafter folder, in the z-lab layout")
    arguments = parser.parse_args(argv)
    from jobs.target_engine import set_engine_environment

    set_engine_environment(num_threads=len(os.sched_getaffinity(0)))
    figures: dict[str, Figure] = {}
    with setting_of(arguments) as setting:
        for name in [arguments.only] if arguments.only else MEASURES:
            figures |= MEASURES[name](setting)
    finish("parity", figures)


if __name__ == "__main__":
    main()
