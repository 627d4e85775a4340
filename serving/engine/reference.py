"""Hidden states by a plain Hugging Face forward pass: what an engine's captured states are checked against."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


@torch.inference_mode()
def reference_states(model: Path, ids: Sequence[int], *, layer_ids: Sequence[int]) -> np.ndarray:  # float32 [*, n, H]
    """The outputs of decoder layer 0, 1, 2 … on these ids, one more than ``layer_ids`` needs where there is one.

    Computed in float32 from the folder's weights; later layers are not built. Taken at the layers
    themselves, since ``output_hidden_states`` puts the last one behind the final norm.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    text = config.get_text_config()
    num_layers = min(max(layer_ids) + 2, text.num_hidden_layers)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    network = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32, local_files_only=True)
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(network.get_decoder().layers):
        layer.register_forward_hook(lambda _module, _inputs, out, i=index: outputs.__setitem__(i, _hidden(out)))
    network.eval()(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return torch.stack([outputs[i][0] for i in range(num_layers)]).numpy()


def _hidden(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]
