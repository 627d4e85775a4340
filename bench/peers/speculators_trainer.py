"""speculators' own DFlash trainer over states that Slipstream captured; runs in its environment, by its own classes.

python speculators_trainer.py SETTINGS.json

It trains exactly as its own command line has it train: what is ours is where its batches come from, the turns, and the
CPU as a device, which it cannot name.
"""

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.model import SpeculatorModel
from speculators.train.cli import build_draft_model
from speculators.train.config.schema import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.trainer import Trainer, TrainerConfig
from torch import Tensor
from turns import Rows, Turns, answer, begin, resident


class Loader:
    """The data loader that their trainer is given."""

    batch_sampler = None

    def __init__(self, turns: Turns, steps: int):
        self._turns, self._steps = turns, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._turns)


class CpuTrainer(Trainer):
    """Their trainer, told of a CPU."""

    def setup_trainer(self) -> None:
        """As theirs; step 0 is the one that their timer would ask a GPU about."""
        super().setup_trainer()
        self.local_rank, self.device_type, self.global_step = torch.device("cpu"), "cpu", 1


class Packs:
    """Rows packed by their own collate function."""

    def __init__(self, settings: dict[str, Any], rows: Rows):
        self._settings, self._rows = settings, rows

    def batch_of(self, dealt: Sequence[int]) -> tuple[dict[str, Any], int]:
        """One pack of these rows, and the blocks that it will be trained on."""
        samples = [self._sample(index) for index in dealt]
        # Without the padding to total_seq_len that they would have; a compiled step wants one length.
        length = self._settings["pack_tokens"] or sum(len(sample["input_ids"]) for sample in samples)
        batch = self.collated(samples, length)
        legal = int(batch["loss_mask"][0, : -self._settings["block_size"]].sum())
        return batch, min(legal, self._settings["blocks_per_step"])

    def collated(self, samples: list[dict[str, Tensor]], length: int) -> dict[str, Any]:
        """A pack of so many tokens."""
        layers, dtype = self._rows.width // self._rows.hidden_size, getattr(torch, self._settings["dtype"])
        return CollateFn(length, self._rows.hidden_size, layers, dtype=dtype)(samples)

    def one(self, row: int) -> dict[str, Tensor]:
        """A pack of one row, with room behind it: the last block_size positions of a pack never are anchors."""
        sample = self._sample(row)
        batch = self.collated([sample], len(sample["input_ids"]) + self._settings["block_size"])
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}

    def _sample(self, index: int) -> dict[str, Tensor]:
        ids = self._rows.ids(index)
        return {
            "hidden_states": self._rows.states(index),
            "input_ids": ids,
            "verifier_last_hidden_states": self._rows.last(index),
            "loss_mask": self._rows.supervised(index),
            "lengths": torch.tensor([len(ids)]),
            "position_ids": torch.arange(len(ids)),
        }


def recipe(settings: dict[str, Any]) -> Namespace:
    """Their own defaults for DFlash, and what a comparison sets."""
    given = {
        "speculator_type": "dflash",
        "verifier_name_or_path": settings["target"],
        "num_layers": settings["num_layers"],
        "full_attention_indices": list(range(settings["num_layers"])),
        "block_size": settings["block_size"],
        "mask_token_id": settings["mask_token_id"],
        "target_layer_ids": [layer + 1 for layer in settings["target_layer_ids"]],  # they count the embedding as 0
        "max_anchors": settings["blocks_per_step"],
        "draft_attn_impl": settings["attention"],
        "loss_implementation": settings["loss"],
        "hidden_states_dtype": settings["dtype"],
        "optimizer": settings["optimizer"],
        "lr": settings["learning_rate"],
        "epochs": 1,
        "seed": settings["seed"],
        "save_path": settings["workdir"],
    }
    return Namespace(**TrainConfig.from_sources(cli=given, argv=[]).flatten())


def model_of(args: Namespace, settings: dict[str, Any]) -> SpeculatorModel:
    """Their drafter, as their ``train`` command makes it."""
    vocabulary = json.loads((Path(settings["target"]) / "config.json").read_text())["vocab_size"]
    model = build_draft_model(args, SpeculatorModel.registry["dflash"], None, None, vocabulary)
    if settings["compile"]:
        model.compile()
    return model


def trainer_config(args: Namespace, settings: dict[str, Any]) -> TrainerConfig:
    """Their trainer's settings, as their ``train`` command fills them in."""
    training, validating = SpeculatorModel.registry["dflash"].get_trainer_kwargs(**vars(args))
    taken = {name: getattr(args, name) for name in TrainerConfig._fields if hasattr(args, name)}
    taken |= {
        "num_epochs": 1,
        "train_call_kwargs": training,
        "val_call_kwargs": validating,
        "hidden_states_dtype": getattr(torch, settings["dtype"]),
        "scheduler_total_steps": settings["steps"],
        "resume_from_checkpoint": False,
        "log_freq": 1 << 60,
    }
    return TrainerConfig(**taken)


def main() -> None:
    """Make the trainer, say so, and train as commands come."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    memory = begin(settings)
    args, rows = recipe(settings), Rows(Path(settings["rows"]))
    model, packs = model_of(args, settings), Packs(settings, rows)

    def save(path: str) -> dict[str, Any]:
        """What it has trained; embedding and head are the target's."""
        trained = {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}
        save_file(trained, path)
        return {"tensors": len(trained)}

    @torch.no_grad()
    def drafts(row: int) -> dict[str, Any]:
        """What it drafts after every token of a row's reply, by its own forward pass: [anchors, block_size - 1] ids.

        In float32, as its parameters are.
        """
        num_anchors = int(rows.supervised(row).sum())
        _, logits, *_ = model._backbone_forward(**packs.one(row), max_anchors=num_anchors)
        return {"ids": logits.argmax(-1).view(num_anchors, -1)[:, 1:].tolist()}

    turns = Turns(settings, rows, packs.batch_of, memory, {"save": save, "drafts": drafts})
    trainer = CpuTrainer(model, trainer_config(args, settings), Loader(turns, settings["steps"]))
    memory["loaded"] = resident("VmRSS")
    answer({"ready": True, "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)})
    with contextlib.suppress(BrokenPipeError):
        trainer.train_epoch(0)


if __name__ == "__main__":
    main()
