"""What an engine can do when its drafter has to change is read from the engine, and why not is said."""

from types import SimpleNamespace

import pytest

from serving.engine.capability import Capability, capability
from serving.errors import ServingError


def worker(**changes):
    """An eager V1 engine on one CPU, but for what a test changes."""
    config = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    config["_api_process_count"] = changes.pop("api_servers", 1)
    config |= {key: changes.pop(key) for key in list(changes) if key in config}
    eager, device, method = changes.pop("eager", True), changes.pop("device", "cpu"), changes.pop("method", "dflash")
    proposer = SimpleNamespace(model=object(), _draft_attn_layer_names={"layers.6"})
    runner = changes.pop("runner", SimpleNamespace(drafter=proposer))
    return SimpleNamespace(
        model_runner=runner,
        vllm_config=SimpleNamespace(
            speculative_config=method and SimpleNamespace(method=method),
            parallel_config=SimpleNamespace(**config),
            model_config=SimpleNamespace(enforce_eager=eager),
            device_config=SimpleNamespace(device_type=device),
        ),
    )


def test_an_eager_engine_replaces_modules():
    assert capability(worker()) == Capability("replace", None)
    assert capability(worker(device="cuda")) == Capability("replace", None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tensor_parallel_size": 2}, "shards"),
        ({"pipeline_parallel_size": 2}, "shards"),
        ({"data_parallel_size": 2}, "only the first engine's answer"),
        ({"api_servers": 4}, "4 API servers each have a door"),
        ({"eager": False}, "compiles"),
        ({"eager": False, "device": "cuda"}, "CUDA graphs"),
        ({"runner": SimpleNamespace(speculator=SimpleNamespace(model=object()))}, "V2 model runner"),
    ],
)
def test_where_it_is_not_proven_the_reason_and_the_restart_are_named(changes, why):
    found = capability(worker(**changes))
    assert found.how is None and why in found.reason and found.reason.endswith("restart it with the new drafter")


def test_captured_graphs_are_written_into_where_someone_asked_for_what_is_not_proven(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_SWAP_UNPROVEN", "1")
    assert capability(worker(eager=False, device="cuda")) == Capability("copy", None)
    assert capability(worker(eager=False)).how is None, "a CPU's weights are repacked: nothing to write into"


@pytest.mark.parametrize("changes", [{"method": None}, {"method": "eagle3"}, {"runner": SimpleNamespace()}])
def test_an_engine_without_a_drafter_has_nothing_to_change(changes):
    with pytest.raises(ServingError):
        capability(worker(**changes))
