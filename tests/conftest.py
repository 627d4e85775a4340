"""Settings that must be in place before torch and vLLM are imported, and `import tiny` for every test."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

ENGINE = {
    # One thread: toys gain nothing from more, and threads that spin for each other cost ten times on busy cores.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# With a key drawn anew for each root, few subjects would now and then leave no row to choose by or to judge with.
KEYS = {"SLIPSTREAM_SPLIT_KEY": "the split key of these tests"}
for name, value in (ENGINE | KEYS).items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="module", autouse=True)
def no_ray_is_left():
    """Asked for data outside a session, Ray starts by itself, and the modules that follow would share that one."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(scope="module")
def restored_environment():
    """An in-process engine sets variables that must not reach the servers of other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
