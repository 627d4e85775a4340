"""Real gates whose right verdict is known: a drafter against its twin, through `slipstream compare` and a real vLLM.

The twin's weights are the drafter's own but for the last bit of one number, so that it is really swapped in and
accepts what the drafter accepts: every promotion of it is wrong.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def twin(drafter: Path, folder: Path) -> Path:
    """A drafter folder that differs from the first in the last bit of one weight."""
    folder.mkdir(parents=True)
    shutil.copyfile(drafter / "config.json", folder / "config.json")
    tensors = load_file(drafter / "model.safetensors")
    weight = tensors["fc.weight"]
    words = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32).view(-1)
    words[0] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mails(path: Path, count: int, *, seed: int) -> Path:
    """A file of prompts: the shop's mails, one a conversation."""
    from pipeline.workloads import support_mails

    lines = (json.dumps(mail) for mail in islice(support_mails.prompts(count, seed=seed), count))
    path.write_text("\n".join(lines) + "\n")
    return path


def compared(
    target: Path, first: Path, second: Path, prompts: Path, out: Path, settings: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Report and decision of `slipstream compare first second`."""
    from jobs import compare

    arguments = argparse.Namespace(target=target, policy=None, server=None, out=out, overrides=list(settings))
    return compare.run(compare.config_of(arguments), str(first), str(second), [prompts])


def aa_gates(
    target: Path, drafter: Path, workdir: Path, *, gates: int, prompts: int, settings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The verdict of each gate of a drafter against its twin, each on prompts of its own."""
    other = twin(drafter, workdir / "twin")
    for number in range(gates):
        path = mails(workdir / f"mails-{number}.jsonl", prompts, seed=100 + number)
        report, decision = compared(target, drafter, other, path, workdir / f"gate-{number}", settings)
        manifest = decision.manifest
        yield {
            "decision": manifest.decision,
            **{name: getattr(manifest, name) for name in ("lift", "ci_low", "ci_high")},
            "prompts": report.manifest.counts["prompts"],
            "tokens_per_s": {role: one["tokens_per_s"] for role, one in report.manifest.measured.items()},
        }


def record(
    target: Path, champion: Path, challenger: Path, path: Path, workdir: Path, *, prompts: int
) -> dict[str, Any]:
    """Write the counts of a real comparison (schemas.ACCEPTANCE) to ``path``, and return what was measured."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    asked = mails(workdir / "mails.jsonl", prompts, seed=50)
    settings = (
        "evaluate.early_stop=false",
        "evaluate.general_prompts=0",
        "evaluate.concurrency=16",
        "evaluate.max_tokens=48",
        "target.dtype=float32",
        "target.max_model_len=512",
        "serving.max_num_seqs=16",
    )
    report, _ = compared(target, champion, challenger, asked, workdir / "out", settings)
    table = pq.read_table(report.folder / "acceptance.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Gaps between tokens are most of the bytes, and no simulation reads them.
    column = table.schema.get_field_index("itl_s")
    empty = pa.array([[]] * table.num_rows, type=table.schema.field(column).type)
    table = table.set_column(column, table.schema.field(column), empty)
    pq.write_table(table, path, compression="zstd")
    return report.manifest.measured


def main() -> None:
    """``python -m bench.oracles.real_gates TARGET CHAMPION CHALLENGER OUT.parquet``: make the committed records."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("target", "champion", "challenger", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--workdir", type=Path, default=Path("runs/records"))
    arguments = parser.parse_args()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    from jobs.session import start_logging

    start_logging()
    measured = record(
        arguments.target,
        arguments.champion,
        arguments.challenger,
        arguments.out,
        arguments.workdir,
        prompts=arguments.prompts,
    )
    for role, one in measured.items():
        print(role, one["served_acceptance_length"], one["emitted_tokens_per_step"], one["tokens_per_s"])


if __name__ == "__main__":
    main()
