"""A toy corpus that streams: responses on disk, an engine whose states are a code of the tokens, a log of rows."""

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist
import toys

from drafter import loop, stream, train
from pipeline import capture, stages
from pipeline.artifacts import ResponseSet
from pipeline.config import Config
from pipeline.fingerprint import target_fingerprint
from pipeline.schemas import RESPONSES
from pipeline.shards import PartWriter, write_table
from tests.pipeline.scripted_engines import ScriptedEngines

LAYERS, HIDDEN = (1, 2, 3), 10
CODE = torch.randn(toys.VOCAB, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(99))
CHECK = {f"layer_{n}_{name}": value for n in LAYERS for name, value in (("error", 0.0), ("norm", 1.0), ("nearest", n))}
NUM_ROWS, NUM_HELD_OUT, ROWS_PER_PART = 72, 8, 2


class CodeEngines(ScriptedEngines):
    """An engine whose states are easy to learn from, a little different for every row."""

    def __init__(self, *, seconds=0.0, states=None):
        super().__init__(states=states or self.code, check=CHECK | {"batched_error": 0.0, "answered_error": 0.0})
        self._seconds = seconds

    def info(self):
        return super().info().__class__(2048, toys.VOCAB, HIDDEN, "float32", 1, 0.0, "0")

    def code(self, row_id, ids):
        time.sleep(self._seconds)
        noise = torch.randn(len(ids) - 1, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(sum(ids)))
        states = CODE[torch.tensor(ids[:-1])] + 0.05 * noise
        return states.to(torch.bfloat16).view(torch.int16).numpy().view("uint16")


def config_of(root, *, max_bytes=400_000, capture_settings=None, **settings):
    """A configuration with this budget of disk."""
    if not (root / "target").exists():
        toys.target_folder(root / "target")
    base = toys.config(root, **{"steps": 1000, "checkpoint_every": 7, "patience": None, **settings}).model_dump()
    base["capture"] |= {"max_bytes": max_bytes, "stream": True, **(capture_settings or {})}
    return Config.model_validate(base)


def response(number, split="train", *, num_tokens=None, start=None):
    """A reply that counts upwards, of a length of its own."""
    num_tokens = num_tokens or 24 + number % 7
    ids = [(number if start is None else start) + 2 * number * n + n for n in range(num_tokens)]
    ids = [one % toys.MASK_TOKEN_ID for one in ids]
    return {
        "row_id": f"row-{number}",
        "conversation": f"conversation-{number}",
        "split": split,
        "slice": "a",
        "weight": 1,
        "inclusion_probability": 1.0,
        "prompt_ids": ids[:3],
        "response_ids": ids[3:],
        "finish_reason": "stop",
        "clamped": False,
        "sampling": "{}",
        "origin": "target",
    }


def corpus():
    """Train rows, and at the end some that are held out."""
    first = NUM_ROWS - NUM_HELD_OUT
    return [response(n, "train" if n < first else ("validation", "gate")[n % 2]) for n in range(NUM_ROWS)]


def response_set(config, rows):
    """The rows as a complete ResponseSet, in parts."""
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=())

    def build(folder, derivation):
        writer = PartWriter(folder)
        parts = [rows[start : start + ROWS_PER_PART] for start in range(0, len(rows), ROWS_PER_PART)]
        for index, part in enumerate(parts):
            table = pa.Table.from_pylist(part, schema=RESPONSES)
            writer.commit(index, {f"responses-{index:05d}.parquet": (len(part), write_table(table))})
        shards = writer.finish(len(parts))[0]
        return ResponseSet(
            derivation_id=derivation, parents={"prompts": "prompts"}, shards=shards, fingerprint=fingerprint
        )

    return stages.complete(
        config.root, ResponseSet, stage="regenerate", version=1, parents={}, meaning={"rows": rows}, build=build
    )


def held_out(config, responses):
    """The cache of the rows that are not trained on."""
    return capture.run(config, responses, engines=CodeEngines(), target_layer_ids=LAYERS, splits=("validation", "gate"))


def run(config, rows=None, *, engines=None, replay=()):
    """A whole streamed run in this process: the engine in a thread, the trainer in this one."""
    responses = response_set(config, rows or corpus())
    states = held_out(config, responses)

    def execute(folder):
        with stream.fed(folder, config, states, None, responses, replay, engines=engines or CodeEngines()):
            train.train_in(folder, config, states, None, responses, replay)

    return train.run(config, states, start=None, role="champion", responses=responses, replay=replay, execute=execute)


def run_logged(root, log, seconds, settings):
    """``run`` in a process of its own, which writes down what every step trains on."""
    torch.set_num_threads(1)
    log_steps(Path(log))
    run(config_of(Path(root), **settings), engines=CodeEngines(seconds=seconds))


def train_rank(rank, root, folder, config, states, responses):
    """One of two processes that train together from a queue that somebody else fills."""
    torch.set_num_threads(1)
    log_steps(root / f"log-{rank}")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    train.train_in(folder, config, states, None, responses)
    os._exit(0)  # what follows is torch's own tear-down, a minute on a busy machine


def log_steps(log, patch=setattr):
    """Write down, a line a step, which rows' gradients are taken with which anchors."""
    backward = loop.backward

    def logged(drafter, frozen, share, *arguments, **keywords):
        with open(log, "a") as file:
            file.write(json.dumps([[deal.row.row_id, deal.anchors.tolist()] for deal in share]) + "\n")
        return backward(drafter, frozen, share, *arguments, **keywords)

    patch(loop, "backward", logged)


def logged_steps(log):
    """The lines of a log; a last one that a kill has cut is left out."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
