"""Fourteen drafters that must not be served, offered to a real server that goes on answering."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.figures import Figure, at_least, at_most
from bench.oracles.swap_under_load import changed_replies, prompts
from bench.oracles.swapped_server import TOKEN, Swapped, swapped_server
from serving.deploy import status, swap_replica
from serving.errors import DeployError
from serving.load import Driver
from serving.preflight import sha256_file

WEIGHTS = "model.safetensors"


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _dflash(folder: Path, **changes: Any) -> None:
    _config(folder, dflash_config=json.loads((folder / "config.json").read_text())["dflash_config"] | changes)


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _one_layer_more(folder: Path) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    _config(folder, num_hidden_layers=layers + 1, layer_types=["full_attention"] * (layers + 1))
    _tensors(
        folder,
        lambda t: t.update(
            {k.replace("layers.0.", f"layers.{layers}."): v.clone() for k, v in t.items() if k.startswith("layers.0.")}
        ),
    )


def _other_vocabulary(folder: Path) -> None:
    _config(folder, vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"] * 2)


def _half_written(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def _link_out(folder: Path) -> None:
    outside = folder.parent.parent / "outside"
    shutil.move(folder, outside)
    os.symlink(outside, folder)


def _pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


# What is wrong, how it comes about, and the word for it that the refusal must hold.
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "one layer more": (_one_layer_more, "num_hidden_layers"),
    "another block size": (lambda f: _config(f, block_size=8), "block_size"),
    "another vocabulary": (_other_vocabulary, "vocab_size"),
    "other layer ids": (lambda f: _dflash(f, target_layer_ids=[0, 2, 4]), "target_layer_ids"),
    "wrong mask token": (lambda f: _dflash(f, mask_token_id=7), "mask_token_id"),
    "other rope base": (lambda f: _config(f, rope_theta=500.0), "rope_theta"),
    "NaN weights": (lambda f: _tensors(f, lambda t: t["fc.weight"][0].fill_(float("nan"))), "not_finite"),
    "zeroed norm": (lambda f: _tensors(f, lambda t: t["norm.weight"].zero_()), "zero_tensor"),
    "missing tensor": (lambda f: _tensors(f, lambda t: t.pop("hidden_norm.weight")), "missing_tensors"),
    "hash mismatch": (lambda f: None, "sha256"),
    "embeddings in the checkpoint": (
        lambda f: _tensors(f, lambda t: t.update({"embed_tokens.weight": torch.ones(2, 2)})),
        "owns_embedding",
    ),
    "half-written folder": (_half_written, "weights_unreadable"),
    "symbolic link out of the root": (_link_out, "not under an allowed folder"),
    "pickle": (_pickle, "pickle"),
}


def bad_swaps(workdir: Path, *, clients: int = 4) -> dict[str, Figure]:
    """How many of them were refused, or put back, for the right reason; and what the clients noticed."""
    with swapped_server(workdir, clients=clients) as swapped:
        before = status(swapped.server.base_url, TOKEN)
        asked = prompts(swapped.server.served_name)
        with Driver(swapped.server.base_url, asked, concurrency=clients) as driver:
            driver.wait_for(2 * len(asked))
            reasons = {what: _offered(swapped, what) for what in BAD}
            driver.wait_for(len(driver.replies) + len(asked))
            replies = driver.stop()
        after = status(swapped.server.base_url, TOKEN)
    right = {what: BAD[what][1] in (reason or "") for what, reason in reasons.items()}
    same = all(before[key] == after[key] for key in ("version", "sha256", "live_fingerprint", "epoch"))
    note = {"n": len(replies), "on": f"toy, {clients} clients"}
    wrong = {what: reasons[what] for what, is_right in right.items() if not is_right}
    return {
        "bad_swaps.refused_for_the_reason": at_least(sum(right.values()), len(BAD), n=len(BAD), others=wrong),
        "bad_swaps.served_other_weights": at_most(int(not same), 0),
        "bad_swaps.failed_requests": at_most(sum(not reply.ok for reply in replies), 0, **note),
        "bad_swaps.changed_tokens": at_most(changed_replies(replies), 0, **note),
    }


def _offered(swapped: Swapped, what: str) -> str | None:
    """Why it was not served; None where it was."""
    folder = swapped.roots / what.replace(" ", "_")
    shutil.copytree(swapped.folders["2"], folder)
    BAD[what][0](folder)
    sha256 = "0" * 64 if what == "hash mismatch" else sha256_file(folder / WEIGHTS)
    try:
        swap_replica(
            swapped.server.base_url, TOKEN, folder=folder, version="2", sha256=sha256, expected_version="1", probe=[]
        )
    except DeployError as error:
        return str(error)
    swapped.swap("2", "1")
    return None
