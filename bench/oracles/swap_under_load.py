"""Swaps of a running server under load: how long it pauses, what fails, what changes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.deploy import swap_replica
from serving.launch import VllmServer
from serving.load import Driver, Reply
from serving.preflight import sha256_file

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "bench"
TOY_FAVOURITE = 433


@dataclass(frozen=True)
class Version:
    """A drafter that the figure swaps to."""

    name: str
    folder: Path


def swap_under_load(
    workdir: Path,
    *,
    clients: int = 4,
    swaps: int = 3,
    port: int = 18190,
    target: Path | None = None,
    drafters: Sequence[Path] = (),
    requests: Sequence[dict[str, Any]] = (),
    server_settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Figures of ``swaps`` swaps in turn between two drafters of one float32 server under ``clients`` clients.

    Without a target, a toy one is made (tests/tiny.py). See ``measure_swaps`` for the keys.
    """
    workdir = Path(workdir)
    toy = target is None
    if toy:
        target, drafters = _toy(workdir)
    versions = [Version(str(i + 1), Path(folder)) for i, folder in enumerate(drafters)]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 2 * clients}
    if toy:
        settings["env"] = {"OMP_NUM_THREADS": "1"}
    server = VllmServer(
        model=target,
        drafter=versions[0].folder,
        version=versions[0].name,
        port=port,
        log=workdir / "server.log",
        token=TOKEN,
        drafter_roots=sorted({version.folder.parent for version in versions}),
        **(settings | dict(server_settings or {})),
    )
    with server:
        figures = measure_swaps(server, versions, requests or prompts(server.served_name), clients=clients, swaps=swaps)
    return {**figures, "start_s": server.start_s}


def measure_swaps(
    server: VllmServer,
    versions: Sequence[Version],
    requests: Sequence[dict[str, Any]],
    *,
    clients: int,
    swaps: int,
) -> dict[str, Any]:
    """``pause_s`` (one a swap), ``failed_requests``, ``changed_outputs``, ``num_replies``, ``acceptance_length``.

    ``versions[0]`` serves at the start. A reply counts as changed when its tokens are not those that the same
    greedy prompt got first, before any swap.
    """
    outcomes = []
    hashes = {version.name: sha256_file(version.folder / "model.safetensors") for version in versions}
    with Driver(server.base_url, requests, concurrency=clients) as driver:
        driver.wait_for(2 * len(requests))  # every prompt has an answer from before the first swap
        for i in range(swaps):
            old, new = versions[i % len(versions)], versions[(i + 1) % len(versions)]
            outcomes.append(
                swap_replica(
                    server.base_url,
                    server.token,
                    folder=new.folder,
                    version=new.name,
                    sha256=hashes[new.name],
                    expected_version=old.name,
                    probe=requests[:3],
                )
            )
            driver.wait_for(len(driver.replies) + len(requests))
        replies = driver.stop()
    return {
        "pause_s": [outcome.pause_s for outcome in outcomes],
        "failed_requests": sum(not reply.ok for reply in replies),
        "changed_outputs": changed_replies(replies) + sum(outcome.changed_outputs for outcome in outcomes),
        "num_replies": len(replies),
        "acceptance_length": [outcomes[0].before.acceptance_length]
        + [outcome.after.acceptance_length for outcome in outcomes],
        "live_fingerprint": [outcomes[0].previous_live_fingerprint]
        + [outcome.live_fingerprint for outcome in outcomes],
        "longest_request_s": round(max(reply.latency_s for reply in replies), 3),
        "errors": [reply.error for reply in replies if reply.error][:3],
    }


def prompts(model: str, *, count: int = 8, max_tokens: int = 48) -> list[dict[str, Any]]:
    """Greedy chats of a fixed length whose exact tokens come back."""
    fixed = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return [{**fixed, "messages": [{"role": "user", "content": f"Order {i * 37}: where is it?"}]} for i in range(count)]


def changed_replies(replies: Sequence[Reply]) -> int:
    """How many got other tokens than the same greedy prompt got first."""
    first: dict[int, list[int]] = {}
    changed = 0
    for reply in sorted((r for r in replies if r.ok), key=lambda r: r.started_s):
        changed += first.setdefault(reply.index, reply.token_ids) != reply.token_ids
    return changed


def _toy(workdir: Path) -> tuple[Path, list[Path]]:
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny

    target = tiny.tiny_target(workdir / "target", favourite=TOY_FAVOURITE)
    return target, [
        tiny.tiny_drafter(workdir / "versions" / "1", target, seed=1),
        tiny.tiny_drafter(workdir / "versions" / "2", target, seed=2, proposes=TOY_FAVOURITE),
    ]
