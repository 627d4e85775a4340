"""Speed against concurrency, from scripted servers whose every time is known."""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pipeline import speed
from pipeline.artifacts import DrafterCheckpoint, TargetFingerprint
from pipeline.config import Config
from pipeline.errors import ConfigError, FingerprintError, StageError
from pipeline.gate_prompts import GatePrompts
from pipeline.speed_plan import plan_of
from pipeline.speed_points import batch_size_schedule, pays_up_to, recommend
from pipeline.stages import Artifact

# Tokens/s by (speculated tokens, concurrency): speculation pays at 1 and 4 requests, at 4 with a shorter draft.
SPEED = {
    (0, 1): 10,
    (3, 1): 20,
    (7, 1): 30,
    (0, 4): 40,
    (3, 4): 60,
    (7, 4): 50,
    (0, 16): 160,
    (3, 16): 120,
    (7, 16): 90,
}


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


@dataclass
class ScriptedServers:
    """Every request emits 10 tokens; ``reply(speculated, prompt, concurrency)`` are the greedy ids."""

    reply: object = lambda number, prompt, concurrency: [*prompt, 1, 2]
    slowdown: object = lambda visit: 1.0
    dtype: str = "float32"
    fails_in_visit: int | None = None
    starts: list = field(default_factory=list)
    loads: list = field(default_factory=list)
    open: int = 0

    @contextmanager
    def __call__(self, number):
        assert self.open == 0, "a machine may have one accelerator"
        self.starts.append(number)
        self.open += 1
        try:
            yield SimpleNamespace(
                load=lambda prompts, **settings: self._load(number, prompts, **settings),
                answer=lambda requests, concurrency: self._answer(number, requests, concurrency),
                settings=lambda: {"dtype": self.dtype, "speculation": {"num_speculative_tokens": number}},
            )
        finally:
            self.open -= 1

    def _load(self, number, prompts, *, concurrency, max_tokens):
        visit = len(self.starts) - 1
        if self.fails_in_visit == visit and concurrency == 4:
            raise Killed
        self.loads.append((number, concurrency, max_tokens, [tuple(p) for p in prompts]))
        n = len(prompts)
        wall_s = 10 * n / SPEED[number, concurrency] * self.slowdown(visit)
        drafts = 4 * n if number else 0
        return SimpleNamespace(
            num_requests=n, num_tokens=10 * n, wall_s=wall_s, ttft_s=[0.1] * n, itl_s=[0.01, 0.01, 0.05] * n,
            num_drafts=drafts, num_accepted_tokens=drafts // 2,
        )  # fmt: skip

    def _answer(self, number, requests, concurrency):
        assert all(r["temperature"] == 0.0 and r["return_token_ids"] for r in requests)
        ids = (self.reply(number, r["prompt"], concurrency) for r in requests)
        return [SimpleNamespace(token_ids=one, error=None) for one in ids]


def config(root, **tables):
    measured = {"concurrencies": [1, 4, 16], "num_speculative_tokens": [3, 7], "requests_per_slot": 2}
    return Config.model_validate(
        {
            "root": root,
            "target": {"model": root / "target", "max_model_len": 64, "dtype": tables.pop("dtype", "float32")},
            "evaluate": {"concurrency": 4, "max_tokens": 16},
            "speed": {**measured, "lossless_prompts": 5, **tables},
        }
    )


def gate_prompts(num=6, length=3, **settings):
    rows = [
        {"row_id": f"r{i}", "prompt_ids": [i] * length, "num_tokens": 16, "sampling": {}, "slices": "{}"}
        for i in range(num)
    ]
    return GatePrompts(gate=rows, general=[], warm_up=[], parents={"responses": "abc"}, fingerprint=None, **settings)


def drafter(root, block_size=8, fingerprint=None):
    manifest = DrafterCheckpoint(
        derivation_id="d1",
        parents={},
        role="challenger",
        block_size=block_size,
        mask_token_id=2,
        fingerprint=fingerprint,
    )
    return Artifact(root / "drafter", manifest)


def test_points_are_ratios_of_sums_over_the_repeats(tmp_path):
    # The second half of the visits takes three times as long: tokens/s is all tokens over all seconds.
    servers = ScriptedServers(slowdown=lambda visit: 1.0 if visit < 3 else 3.0)
    manifest = speed.run(config(tmp_path), drafter(tmp_path), gate_prompts(), servers=servers).manifest
    assert len(manifest.points) == 9
    for point in manifest.points:
        number, concurrency = point["num_speculative_tokens"], point["concurrency"]
        once = SPEED[number, concurrency]
        assert point["num_requests"] == 2 * 2 * concurrency
        assert point["tokens_per_s"] == pytest.approx(2 * once / (1 + 3))
        assert point["tokens_per_s_by_repeat"] == pytest.approx([once, once / 3])
        times = [point[name] for name in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")]
        assert times == pytest.approx([0.1, 0.1, 0.01, 0.05]), "a third of the gaps are the long ones"
        assert point.get("acceptance_length") == (1.5 if number else None)
    assert manifest.recommended == {"1": 7, "4": 3, "16": 0}
    assert manifest.parents == {"drafter": "d1", "responses": "abc"}


def test_the_servers_take_turns_in_opposite_order_and_meet_the_same_prompts(tmp_path):
    servers = ScriptedServers()
    speed.run(config(tmp_path), drafter(tmp_path), gate_prompts(num=6), servers=servers)
    assert servers.starts == [0, 3, 7, 7, 3, 0]
    asked = {}
    for (_, concurrency, max_tokens, prompts), repeat in zip(servers.loads, [0] * 9 + [1] * 9, strict=True):
        assert max_tokens == 16
        asked.setdefault((concurrency, repeat), set()).add(tuple(prompts))
    assert all(len(different) == 1 for different in asked.values()), "one list of prompts a point, whoever serves"
    assert asked[1, 0] != asked[1, 1], "another repeat takes other prompts where there are enough"


def test_a_killed_measurement_goes_on_at_the_visit_it_was_in(tmp_path):
    killed = ScriptedServers(fails_in_visit=3)
    with pytest.raises(Killed):
        speed.run(config(tmp_path), drafter(tmp_path), gate_prompts(), servers=killed)
    again = ScriptedServers()
    resumed = speed.run(config(tmp_path), drafter(tmp_path), gate_prompts(), servers=again).manifest
    assert again.starts == [7, 3, 0], "three visits were kept"
    whole = speed.run(config(tmp_path / "whole"), drafter(tmp_path), gate_prompts(), servers=ScriptedServers()).manifest
    assert (resumed.points, resumed.lossless) == (whole.points, whole.lossless)
    nobody = ScriptedServers()
    speed.run(config(tmp_path), drafter(tmp_path), gate_prompts(), servers=nobody)
    assert nobody.starts == [], "complete work starts no server"


def test_what_is_kept_holds_no_token_of_a_prompt_or_a_reply(tmp_path):
    secret = 4242424
    prompts = gate_prompts()
    for row in prompts.gate:
        row["prompt_ids"] = [secret, secret]
    found = speed.run(config(tmp_path), drafter(tmp_path), prompts, servers=ScriptedServers())
    assert not [path for path in found.folder.iterdir() if str(secret) in path.read_text()]


def test_case_72_a_reply_that_speculation_changes_is_counted(tmp_path):
    def reply(number, prompt, concurrency):
        return [9] if number == 7 and prompt[0] in (1, 3) else [*prompt, 1, 2]

    manifest = speed.run(
        config(tmp_path), drafter(tmp_path), gate_prompts(), servers=ScriptedServers(reply=reply)
    ).manifest
    assert manifest.lossless == {
        "num_prompts": 5, "num_different": 2, "num_different_by_speculated": {"3": 0, "7": 2}, "dtype": "float32",
    }  # fmt: skip


def test_in_half_precision_the_target_alone_is_compared_with_itself_in_the_shape_of_a_verification(tmp_path):
    seen = set()

    def reply(number, prompt, concurrency):
        seen.add((number, concurrency))
        return [number and 1, concurrency, *prompt] if prompt[0] == 2 else prompt

    servers = ScriptedServers(reply=reply, dtype="bfloat16")
    lossless = speed.run(
        config(tmp_path, dtype="bfloat16"), drafter(tmp_path), gate_prompts(), servers=servers
    ).manifest.lossless
    assert (lossless["num_different"], lossless["num_different_plain"], lossless["dtype"]) == (1, 1, "bfloat16")
    assert {(0, 8), (0, 1), (3, 1), (7, 1)} <= seen, "eight tokens a verification of seven drafts: eight requests"


def test_more_tokens_than_a_block_are_refused_before_a_server_starts(tmp_path):
    servers = ScriptedServers()
    with pytest.raises(ConfigError, match=r"has \[8\]: a block of 8 holds 1 to 7"):
        speed.run(config(tmp_path, num_speculative_tokens=[3, 8]), drafter(tmp_path), gate_prompts(), servers=servers)
    assert servers.starts == []


def test_a_drafter_is_swept_at_its_own_number_by_default_and_the_target_alone_always(tmp_path):
    plan = plan_of(config(tmp_path, num_speculative_tokens=[]), gate_prompts(), block_size=8)
    assert plan.visits == [0, 7, 7, 0]
    assert plan.concurrencies == (1, 4, 16)


def test_prompts_without_room_are_left_out_and_none_at_all_is_an_error(tmp_path):
    prompts = gate_prompts()
    prompts.gate[0]["prompt_ids"] = [0] * 41  # 41 + 16 + a block of 8 is over 64
    assert len(plan_of(config(tmp_path), prompts, block_size=8).rows) == 5
    with pytest.raises(StageError, match="none of 6 gate prompts leaves room for 16 tokens in 64"):
        plan_of(config(tmp_path), gate_prompts(length=41), block_size=8)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    target = TargetFingerprint(
        config="a", tokenizer="a", chat_template="a", weights="a", dtype="float32", target_layer_ids=(1,)
    )
    prompts = GatePrompts([{"prompt_ids": [1]}], [], [], {}, target.model_copy(update={"weights": "b"}))
    with pytest.raises(FingerprintError, match="weights: a != b"):
        speed.run(config(tmp_path), drafter(tmp_path, fingerprint=target), prompts, servers=ScriptedServers())


def test_servers_with_other_settings_are_not_compared(tmp_path):
    servers = ScriptedServers()
    changing = iter(["float32", "bfloat16"] * 9)
    with pytest.raises(FingerprintError, match="dtype: 'float32' != 'bfloat16'"):
        speed.run(config(tmp_path), drafter(tmp_path), gate_prompts(), servers=_with_dtypes(servers, changing))


def _with_dtypes(servers, dtypes):
    @contextmanager
    def start(number):
        servers.dtype = next(dtypes)
        with servers(number) as server:
            yield server

    return start


def test_recommended_is_the_fastest_and_of_equals_the_smallest():
    points = [{"num_speculative_tokens": k, "concurrency": c, "tokens_per_s": v} for (k, c), v in SPEED.items()]
    assert recommend(points) == {"1": 7, "4": 3, "16": 0}
    assert recommend([{**point, "tokens_per_s": 5} for point in points]) == {"1": 0, "4": 0, "16": 0}


@pytest.mark.parametrize(
    ("recommended", "up_to"),
    [({"1": 7, "4": 3, "16": 0}, 4), ({"2": 0, "4": 0}, 0), ({"1": 7, "16": 3}, None), ({"1": 3, "4": 0, "16": 3}, 1)],
)
def test_speculation_pays_up_to_the_last_concurrency_before_the_target_alone_is_faster(recommended, up_to):
    assert pays_up_to(recommended) == up_to


@pytest.mark.parametrize(
    ("recommended", "schedule"),
    [
        ({"1": 7, "4": 3, "16": 0}, [[1, 2, 7], [3, 8, 3], [9, 16, 0]]),
        ({"4": 3, "16": 3}, [[1, 16, 3]]),
        ({"1": 7, "2": 3}, [[1, 1, 7], [2, 2, 3]]),
        ({"8": 0}, [[1, 8, 0]]),
    ],
)
def test_the_schedule_covers_every_batch_size_from_one_without_overlap(recommended, schedule):
    assert batch_size_schedule(recommended) == schedule


def test_the_schedule_is_one_that_vllm_takes():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    schedule = json.loads(json.dumps(batch_size_schedule({"1": 7, "4": 3, "16": 0})))
    lookup = build_dynamic_sd_schedule_lookup(schedule, 20, 7)
    assert (lookup[1], lookup[4], lookup[16], lookup[20]) == (7, 3, 0, 0)
