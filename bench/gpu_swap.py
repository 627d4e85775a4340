"""How long does a swap pause a server on a GPU, and does the swapped-in drafter accept what a fresh start's does?

python bench/gpu_swap.py                                       toys; eager, and with CUDA graphs
python bench/gpu_swap.py --target DIR --drafter DIR --drafter DIR
python bench/gpu_swap.py --small                               the same code on the CPU build, eager alone

With CUDA graphs the serving drafter's own storage is written, which no replica does unasked: a pass of this bench on
your cards and your vLLM is the proof that SLIPSTREAM_SWAP_UNPROVEN=1 asks for.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.figures import Figure, at_most, finish, shown, unknown  # noqa: E402

PAUSE_S = 0.25
CLIENTS, PROBES = 8, 8
KINDS = {"eager": {"enforce_eager": True}, "graphs": {"enforce_eager": False}}
_ON_CPU = {"env": {"OMP_NUM_THREADS": "1"}, "extra_args": ("--kv-cache-memory-bytes", str(64 << 20))}
_ON_GPU = {"env": {"SLIPSTREAM_SWAP_UNPROVEN": "1"}, "extra_args": ("--gpu-memory-utilization", "0.6")}


def measured(name: str, workdir: Path, *, swaps: int, on_gpu: bool, **server: Any) -> dict[str, Figure]:
    """Pause, failures, and acceptance against a server that was started with the drafter, of one kind of engine."""
    from bench.oracles.many_swaps import percentile
    from bench.oracles.swap_under_load import prompts
    from bench.oracles.swapped_server import swapped_server
    from serving.load import Driver
    from serving.replica import run_probe

    settings = KINDS[name] | (_ON_GPU if on_gpu else _ON_CPU) | {"served_name": "target"}
    asked = prompts("target", count=16, max_tokens=64)
    outcomes = []
    with swapped_server(workdir / "swapped", clients=CLIENTS, **settings, **server) as swapped:
        with Driver(swapped.server.base_url, asked, concurrency=CLIENTS) as driver:
            driver.wait_for(len(asked))
            for i in range(swaps):
                old, new = ("1", "2") if i % 2 == 0 else ("2", "1")
                outcomes.append(swapped.swap(old, new, probe=asked[:PROBES], allow_changed_outputs=True))
                driver.wait_for(len(driver.replies) + CLIENTS)
            replies = driver.stop()
        target, folders = swapped.target, swapped.folders
    started = swapped_server(
        workdir / "started", clients=CLIENTS, target=target, drafters=[folders["2"], folders["1"]], **settings
    )
    with started as fresh:
        expected = run_probe(fresh.server.base_url, asked[:PROBES])
    pauses = sorted(outcome.pause_s for outcome in outcomes)
    ratio = outcomes[0].after.acceptance_length / expected.acceptance_length
    pause = percentile(pauses, 0.99)
    note = {"n": swaps, "median": percentile(pauses, 0.5), "how": outcomes[0].how}
    return {
        f"gpu_swap.{name}.pause_p99_s": at_most(pause, PAUSE_S, **note) if on_gpu else shown(pause, **note),
        f"gpu_swap.{name}.failed_requests": at_most(sum(not reply.ok for reply in replies), 0, n=len(replies)),
        f"gpu_swap.{name}.acceptance_off_a_fresh_start": at_most(
            abs(ratio - 1), 0.01, on=f"acceptance length {expected.acceptance_length:.3f} started with the drafter"
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON; null where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few swaps, on any processor")
    parser.add_argument("--target", type=Path, help="a target's folder; without it toys")
    parser.add_argument("--drafter", type=Path, action="append", default=[], help="two of its drafters' folders")
    arguments = parser.parse_args(argv)
    if bool(arguments.target) != (len(arguments.drafter) == 2):
        parser.error("--target comes with two --drafter")
    on_gpu = torch.cuda.is_available()
    server = {"target": arguments.target, "drafters": arguments.drafter} if arguments.target else {}
    figures: dict[str, Figure] = {}
    for name in KINDS:
        if on_gpu or (arguments.small and name == "eager"):
            with tempfile.TemporaryDirectory() as work:
                swaps = 4 if arguments.small else 40
                figures |= measured(name, Path(work), swaps=swaps, on_gpu=on_gpu, **server)
        else:
            figures |= {
                f"gpu_swap.{name}.{what}": unknown("no GPU") for what in ("pause_p99_s", "acceptance_off_a_fresh_start")
            }
    finish("gpu_swap", figures)


if __name__ == "__main__":
    main()
