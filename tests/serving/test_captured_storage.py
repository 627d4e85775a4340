"""A drafter's values are written into the storage that serves; addresses stay, and what was there comes back."""

import pytest
import torch
from torch import nn

from serving.engine.captured_storage import CapturedStorage, stored_tensors
from serving.errors import ServingError

EMBEDDING = torch.arange(12.0).reshape(4, 3)


class Drafter(nn.Module):
    """As vLLM lays one out: parameters, a buffer, and tensors that are derived after loading."""

    def __init__(self, value):
        super().__init__()
        self.model = nn.Module()
        self.model.fc = nn.Linear(3, 3)
        self.model.hidden_norm = nn.Linear(3, 1, bias=False)
        for parameter in self.parameters():
            parameter.data.fill_(value)
        self.lm_head = nn.Parameter(EMBEDDING, requires_grad=False)  # the target's
        self.register_buffer("draft_id_to_target_id", torch.full((4,), int(value)))
        self.model._hidden_norm_weight = self.model.hidden_norm.weight.data
        self.model._fused_kv_weight = torch.full((2, 3), value)
        self.model._fused_kv_bias = None
        self.model._k_norm_weights = torch.full((2,), value)
        self.model._rope_cos_sin_cache = torch.full((5, 2), value)


def addresses(model):
    return {name: tensor.data_ptr() for name, tensor in stored_tensors(model)}


def values(model):
    return {name: tensor.clone() for name, tensor in stored_tensors(model)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_values_change_and_addresses_stay():
    old, new = Drafter(1.0), Drafter(2.0)
    before, at = values(old), addresses(old)
    storage = CapturedStorage(old)
    storage.write(new)
    assert addresses(old) == at and same(values(old), values(new))
    assert old.model._fused_kv_weight[0, 0] == 2 and old.draft_id_to_target_id[0] == 2
    assert old.model._hidden_norm_weight.data_ptr() == old.model.hidden_norm.weight.data_ptr()
    storage.put_back()
    assert addresses(old) == at and same(values(old), before)


def test_what_is_the_targets_is_not_written():
    old, new = Drafter(1.0), Drafter(2.0)
    storage = CapturedStorage(old)
    storage.write(new)
    assert "lm_head" not in storage._before and torch.equal(EMBEDDING, torch.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize("fault", ["shape", "dtype", "missing", "repacked"])
def test_what_is_not_laid_out_alike_is_refused_before_anything_is_written(fault):
    old, new = Drafter(1.0), Drafter(2.0)
    if fault == "shape":
        new.model._k_norm_weights = torch.full((3,), 2.0)
    elif fault == "dtype":
        new.model._k_norm_weights = new.model._k_norm_weights.to(torch.bfloat16)
    elif fault == "missing":
        new.model._rope_cos_sin_cache = None
    else:
        old.model.fc.weight.data = new.model.fc.weight.data = torch.empty(0)
    before = values(old)
    storage = CapturedStorage(old)
    with pytest.raises(ServingError, match="restart"):
        storage.write(new)
    storage.put_back()
    assert same(values(old), before)
