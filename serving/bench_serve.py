"""vLLM's own load generator, ``vllm bench serve``, on exact token ids: a ruler that others have too.

It runs in a process of its own, one for many runs, since importing it takes many seconds; the console script is no
way in, as it fails under the CPU package. That process reads the arguments of one run a line, as a JSON list, and
answers each with a JSON line:

    python -m serving.bench_serve
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from serving.engine.versions import require_supported_vllm
from serving.errors import LoadError

CHECKOUT = Path(__file__).resolve().parents[1]
# Of its result; the generated texts never leave its memory.
_KEPT = (
    "completed",
    "failed",
    "duration",
    "total_output_tokens",
    "output_throughput",
    "ttfts",
    "itls",
    "errors",
    "spec_decode_num_drafts",
    "spec_decode_accepted_tokens",
    "spec_decode_acceptance_length",
)


@dataclass(frozen=True)
class Load:
    """One run. ``figures`` are the load generator's own, under its own names."""

    num_requests: int
    num_tokens: int
    """Emitted, by the server's own count."""
    wall_s: float
    ttft_s: list[float]
    """To the first tokens of every request."""
    itl_s: list[float]
    """Gaps between the arrivals of all requests; a step's tokens arrive together."""
    num_drafts: int
    """0 without speculation."""
    num_accepted_tokens: int
    figures: dict[str, float]


class LoadGenerator:
    """The process that sends the load, from the first run on. ``with LoadGenerator(log=...) as generator:``"""

    def __init__(self, *, log: Path):
        self.log = Path(log)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):  # a dead one leaves what it did not read
                self._process.stdin.close()  # it ends with its input
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None

    def start(self) -> None:
        """Begin importing, for instance while a server starts. A run does this itself where it must."""
        if self._process is not None:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serving.bench_serve"],
                env={**os.environ, **ours},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(
        self,
        base_url: str,
        prompts: Sequence[Sequence[int]],
        *,
        concurrency: int,
        max_tokens: int,
        timeout_s: float = 3600.0,
    ) -> Load:
        """The greedy replies to these prompts, ``concurrency`` at a time, each up to ``max_tokens`` or its own end.

        Raises: LoadError when the generator dies or takes too long, or a request fails.
        """
        self.start()
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
            dataset = Path(folder) / "prompts.jsonl"
            dataset.write_text("".join(json.dumps({"prompt": list(prompt)}) + "\n" for prompt in prompts))
            arguments = _arguments(base_url, dataset, len(prompts), concurrency=concurrency, max_tokens=max_tokens)
            result = self._ask(arguments, timeout_s)
        if "error" in result or result["completed"] != len(prompts):
            lasts = {text.strip().splitlines()[-1] for text in result.get("errors", ()) if text}
            why = result.get("error") or sorted(lasts)
            raise LoadError(
                f"{base_url}: {result.get('completed', 0)} of {len(prompts)} requests of vllm bench serve were "
                f"answered ({why}); see {self.log} and the server's log"
            )
        return Load(
            num_requests=result["completed"],
            num_tokens=result["total_output_tokens"],
            wall_s=result["duration"],
            ttft_s=result["ttfts"],
            itl_s=[gap for gaps in result["itls"] for gap in gaps],
            num_drafts=result.get("spec_decode_num_drafts", 0),
            num_accepted_tokens=result.get("spec_decode_accepted_tokens", 0),
            figures={n: result[n] for n in ("output_throughput", "spec_decode_acceptance_length") if n in result},
        )

    def _ask(self, arguments: list[str], timeout_s: float) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            answer = self._process.stdout.readline() if ready else None
        except BrokenPipeError:
            answer = ""
        if not answer:
            what = "died" if answer == "" else f"gave no answer within {timeout_s:g} s"
            raise LoadError(f"vllm bench serve {what}; the end of {self.log}:\n{self._log_tail()}")
        return json.loads(answer)

    def _log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_bytes()[-10_000:].decode(errors="replace").splitlines()[-lines:])


def _arguments(base_url: str, dataset: Path, num_prompts: int, *, concurrency: int, max_tokens: int) -> list[str]:
    """Its command line. Without a tokenizer it sends prompts as they are, and leaves the limit to ``max_tokens``."""
    options = {
        "--base-url": base_url,
        "--backend": "vllm",
        "--dataset-name": "custom",
        "--dataset-path": dataset,
        "--num-prompts": num_prompts,
        "--max-concurrency": concurrency,
        "--temperature": 0,
        "--extra-body": json.dumps({"max_tokens": max_tokens}),
    }
    flags = ["--skip-tokenizer-init", "--disable-shuffle", "--disable-tqdm", "--save-detailed"]
    return [str(part) for option in options.items() for part in option] + flags


def _answer_runs() -> None:
    """One result a line of arguments, until the input ends."""
    require_supported_vllm()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its tables go to the log
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        try:
            result = serve.main(parser.parse_args(json.loads(line)))
            answer = {name: result[name] for name in _KEPT if name in result}
        except Exception as error:  # whatever it was, the one who asked is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _answer_runs()
