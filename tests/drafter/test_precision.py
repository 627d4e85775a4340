import logging
import threading

import pytest
import torch

from drafter.precision import compute_dtype, flush_denormals, product_dtype, require_multiplied
from pipeline.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("is_seen_from_here", [True, False])
def test_a_gpus_dtype_is_the_same_wherever_it_is_asked_for(is_seen_from_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: is_seen_from_here)
    assert compute_dtype("auto", GPU) == torch.bfloat16


@pytest.mark.parametrize("has_tiles", [True, False])
def test_a_cpus_dtype_is_what_it_multiplies_fast(has_tiles, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert compute_dtype("auto", CPU) == (torch.bfloat16 if has_tiles else torch.float32)


@pytest.mark.parametrize("has_tiles", [True, False])
def test_products_of_half_precision_are_whole_where_a_cpu_is_faster_so(has_tiles, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert product_dtype(torch.bfloat16, CPU) == (torch.bfloat16 if has_tiles else torch.float32)
    assert product_dtype(torch.bfloat16, GPU) == torch.bfloat16
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(dtype, CPU) == dtype


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_is_set_is_kept(compute):
    assert {compute_dtype(compute, CPU), compute_dtype(compute, GPU)} == {getattr(torch, compute)}


def test_a_gpu_without_bfloat16_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    require_multiplied(torch.float32, GPU)
    with pytest.raises(ConfigError, match=r"Tesla T4 .*train\.compute = \"float32\""):
        require_multiplied(torch.bfloat16, GPU)


def test_a_cpu_that_is_slow_in_bfloat16_says_so(monkeypatch, caplog):
    for has_tiles in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_tiles=has_tiles: has_tiles)
        with caplog.at_level(logging.WARNING, logger="slipstream"):
            require_multiplied(torch.float32, CPU)
            assert not caplog.messages
            require_multiplied(torch.bfloat16, CPU)
    assert len(caplog.messages) == 1 and "many times as fast" in caplog.messages[0]


def test_no_thread_of_a_computation_meets_a_denormal():
    left = []

    def compute():
        flush_denormals()
        left.append(int((torch.full((1 << 22,), 1.2e-38) * 0.1).count_nonzero()))

    thread = threading.Thread(target=compute)  # with threads of its own to compute with
    thread.start()
    thread.join()
    assert left == [0]
