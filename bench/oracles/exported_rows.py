"""Cached rows as plain files, for a trainer that knows nothing of Slipstream: the same ids, and the same states' bits.

ids.bin holds int32 ids, states.bin and last.bin bfloat16 words, a row after another with as many positions as ids; the
state of a row's last token, which is never an input, is zero. rows.json says where a row starts.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter.dataset import CachedRow


def export(folder: Path, rows: Sequence[CachedRow], last: Sequence[CachedRow], *, hidden_size: int) -> Path:
    """The folder with these rows; ``last`` are the same rows in a cache of the target's last layer."""
    folder.mkdir(parents=True, exist_ok=True)
    by_id = {row.row_id: row for row in last}
    start, index = 0, []
    with (
        open(folder / "ids.bin", "wb") as ids,
        open(folder / "states.bin", "wb") as states,
        open(folder / "last.bin", "wb") as last_states,
    ):
        for row in rows:
            ids.write(row.ids.numpy().astype(np.int32).tobytes())
            _write(states, row)
            _write(last_states, by_id[row.row_id])
            index.append([start, row.num_tokens, row.num_prompt_tokens])
            start += row.num_tokens
    told = {"width": rows[0].states.shape[1], "hidden_size": hidden_size, "rows": index}
    (folder / "rows.json").write_text(json.dumps(told))
    return folder


def _write(file, row: CachedRow) -> None:
    words = _states(row).view(torch.int16)
    file.write(words.numpy().tobytes())
    file.write(np.zeros(words.shape[1], np.int16).tobytes())


def _states(row: CachedRow) -> Tensor:  # bfloat16 [n - 1, F]
    states = torch.empty(row.num_tokens - 1, row.states.shape[1], dtype=torch.bfloat16)
    if isinstance(row.states, Tensor):
        return states.copy_(row.states)
    row.states.copy_into(states)
    return states
