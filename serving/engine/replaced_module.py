"""A new drafter module beside the one that serves, on the same attention objects and their KV cache."""

from pathlib import Path
from typing import Any

from serving.errors import ServingError


class ReplacedModule:
    """The drafter as it serves now, and everything that loading another one changes in the engine."""

    def __init__(self, worker: Any, proposer: Any):
        config = worker.vllm_config
        self._worker, self._proposer = worker, proposer
        self._draft_config = config.speculative_config.draft_model_config
        self._context = config.compilation_config.static_forward_context
        self.model = proposer.model
        self._names = set(proposer._draft_attn_layer_names)
        self._supports_mm_inputs = proposer.supports_mm_inputs
        self._model_path = self._draft_config.model
        layers = self.model.model.layers
        self._attention = {layer.self_attn.attn.layer_name: layer.self_attn.attn for layer in layers}
        self._registered = dict(self._context)

    def load(self, folder: Path) -> None:
        """Make ``proposer.model`` the drafter of ``folder``. Raises: whatever loading raises; then put back."""
        from vllm.config import set_current_vllm_config

        for name in self._attention:
            del self._context[name]  # a layer cannot register under a name that is taken
        self._draft_config.model = str(folder)
        with set_current_vllm_config(self._worker.vllm_config):
            self._proposer.load_model(self._worker.model_runner.get_model())
        new = self._proposer.model
        names = [layer.self_attn.attn.layer_name for layer in new.model.layers]
        if new is self.model or set(names) != set(self._attention):
            raise ServingError(f"the new drafter has attention layers {names}, the old one {sorted(self._attention)}")
        for layer, name in zip(new.model.layers, names, strict=True):
            layer.self_attn.attn = self._attention[name]
            self._context[name] = self._attention[name]
        new.model._attn_layers = [layer.self_attn.attn for layer in new.model.layers]
        self._proposer._draft_attn_layer_names = self._names

    def keep_module(self, folder: Path) -> None:
        """Serve with the old module, whose storage holds the values of ``folder`` now."""
        self.put_back()
        self._draft_config.model = str(folder)

    def put_back(self) -> None:
        """Make everything what it was."""
        self._proposer.model = self.model
        self._proposer._draft_attn_layer_names = self._names
        self._proposer.supports_mm_inputs = self._supports_mm_inputs
        self._draft_config.model = self._model_path
        self._context.clear()
        self._context.update(self._registered)
