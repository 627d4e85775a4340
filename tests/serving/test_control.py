"""The control endpoint over a scripted engine client: who may swap, what is refused, and that it always resumes."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from tiny import tiny_drafter

from serving.control import ControlEndpoint
from serving.preflight import sha256_file

TARGET = {
    "hidden_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
TOKEN = "a long secret"
IN_PLACE = {"how": "replace", "reason": None}


class ScriptedEngine:
    """The protocol of vLLM's engine client that the endpoint uses, with two workers and a log of calls."""

    def __init__(self, folder):
        hf_config = SimpleNamespace(to_dict=lambda: TARGET)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf_config, dtype="torch.float32"),
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            parallel_config=SimpleNamespace(worker_extension_cls="serving.engine.swap.DrafterSwap"),
        )
        sha256 = sha256_file(folder / "model.safetensors")
        serving = {"version": "1", "folder": str(folder), "sha256": sha256, "live_fingerprint": "f1", "num_swaps": 0}
        self.workers = [{**serving, "started": "aa", "since": 1.0, "swap": IN_PLACE} for _ in range(2)]
        self.calls, self.paused, self.fail_on, self.broken_workers = [], False, None, ()
        self.swap_gate = self.left_behind = None
        self.replies = {}  # version -> what the probes get
        self.drafts = True

    def _note(self, name):
        self.calls.append(name)
        if self.fail_on == name:
            raise RuntimeError(f"{name} broke")

    async def pause_generation(self, *, mode, clear_cache):
        assert clear_cache is False
        self.paused = True
        self._note("pause" if mode == "keep" else f"pause {mode}")
        if mode == "wait" and self.swap_gate is not None:
            await self.swap_gate.wait()

    async def resume_generation(self):
        self.calls.append("resume")
        self.paused = False

    async def is_paused(self):
        return self.paused

    async def reset_prefix_cache(self):
        self._note("reset")
        return True

    async def generate(self, prompt, params, request_id):
        self.calls.append("probe")
        assert not self.paused, "a paused engine generates nothing"
        version = self.workers[0]["version"]
        counts = SimpleNamespace(histogram=[2, 1] if self.drafts or version == "1" else [])
        ids = self.replies.get(version, [7, 8, 9, 10, 11, 12, 13, 14])
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, spec_decode_metrics=counts)])

    async def collective_rpc(self, method, args=()):
        self._note(method)
        if method == "slipstream_swap":
            if self.swap_gate is not None:
                await self.swap_gate.wait()
            answers = [self._swap(rank, worker, *args) for rank, worker in enumerate(self.workers)]
        else:
            answers = [
                {"status": "ok", "reason": None, "rank": rank, **w, "call": args[0]}
                for rank, w in enumerate(self.workers)
            ]
        if self.left_behind is not None:  # the second worker's queue holds an answer that nobody read
            answers[1], self.left_behind = self.left_behind, answers[1]
        return answers

    def _swap(self, rank, worker, folder, version, sha256, expected, expected_swaps, call):
        told = {"reason": None, "rank": rank, "call": call}
        if worker["version"] != expected or expected_swaps not in (None, worker["num_swaps"]):
            return {"status": "refused", **worker, **told, "reason": "other version"}
        if rank in self.broken_workers and version == "2":
            return {"status": "failed", **worker, **told, "reason": "no memory"}
        worker.update(version=version, folder=folder, sha256=sha256, live_fingerprint=f"f{version}")
        worker["num_swaps"] += 1
        return {"status": "ok", **worker, **told}


@pytest.fixture
def drafters(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    return {v: tiny_drafter(tmp_path / "versions" / v, target, seed=int(v)) for v in ("1", "2")}


@pytest.fixture
def served(drafters, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CONTROL_TOKEN", TOKEN)
    monkeypatch.setenv("SLIPSTREAM_DRAFTER_ROOTS", str(tmp_path / "versions"))
    return build(drafters)


def build(drafters):
    engine = ScriptedEngine(drafters["1"])
    state = SimpleNamespace(engine_client=engine)

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    endpoint = ControlEndpoint(inner)

    async def app(scope, receive, send):
        scope["app"] = SimpleNamespace(state=state)
        await endpoint(scope, receive, send)

    return SimpleNamespace(engine=engine, app=app, state=state, drafters=drafters)


def order(served, version="2", expected="1"):
    folder = served.drafters[version]
    return {
        "folder": str(folder),
        "version": version,
        "sha256": sha256_file(folder / "model.safetensors"),
        "expected_version": expected,
    }


async def call(served, method, path, *, token=TOKEN, body=None, content=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://x") as client:
        return await client.request(method, path, headers=headers, json=body, content=content)


def ask(served, method, path, **settings):
    return asyncio.run(call(served, method, path, **settings))


def test_the_prefix_cache_is_emptied_on_request(served):
    reply = ask(served, "POST", "/slipstream/reset", body={})
    assert (reply.status_code, reply.json()["prefix_cache_reset"]) == (200, True)
    assert served.engine.calls == ["reset"]
    assert ask(served, "POST", "/slipstream/reset", body={}, token="another").status_code == 401


def steps(served):
    return [c for c in served.engine.calls if c != "slipstream_status"]


PROBED = ["probe", "probe"]


def test_a_swap_probes_pauses_swaps_resets_resumes_and_probes_in_this_order(served):
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | {"prefix_cache": "clear"})
    assert reply.status_code == 200
    body = reply.json()
    assert (body["version"], body["previous"], body["live_fingerprint"]) == ("2", "1", ["f2", "f2"])
    assert body["pause_s"] >= 0 and body["prefix_cache_reset"] is True
    assert steps(served) == [*PROBED, "pause", "slipstream_swap", "reset", "resume", *PROBED]
    assert body["probe"]["after"] == {"num_steps": 6, "num_accepted_tokens": 2}
    assert (body["how"], body["epoch"]) == ("in_place", "aa.1")
    assert served.state.slipstream_drafter_version == "2"


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
def test_without_the_token_nothing_is_answered(served, token):
    for method, path in (("GET", "/slipstream/status"), ("POST", "/slipstream/swap")):
        assert ask(served, method, path, token=token).status_code == 401
    assert served.engine.calls == []


def test_without_a_configured_token_the_endpoint_is_off(drafters, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_CONTROL_TOKEN", raising=False)
    served = build(drafters)
    reply = ask(served, "GET", "/slipstream/status", token="")
    assert reply.status_code == 503 and "not configured" in reply.json()["reason"]


def test_other_routes_pass_through(served):
    assert ask(served, "GET", "/v1/models").status_code == 204
    assert ask(served, "GET", "/slipstream/other").status_code == 404


@pytest.mark.parametrize(
    ("http_status", "changes"),
    [
        (409, {"expected_version": "9"}),
        (409, {"sha256": "0" * 64}),
        (403, {"folder": "/etc"}),
        (403, {"folder": "versions/2"}),
        (400, {"version": ""}),
        (400, {"version": 2}),
        (400, {"extra": "x"}),
    ],
)
def test_an_order_that_cannot_be_right_is_refused_before_the_engine_pauses(served, http_status, changes):
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | changes)
    assert reply.status_code == http_status and reply.json()["status"] == "refused"
    assert "pause" not in served.engine.calls


def test_a_path_that_climbs_out_of_the_allowed_folder_is_refused(served):
    folder = str(served.drafters["2"].parent / ".." / ".." / "elsewhere")
    assert ask(served, "POST", "/slipstream/swap", body=order(served) | {"folder": folder}).status_code == 403


def test_a_body_that_is_too_large_or_no_json_is_refused(served):
    assert ask(served, "POST", "/slipstream/swap", content=b"x" * 70_000).status_code == 413
    assert ask(served, "POST", "/slipstream/swap", content=b"{").status_code == 400


def test_preflight_runs_before_the_engine_pauses_and_names_its_check(served):
    (served.drafters["2"] / "model.bin").write_bytes(b"x")
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert (reply.status_code, reply.json()["code"]) == (422, "pickle")
    assert "pause" not in served.engine.calls


@pytest.mark.parametrize("step", ["pause", "slipstream_swap", "reset"])
def test_the_engine_resumes_whatever_breaks(served, step):
    served.engine.fail_on = step
    reply = ask(served, "POST", "/slipstream/swap", body=order(served) | {"prefix_cache": "clear"})
    assert reply.status_code == 500 and "broke" in reply.json()["reason"]
    assert served.engine.paused is False and served.engine.calls.count("resume") == 1
    assert [w["version"] for w in served.engine.workers] == ["1", "1"]
    assert ask(served, "GET", "/slipstream/status").json()["door"] == "open"


def test_when_one_worker_fails_the_others_go_back(served):
    served.engine.broken_workers = (1,)
    reply = ask(served, "POST", "/slipstream/swap", body=order(served))
    assert reply.status_code == 500
    assert "worker 1: no memory" in reply.json()["reason"] and "serves again" in reply.json()["reason"]
    assert [w["version"] for w in served.engine.workers] == ["1", "1"]
    assert reply.json()["version"] == "1" and not served.engine.paused


def test_a_caller_that_hangs_up_does_not_leave_the_engine_paused(served):
    async def scenario():
        served.engine.swap_gate = asyncio.Event()
        request = asyncio.create_task(call(served, "POST", "/slipstream/swap", body=order(served)))
        while "slipstream_swap" not in served.engine.calls:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.sleep(0.01)
        served.engine.swap_gate.set()
        while "resume" not in served.engine.calls:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert not served.engine.paused and served.engine.workers[0]["version"] == "2"


def test_a_second_swap_at_the_same_time_is_refused(served):
    async def scenario():
        served.engine.swap_gate = asyncio.Event()
        first = asyncio.create_task(call(served, "POST", "/slipstream/swap", body=order(served)))
        while "slipstream_swap" not in served.engine.calls:
            await asyncio.sleep(0.01)
        second = await call(served, "POST", "/slipstream/swap", body=order(served))
        served.engine.swap_gate.set()
        return await first, second

    first, second = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert (first.status_code, second.status_code) == (200, 409)
    assert served.engine.calls.count("pause") == 1


def test_status_tells_when_workers_disagree(served):
    assert ask(served, "GET", "/slipstream/status").json()["status"] == "ok"
    served.engine.workers[1]["live_fingerprint"] = "other"
    assert ask(served, "GET", "/slipstream/status").json()["status"] == "failed"
