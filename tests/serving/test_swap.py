"""The swap in a real engine: greedy tokens stay, acceptance and live weights change, failures leave the old one."""

import gc
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_drafter, tiny_target

from serving.preflight import sha256_file

FREQUENT = 433  # what this target says most
PROMPTS = [[0, 5, 20 + i, 30 + i, 40] for i in range(4)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    root = tmp_path_factory.mktemp("engine")
    target = tiny_target(root / "target")
    first = tiny_drafter(root / "v1", target, seed=1)
    second = tiny_drafter(root / "v2", target, proposes=FREQUENT, seed=2)
    patch = pytest.MonkeyPatch()
    patch.setenv("SLIPSTREAM_DRAFTER_VERSION", "1")
    llm = LLM(
        str(target),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 28,
        speculative_config={"method": "dflash", "model": str(first), "num_speculative_tokens": 3},
        worker_extension_cls="serving.engine.swap.DrafterSwap",
    )
    yield SimpleNamespace(llm=llm, root=root, folders={"1": first, "2": second})
    patch.undo()
    del llm
    cleanup_dist_env_and_memory()


@pytest.fixture
def serving_1(engine):
    """Version 1 serves before and after the test."""
    yield engine
    if (now := status(engine)["version"]) != "1":
        assert swap(engine, "1", expected=now)["status"] == "ok"


def status(engine):
    (reply,) = engine.llm.collective_rpc("slipstream_status")
    return reply


def put_back(engine, swap_call, version, num_swaps):
    (reply,) = engine.llm.collective_rpc("slipstream_put_back", args=(swap_call, version, num_swaps))
    return reply


def swap(engine, version, *, expected, folder=None, sha256=None, call=""):
    folder = folder or engine.folders[version]
    sha256 = sha256 or sha256_file(folder / "model.safetensors")
    (reply,) = engine.llm.collective_rpc("slipstream_swap", args=(str(folder), version, sha256, expected, None, call))
    return reply


def generate(engine):
    """Greedy tokens of the prompts, and how many drafts of how many steps were accepted."""
    from vllm import SamplingParams

    def counts():
        metrics = {
            m.name: m.value for m in engine.llm.get_metrics() if m.name.startswith("vllm:spec") and "pos" not in m.name
        }
        return metrics["vllm:spec_decode_num_drafts"], metrics["vllm:spec_decode_num_accepted_tokens"]

    steps, accepted = counts()
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    outputs = engine.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    after = counts()
    return [list(o.outputs[0].token_ids) for o in outputs], after[0] - steps, after[1] - accepted


def test_a_swap_there_and_back_changes_acceptance_and_weights_but_no_greedy_token(serving_1):
    before, first_status = generate(serving_1), status(serving_1)
    there = swap(serving_1, "2", expected="1")
    during = generate(serving_1)
    back = swap(serving_1, "1", expected="2")
    after = generate(serving_1)
    assert (there["status"], there["previous"], there["version"]) == ("ok", "1", "2")
    assert (back["status"], back["version"]) == ("ok", "1")
    assert before[0] == during[0] == after[0]
    assert during[2] > before[2] + 10, "a drafter that proposes the frequent token must be accepted more often"
    assert after[1:] == before[1:], "version 1 drafts as it did"
    assert there["live_fingerprint"] != first_status["live_fingerprint"] == back["live_fingerprint"]


def test_a_loaded_version_drafts_as_a_fresh_engine_would(serving_1):
    # Every slot of this drafter proposes one token by construction, so its acceptance is known from the tokens:
    # at each step the run of that token after the anchor, three at most.
    swap(serving_1, "2", expected="1")
    tokens, steps, accepted = generate(serving_1)
    want_steps = want_accepted = 0
    for reply in tokens:
        position = 1  # the first token is the prefill's
        while position < len(reply):
            run = 0
            while run < 3 and position + run < len(reply) and reply[position + run] == FREQUENT:
                run += 1
            want_steps, want_accepted, position = want_steps + 1, want_accepted + run, position + run + 1
    assert abs(steps - want_steps) <= len(PROMPTS)  # the engine may run one step past the limit
    assert abs(accepted - want_accepted) <= 3 * len(PROMPTS)
    assert want_accepted > 10


@pytest.mark.parametrize("bad", ["stale version", "other hash", "broken weights", "other config"])
def test_a_refused_swap_leaves_the_old_drafter_serving(serving_1, bad, tmp_path):
    before = status(serving_1)
    folder = shutil.copytree(serving_1.folders["2"], tmp_path / "v2")
    settings = {"folder": folder, "expected": "1"}
    if bad == "stale version":
        settings["expected"] = "7"
    elif bad == "other hash":
        settings["sha256"] = "0" * 64
    elif bad == "broken weights":
        tensors = load_file(folder / "model.safetensors")
        tensors["norm.weight"][3] = float("nan")
        save_file(tensors, folder / "model.safetensors")
    else:
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    reply = swap(serving_1, "2", **settings)
    assert reply["status"] == "refused" and reply["reason"]
    assert status(serving_1) == before


@pytest.mark.parametrize("when", ["load", "verify"])
def test_a_swap_that_fails_midway_puts_everything_back(serving_1, when, monkeypatch):
    from vllm.v1.spec_decode.dflash import DFlashProposer

    import serving.engine.swap as swap_module

    before, tokens = status(serving_1), generate(serving_1)
    if when == "load":

        def load_half(self, target):
            self.model = None
            raise RuntimeError("the disk went away")

        monkeypatch.setattr(DFlashProposer, "load_model", load_half)
    else:
        monkeypatch.setattr(swap_module, "mismatches", lambda *_: ["fc is off by 1"])
    reply = swap(serving_1, "2", expected="1")
    monkeypatch.undo()
    assert reply["status"] == "failed" and "version 1 is back" in reply["reason"]
    assert status(serving_1) == before
    assert generate(serving_1) == tokens


def test_a_load_that_keeps_the_old_weights_is_noticed(serving_1, monkeypatch):
    # vllm-project/vllm PR 46725: the update says success and the drafter keeps its weights.
    from vllm.v1.spec_decode.dflash import DFlashProposer

    load = DFlashProposer.load_model

    def load_the_old_one(self, target):
        self.speculative_config.draft_model_config.model = str(serving_1.folders["1"])
        load(self, target)

    monkeypatch.setattr(DFlashProposer, "load_model", load_the_old_one)
    reply = swap(serving_1, "2", expected="1")
    assert reply["status"] == "failed" and "live weights are not the file's" in reply["reason"]
    assert status(serving_1)["version"] == "1"


def test_a_stale_fused_buffer_is_noticed(serving_1, monkeypatch):
    from vllm.v1.spec_decode.dflash import DFlashProposer

    load = DFlashProposer.load_model

    def keep_old_fused_weights(self, target):
        old = self.model.model._fused_kv_weight
        load(self, target)
        self.model.model._fused_kv_weight = old

    monkeypatch.setattr(DFlashProposer, "load_model", keep_old_fused_weights)
    reply = swap(serving_1, "2", expected="1")
    assert reply["status"] == "failed" and "fused_kv_weight" in reply["reason"]


def test_the_live_values_are_the_files_tensors(serving_1):
    from serving.engine.live_weights import live_values, mismatches

    proposer = serving_1.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    file = load_file(serving_1.folders["1"] / "model.safetensors")
    live = dict(live_values(proposer.model))
    gate_up = torch.cat([file["layers.1.mlp.gate_proj.weight"], file["layers.1.mlp.up_proj.weight"]])
    assert torch.equal(live["layers.1.gate_up_proj"], gate_up.T)
    assert torch.equal(live["layers.0.o_proj"], file["layers.0.self_attn.o_proj.weight"].T)
    assert mismatches(proposer.model, serving_1.folders["1"] / "model.safetensors") == []
    assert len(mismatches(proposer.model, serving_1.folders["2"] / "model.safetensors")) > 5


def test_no_drafter_stays_in_memory_once_another_has_proved_itself(serving_1):
    runner = serving_1.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    replaced = []
    for old, new in (("1", "2"), ("2", "1")) * 3:
        replaced.append(weakref.ref(runner.drafter.model))
        assert swap(serving_1, new, expected=old)["status"] == "ok"
    gc.collect()
    assert [one() is None for one in replaced] == [True] * 5 + [False], "the last is held for the way back"
    serving_1.llm.collective_rpc("slipstream_commit", args=("",))
    gc.collect()
    assert replaced[-1]() is None


def test_what_was_replaced_comes_back_from_memory_whole_and_counts_as_two_swaps(serving_1, tmp_path):
    tokens, before = generate(serving_1), status(serving_1)
    elsewhere = shutil.copytree(serving_1.folders["1"], tmp_path / "1")
    assert swap(serving_1, "2", expected="1", call="there")["status"] == "ok"
    shutil.rmtree(serving_1.folders["1"])
    try:
        back = put_back(serving_1, "another swap", "1", before["num_swaps"] + 2)
        assert (back["status"], back["version"]) == ("refused", "2")
        back = put_back(serving_1, "there", "1", before["num_swaps"] + 2)
    finally:
        shutil.copytree(elsewhere, serving_1.folders["1"])
    assert back["status"] == "ok"
    assert status(serving_1) == before | {"num_swaps": before["num_swaps"] + 2}
    assert generate(serving_1) == tokens
    again = put_back(serving_1, "there", "1", before["num_swaps"] + 4)
    assert again["status"] == "ok", "a worker that serves it already counts like the others"
    assert status(serving_1)["num_swaps"] == before["num_swaps"] + 4


def test_one_swap_runs_at_a_time(serving_1):
    import serving.engine.swap as swap_module

    with swap_module._one_at_a_time:
        reply = swap(serving_1, "2", expected="1")
    assert reply["status"] == "refused" and "another swap" in reply["reason"]


def test_what_the_engine_can_do_is_told_before_it_is_asked_to(serving_1):
    assert status(serving_1)["swap"] == {"how": "replace", "reason": None}


def test_an_order_that_knows_of_fewer_swaps_than_there_were_is_an_old_one(serving_1):
    # Compare-and-set on the version alone takes a repeated order for a new one once the old version is back.
    known = status(serving_1)["num_swaps"]
    folder, sha256 = serving_1.folders["2"], sha256_file(serving_1.folders["2"] / "model.safetensors")
    order = (str(folder), "2", sha256, "1", known)
    (first,) = serving_1.llm.collective_rpc("slipstream_swap", args=order)
    back = swap(serving_1, "1", expected="2")
    (again,) = serving_1.llm.collective_rpc("slipstream_swap", args=order)
    assert (first["status"], back["status"], again["status"]) == ("ok", "ok", "refused")
    assert f"{known + 2} swaps so far" in again["reason"]


def test_every_answer_names_the_call_that_it_answers(serving_1):
    (told,) = serving_1.llm.collective_rpc("slipstream_status", args=("a7",))
    folder = str(serving_1.folders["2"])
    (refused,) = serving_1.llm.collective_rpc("slipstream_swap", args=(folder, "2", "0" * 64, "1", None, "b8"))
    assert (told["call"], refused["call"], refused["status"]) == ("a7", "b8", "refused")


def test_weights_that_were_lost_while_serving_are_noticed_and_the_version_can_be_swapped_in_again(serving_1):
    # vllm-project/vllm PR 52487: after a deep sleep the drafter's weights are not restored.
    drafter = serving_1.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    before, tokens = status(serving_1), generate(serving_1)
    drafter.model.model.norm.weight.data.zero_()
    (told,) = serving_1.llm.collective_rpc("slipstream_status", args=("", True))
    assert told["status"] == "failed" and "no longer version 1's" in told["reason"]
    assert swap(serving_1, "1", expected="1")["status"] == "ok"
    (told,) = serving_1.llm.collective_rpc("slipstream_status", args=("", True))
    assert told["status"] == "ok" and told["live_fingerprint"] == before["live_fingerprint"]
    assert generate(serving_1) == tokens


def test_a_folder_that_is_written_while_it_is_loaded_is_not_served(serving_1, tmp_path, monkeypatch):
    import serving.engine.swap as swap_module

    folder = shutil.copytree(serving_1.folders["2"], tmp_path / "v2")
    verify = swap_module._verify

    def verify_then_touch(model, path):
        verify(model, path)
        (path / "model.safetensors").touch()

    monkeypatch.setattr(swap_module, "_verify", verify_then_touch)
    reply = swap(serving_1, "2", expected="1", folder=folder)
    assert reply["status"] == "failed" and "was written while it was loaded" in reply["reason"]
    assert status(serving_1)["version"] == "1"


def test_files_are_read_before_the_swap_and_in_it_only_where_they_changed_since(serving_1, tmp_path, monkeypatch):
    import serving.engine.checked_file as checked_file

    folder = shutil.copytree(serving_1.folders["2"], tmp_path / "v2")
    sha256 = sha256_file(folder / "model.safetensors")
    check, reads = checked_file.check_drafter, []

    def counted(*arguments, **settings):
        reads.append(threading.current_thread() is threading.main_thread())
        return check(*arguments, **settings)

    def checked(sha256):
        deadline = time.monotonic() + 60
        while reply := serving_1.llm.collective_rpc("slipstream_check", args=(str(folder), sha256))[0]:
            if reply["status"] != "running":
                return reply
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(checked_file, "check_drafter", counted)
    refused = checked("0" * 64)
    assert refused["status"] == "refused" and "sha256" in refused["reason"]
    assert checked(sha256)["status"] == "ok" and reads == [False, False]
    assert swap(serving_1, "2", expected="1", folder=folder)["status"] == "ok"
    assert reads == [False, False], "the swap reads what it loads, and no more"
    assert swap(serving_1, "1", expected="2")["status"] == "ok" and reads == [False, False, True]
    assert checked(sha256)["status"] == "ok"
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    refused = swap(serving_1, "2", expected="1", folder=folder, sha256=sha256)
    assert refused["status"] == "refused" and "not_finite" in refused["reason"]


def test_an_engine_that_compiles_is_refused_by_name(serving_1):
    config = serving_1.llm.llm_engine.vllm_config.model_config
    config.enforce_eager = False
    try:
        reply = swap(serving_1, "2", expected="1")
    finally:
        config.enforce_eager = True
    assert reply["status"] == "refused" and "restart" in reply["reason"] and "compiles" in reply["reason"]
    assert reply["swap"]["how"] is None and reply["version"] == "1"
