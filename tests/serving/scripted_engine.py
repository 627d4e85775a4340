"""A scripted engine client behind the real control endpoint, and calls to it."""

import asyncio
from types import SimpleNamespace

import httpx

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
        self.held = {}  # rank -> (the swap's call, what served before)
        self.checks = []  # what the workers say of the files, one a call
        self.can_empty, self.sleeping = True, False
        self.replies = {}  # version -> what the probes get
        self.drafts = True

    def numbered(self):
        return enumerate(self.workers)

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

    async def is_sleeping(self):
        return self.sleeping

    async def reset_prefix_cache(self):
        self._note("reset")
        return self.can_empty

    async def generate(self, prompt, params, request_id):
        self.calls.append("probe")
        while self.paused:  # a paused engine generates nothing
            await asyncio.sleep(0.01)
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
        elif method == "slipstream_put_back":
            answers = [self._put_back(rank, worker, *args) for rank, worker in enumerate(self.workers)]
        elif method == "slipstream_check":
            word = self.checks.pop(0) if self.checks else "ok"
            answers = [{**w, "status": word, "reason": None, "rank": r, "call": args[-1]} for r, w in self.numbered()]
            answers[-1] |= {"reason": "sha256" if word == "refused" else None}
        elif method == "slipstream_commit":
            self.held = {rank: held for rank, held in self.held.items() if held[0] != args[0]}
            answers = [{"status": "ok", **w, "rank": rank, "call": args[1]} for rank, w in enumerate(self.workers)]
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
        self.held[rank] = (call, dict(worker))
        worker.update(version=version, folder=folder, sha256=sha256, live_fingerprint=f"f{version}")
        worker["num_swaps"] += 1
        return {"status": "ok", **worker, **told}

    def _put_back(self, rank, worker, swap, version, num_swaps, call):
        if rank in self.held and self.held[rank][0] == swap:
            worker.update(self.held.pop(rank)[1])
        worker["num_swaps"] = num_swaps
        is_back = worker["version"] == version
        told = {"reason": None if is_back else "not held", "rank": rank, "call": call}
        return {"status": "ok" if is_back else "refused", **worker, **told}


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

    return SimpleNamespace(engine=engine, app=app, state=state, drafters=drafters, endpoint=endpoint)


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


def steps(served):
    """What was asked of the engine, in order, but for what leaves it as it is."""
    return [c for c in served.engine.calls if c not in ("slipstream_status", "slipstream_check")]


async def until(condition):
    """Return once it holds."""
    async with asyncio.timeout(100):  # the first probe imports vLLM
        while not condition():
            await asyncio.sleep(0.01)
