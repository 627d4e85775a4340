"""Trained blocks a second and memory, ours against a peer in its fastest setting: same rows, shapes and precision.

What counts is a whole training step: rows read, packed, forward with the loss and its metrics, backward, clipping,
optimiser and schedule. The two processes take turns, so that what else the machine does meets both alike.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.oracles.peer_environment import SPECULATORS, Peer, command_of
from bench.oracles.trainers import Turn, trainer
from pipeline.artifacts import write_durably
from pipeline.config import Config
from pipeline.errors import StageError

OURS = [sys.executable, "-m", "bench.oracles.our_trainer"]
PRECISIONS = ("float32", "bfloat16")
# A precision whose first setting is so many times as slow as float32's takes no part: processors without units for
# half precision emulate it, and each of its settings would take many minutes to say so.
_HOPELESS = 5
_ATTENTION = {"speculators": ("eager", "sdpa", "simple_flex_attention"), "specforge": ("eager", "sdpa")}


@dataclass(frozen=True)
class Ground:
    """What both sides train on, and how much."""

    config: Config
    states: str
    """Derivation id of the cache."""
    rows: Path
    """The same rows, exported."""
    work: Path
    threads: int
    steps: int = 100_000
    """Of the schedule."""
    longest: tuple[int, ...] = ()
    """Tokens of the rows, longest first: a peer's compiled step wants packs of one length, and no row may be cut."""


@dataclass(frozen=True)
class PeerSetting:
    """One way that a peer can be run."""

    attention: str
    dtype: str
    loss: str = "eager"
    compile: bool = False
    huge_pages: bool = False
    """As our own trainer asks PyTorch for, and a peer does not."""

    def __str__(self) -> str:
        more = f"{', compiled' if self.compile else ''}{', huge pages' if self.huge_pages else ''}"
        return f"{self.attention}, {self.dtype}, {self.loss} loss{more}"


@dataclass(frozen=True)
class Tried:
    """What came of a setting: its pace, or why there is none."""

    setting: PeerSetting
    blocks_per_s: float | None
    why: str | None = None

    def told(self) -> dict[str, Any]:
        """For the figure's note."""
        return {"setting": str(self.setting), "blocks_per_s": self.blocks_per_s, "why": self.why}


@dataclass(frozen=True)
class Raced:
    """Turns of both, and what each held of memory."""

    ours: list[Turn]
    theirs: list[Turn]
    our_memory: Mapping[str, float]
    their_memory: Mapping[str, float]

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, a pair of neighbouring turns each."""
        return [a.blocks_per_s / b.blocks_per_s for a, b in zip(self.ours, self.theirs, strict=True)]

    def note(self) -> dict[str, Any]:
        """For the figure: the median pace of both, and the pairs' extremes."""
        ratios = self.ratios
        return {
            "ours": round(median(turn.blocks_per_s for turn in self.ours), 1),
            "theirs": round(median(turn.blocks_per_s for turn in self.theirs), 1),
            "n": len(ratios),
            "smallest": min(ratios),
            "largest": max(ratios),
        }

    def memory(self) -> dict[str, Any]:
        """Ratios of the whole processes' peaks, of what is above the imports, and of what is above the loaded data."""
        ours, theirs = self.our_memory, self.their_memory
        above = {
            f"above_{since}": (ours["peak"] - ours[since]) / (theirs["peak"] - theirs[since])
            for since in ("imported", "loaded")
        }
        return {
            "ratio": ours["peak"] / theirs["peak"],
            "ours_mb": round(ours["peak"] / 1e6),
            "theirs_mb": round(theirs["peak"] / 1e6),
            **above,
        }


def settings_of(peer: Peer, *, small: bool) -> list[PeerSetting]:
    """Every way that makes sense on a CPU, and the fused loss once: it is written in Triton, which wants a GPU."""
    compiled = (False,) if small or peer is not SPECULATORS else (False, True)
    attention = ("sdpa",) if small else _ATTENTION[peer.name]
    every = [PeerSetting(a, dtype, compile=c) for dtype, a, c in product(PRECISIONS, attention, compiled)]
    return [*every, PeerSetting("sdpa", "float32", loss="fused")] if peer is SPECULATORS else every


def scanned(peer: Peer, ground: Ground, *, small: bool) -> list[Tried]:
    """Each setting's pace over a few steps with AdamW; the fastest of each precision once more, with huge pages.

    A setting that is on record under the ground's folder is not tried again: a run that goes on has the same.
    """
    tried: list[Tried] = []
    for one in settings_of(peer, small=small):
        why = _hopeless(one.dtype, tried)
        tried.append(Tried(one, None, why) if why else _tried(peer, ground, one, small=small))
    best = [one for dtype in PRECISIONS if (one := fastest(tried, dtype))]
    return tried + [_tried(peer, ground, replace(one, huge_pages=True), small=small) for one in best]


def _hopeless(dtype: str, tried: Sequence[Tried]) -> str | None:
    """Why no more settings of a precision are tried; None where they are."""
    paces = {of: next((t.blocks_per_s for t in tried if t.setting.dtype == of), None) for of in ("float32", dtype)}
    if not all(paces.values()) or paces["float32"] < _HOPELESS * paces[dtype]:
        return None
    return f"not tried: {dtype} trains {paces[dtype]:.1f} blocks/s where float32 trains {paces['float32']:.1f}"


def _tried(peer: Peer, ground: Ground, setting: PeerSetting, *, small: bool) -> Tried:
    name = "-".join([peer.name, *str(setting).replace(",", "").split()])
    record = ground.work / "scan" / f"{name}-tried.json"
    if not record.exists():
        found: dict[str, Any] = {"blocks_per_s": None, "why": None}
        try:
            told = peer_settings(ground, setting, optimizer="adamw")
            with trainer(command_of(peer, ground.work), told, record.parent, name) as process:
                process.train(1)  # compiles, and touches its memory first
                found["blocks_per_s"] = process.train(1 if small else 3).blocks_per_s
        except StageError as error:
            found["why"] = str(error)[-300:]
        write_durably(record, json.dumps(found).encode())
    tried = Tried(setting, **json.loads(record.read_text()))
    say(f"{peer.name}: {setting}: {tried.blocks_per_s or tried.why}")
    return tried


def fastest_of_all(peer: Peer, ground: Ground, *, small: bool) -> PeerSetting:
    """What a peer trains fastest with, in any precision. Raises: StageError where no setting runs."""
    ran = [one for one in scanned(peer, ground, small=small) if one.blocks_per_s]
    if not ran:
        raise StageError(f"no setting of {peer.name} runs on this machine; the logs are in {ground.work / 'scan'}")
    return max(ran, key=lambda one: one.blocks_per_s or 0.0).setting


def fastest(tried: Sequence[Tried], dtype: str) -> PeerSetting | None:
    """The fastest setting of one precision; None where none ran, or where this machine emulates it."""
    ran = [one for one in tried if one.blocks_per_s and one.setting.dtype == dtype]
    if _hopeless(dtype, tried):
        return None
    return max(ran, key=lambda one: one.blocks_per_s).setting if ran else None


def raced(
    peer: Peer, ground: Ground, setting: PeerSetting, *, optimizer: str, pairs: int, steps: tuple[int, int]
) -> Raced:
    """Turns in alternating order after a warm-up; ``steps`` of ours and of theirs a turn."""
    name = f"{setting.dtype}-{optimizer}"
    same = {"anchors": "uniform"}  # as the peers draw theirs
    ours = our_settings(ground, compute=setting.dtype, optimizer=optimizer, **same)
    theirs = peer_settings(ground, setting, optimizer=optimizer)
    folder = ground.work / "race"
    with (
        trainer(OURS, ours, folder, f"ours-{name}") as a,
        trainer(command_of(peer, ground.work), theirs, folder, f"{peer.name}-{name}") as b,
    ):
        if a.parameters != b.parameters:
            raise StageError(f"{peer.name} trains {b.parameters} parameters, ours {a.parameters}: not the same shape")
        a.train(2)
        b.train(2)
        turns: dict[Any, list[Turn]] = {a: [], b: []}
        for pair in range(pairs):
            for process, count in [(a, steps[0]), (b, steps[1])][:: 1 if pair % 2 else -1]:
                turns[process].append(process.train(count))
            say(f"{peer.name} {name}: {turns[a][-1].blocks_per_s:.1f} against {turns[b][-1].blocks_per_s:.1f} blocks/s")
        return Raced(turns[a], turns[b], a.ask(do="usage"), b.ask(do="usage"))


def paced(ground: Ground, *, turns: int, **train: Any) -> float:
    """Our blocks a second with these settings, alone."""
    with trainer(OURS, our_settings(ground, **train), ground.work / "race", "ours-alone") as process:
        process.train(2)
        return median(process.train(4).blocks_per_s for _ in range(turns))


def our_settings(ground: Ground, **train: Any) -> dict[str, Any]:
    """What our trainer's process is told."""
    update = {"replay_share": 0.0, "patience": None, "checkpoint_every": 1 << 30, **train}
    config = ground.config.model_copy(update={"train": ground.config.train.model_copy(update=update)})
    told = {"config": config.model_dump(mode="json"), "states": ground.states}
    return {**told, "steps": ground.steps, "threads": ground.threads}


def peer_settings(ground: Ground, setting: PeerSetting, *, optimizer: str, **more: Any) -> dict[str, Any]:
    """What a peer's process is told."""
    config, train = ground.config, ground.config.train
    rows_per_step = max(1, train.blocks_per_step // train.anchors_per_row)
    return {
        "target": str(config.target.model),
        "rows": str(ground.rows),
        "num_layers": config.drafter.num_layers,
        "block_size": config.drafter.block_size,
        "mask_token_id": config.drafter.mask_token_id,
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "blocks_per_step": train.blocks_per_step,
        "rows_per_step": rows_per_step,
        "attention": setting.attention,
        "dtype": setting.dtype,
        "loss": setting.loss,
        "compile": setting.compile,
        "pack_tokens": sum(ground.longest[:rows_per_step]) if setting.compile else None,
        "optimizer": optimizer,
        "learning_rate": train.learning_rate,
        "steps": ground.steps,
        "seed": train.seed,
        "threads": ground.threads,
        "environment": {"THP_MEM_ALLOC_ENABLE": str(int(setting.huge_pages))},  # not as inherited
        **more,
    }


def with_train(ground: Ground, **train: Any) -> Ground:
    """The same ground with other settings of training."""
    config = ground.config
    return replace(ground, config=config.model_copy(update={"train": config.train.model_copy(update=train)}))


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
