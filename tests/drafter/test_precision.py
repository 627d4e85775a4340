import logging
import threading

import pytest
import torch

from drafter.precision import compute_dtype, flush_denormals, has_fast_bfloat16, product_dtype, require_multiplied
from pipeline.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("is_seen_from_here", [True, False])
def test_a_gpus_dtype_is_the_same_wherever_it_is_asked_for(is_seen_from_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: is_seen_from_here)
    assert compute_dtype("auto", GPU) == torch.bfloat16


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_cpus_dtype_is_what_it_multiplies_fast(is_fast, monkeypatch):
    monkeypatch.setattr("drafter.precision.has_fast_bfloat16", lambda: is_fast)
    assert compute_dtype("auto", CPU) == (torch.bfloat16 if is_fast else torch.float32)


@pytest.mark.parametrize("is_fast", [True, False])
def test_products_of_half_precision_are_whole_where_a_cpu_is_faster_so(is_fast, monkeypatch):
    monkeypatch.setattr("drafter.precision.has_fast_bfloat16", lambda: is_fast)
    assert product_dtype(torch.bfloat16, CPU) == (torch.bfloat16 if is_fast else torch.float32)
    assert product_dtype(torch.bfloat16, GPU) == torch.bfloat16
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(dtype, CPU) == dtype


@pytest.mark.parametrize(
    ("tiles", "instructions", "vendor", "is_fast"),
    [
        (True, False, "GenuineIntel", True),
        (False, True, "AuthenticAMD", True),
        (False, True, "GenuineIntel", False),
        (False, False, "AuthenticAMD", False),
        (False, True, "", False),
    ],
)
def test_a_cpu_is_fast_in_bfloat16_by_its_tiles_or_where_its_makers_instructions_are(
    tiles, instructions, vendor, is_fast, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr("drafter.precision._vendor", lambda: vendor)
    assert has_fast_bfloat16() == is_fast


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
    for is_fast in (True, False):
        monkeypatch.setattr("drafter.precision.has_fast_bfloat16", lambda is_fast=is_fast: is_fast)
        with caplog.at_level(logging.WARNING, logger="slipstream"):
            require_multiplied(torch.float32, CPU)
            assert not caplog.messages
            require_multiplied(torch.bfloat16, CPU)
    assert len(caplog.messages) == 1 and "where float32 is faster" in caplog.messages[0]


def test_no_thread_of_a_computation_meets_a_denormal():
    left = []

    def compute():
        flush_denormals()
        left.append(int((torch.full((1 << 22,), 1.2e-38) * 0.1).count_nonzero()))

    thread = threading.Thread(target=compute)  # with threads of its own to compute with
    thread.start()
    thread.join()
    assert left == [0]
