"""Pages as the gate would write them, of every verdict: for tests, and for people who want to look at one."""

from collections.abc import Mapping
from typing import Any

from pipeline import report
from pipeline.artifacts import AcceptanceReport, SpeedReport, TargetFingerprint
from pipeline.bootstrap import Interval
from pipeline.criteria import Reason
from pipeline.positions import Position
from pipeline.power import Evidence
from pipeline.verdict import Verdict

NAN = float("nan")
ROUTES = {
    "route=address change": (1.39, 1.21, 1.55, 84),
    "route=cancel order": (1.65, 1.42, 1.88, 61),
    "route=returns": (1.08, 0.97, 1.19, 140),
    "tenant=acme": (1.50, 1.41, 1.60, 190),
    "tenant=globex-international-holdings-europe-middle-east-and-africa": (1.31, 1.18, 1.44, 95),
    "language=en": (1.52, 1.45, 1.60, 240),
    "language=de": (0.96, 0.91, 1.02, 41),
    "language=unknown": (1.10, 0.42, 2.90, 4),
    "length=≤128": (1.41, 1.33, 1.49, 150),
    "length=≤512": (1.47, 1.36, 1.58, 110),
    "length=≤2048": (1.38, 1.21, 1.56, 25),
    "temperature=≤0": (1.46, 1.40, 1.52, 285),
    "thinking=off": (1.49, 1.41, 1.57, 200),
    "thinking=on": (1.40, 1.29, 1.51, 85),
}


DECISIONS = {
    # decision: lift, its interval, tokens/s
    "promote": (1.46, 1.39, 1.54, 1.27),
    "hold": (1.04, 0.99, 1.09, 1.01),
    "reject": (0.93, 0.90, 0.96, 0.94),
    "cannot_say": (1.46, 1.39, 1.54, 1.27),
    "dont_speculate": (1.46, 1.39, 1.54, 1.03),
}


def sample_page(decision: str = "promote", **changed: Any) -> str:
    """The page of a verdict, complete: every part has something to show."""
    given = {
        "verdict": sample_verdict(decision),
        "report": sample_report(decision),
        "curves": sample_curves(),
        "title": "qwen3-8b--support-mails",
        "speed": sample_speed(),
        "policy_id": "9f2c01d4a7b3",
    } | changed
    return report.render(given.pop("verdict"), given.pop("report"), **given)


def sample_verdict(decision: str = "promote", **changed: Any) -> Verdict:
    """A verdict with reasons that lead to it."""
    ratio, low, high, faster = DECISIONS[decision]
    slices = {name: Interval(*one) for name, one in ROUTES.items()}
    fields = {
        "reasons": [*_passed(slices), *_failed(decision)],
        "comparisons": {
            "challenger/champion": Interval(ratio, low, high, 285),
            "control/champion": Interval(1.02, 1.00, 1.03, 285),
            "challenger/control": Interval(ratio / 1.02, low / 1.02, high / 1.02, 285),
        },
        "slices": slices,
        "general": Interval(0.98, 0.94, 1.02, 24),
        "speed": Interval(faster, faster - 0.05, faster + 0.06, 12),
        "tail": Interval(1.04, 0.98, 1.11, 12),
        "positions": [Position(k, 50_000 // 2**k, 0.4 - k / 50, 0.11) for k in range(1, 8)],
        "evidence": Evidence(285, 300, 0.4, 190),
        "level": 0.0125,
        "speed_level": 0.025,
        "looks": [0.25, 0.5],
        "gained": [_moved(i, "c0ffee", 1.1 + i / 20, 3.4 - i / 9) for i in range(10)],
        "lost": [_moved(i, "deadbe", 2.4 - i / 9, 1.1 + i / 20) for i in range(10)],
        "speculate_up_to": 8 if decision == "dont_speculate" else 32,
        "recommended": sample_speed().recommended,
    }
    return Verdict(decision, **{**fields, **changed})


def _moved(i: int, name: str, champion: float, challenger: float) -> dict[str, Any]:
    return {
        "row_id": f"{i:02d}{name}".ljust(32, "0"),
        "slices": ["language=en", "length=≤512", "route=returns"],
        "champion": champion,
        "challenger": challenger,
        "change": challenger - champion,
    }


def _failed(decision: str) -> list[Reason]:
    said = {
        "hold": (
            "lift",
            "1.040 × the champion's emitted tokens a step, 97.5% interval 0.990 to 1.090; must be above 1",
        ),
        "reject": ("lift", "0.930 × the champion's emitted tokens a step, 97.5% interval 0.900 to 0.960"),
        "cannot_say": ("environment", "champion accepts 0.110 drafts a step here, 1.320 when it was last measured"),
        "dont_speculate": ("speculation", "at concurrency 32 the drafter gives 0.91 × the target alone"),
    }
    if decision not in said:
        return [Reason("lift", "1.460 × the champion's emitted tokens a step", 1.46, 1.0, True)]
    code, message = said[decision]
    return [Reason(code, message, 0.91, 1.0, False, decision)]


def _passed(slices: Mapping[str, Interval]) -> list[Reason]:
    by_slice = [
        Reason(
            f"slice:{name}",
            f"slice {name}: {one.ratio:.3f} × ({one.low:.3f} to {one.high:.3f}) on {one.num_clusters} conversations",
            one.ratio,
            0.9,
            one.num_clusters >= 5 or None,
            "reject",
            one.low,
            one.high,
            one.num_clusters,
        )
        for name, one in slices.items()
    ]
    replies = "0 replies differ from the champion's (near-ties move with batch shapes: a sign only)"
    lossless = "0 of 16 replies differ between speculation on and off, 1 between two plain runs (p = 1)"
    return [
        Reason("clusters", "285 conversations, 30 are needed", 285, 30, True, "cannot_say", n=285),
        Reason("flagged", "1% of requests left out (loop), at most 20% may be", 0.013, 0.2, True, "cannot_say", n=300),
        *by_slice,
        Reason("general", "general prompts: 0.980 ×", 0.98, 0.9, True, "reject", 0.94, 1.02, 24),
        Reason("speed", "3772.9 tokens/s against 2970.4 at concurrency 32", 1.27, 0.95, True, "reject", 1.22, 1.33, 12),
        Reason(
            "tail", "99th percentile of the time between tokens: 1.04 ×", 1.04, 1.25, True, "reject", 0.98, 1.11, 12
        ),
        Reason("lossless", lossless, 0, 1, True, "reject", n=16),
        Reason("replies", replies, 0, 0, None, n=285),
        Reason("control", "1.430 × the control: above more training alone", 1.43, 1.0, None, None, 1.36, 1.52, 285),
    ]


def sample_report(decision: str = "promote", **changed: Any) -> AcceptanceReport:
    """Three drafters measured on 300 requests."""
    ratio, _, _, faster = DECISIONS[decision]
    fields = {
        "derivation_id": "feedc0de00000001",
        "parents": {
            "champion": "aaaa000000000001",
            "challenger": "bbbb000000000002",
            "control": "cccc000000000003",
            "responses": "dddd000000000004",
            "states": "eeee000000000005",
        },
        "fingerprint": TargetFingerprint(
            config="0f1e2d3c4b5a6978",
            tokenizer="1122334455667788",
            chat_template="8877665544332211",
            weights="99aabbccddeeff00",
            dtype="bfloat16",
            target_layer_ids=(1, 9, 17, 25, 33),
        ),
        "measured": {
            "champion": measured(1.11, 2970.4, 0.96),
            "challenger": measured(1.11 * ratio, 2970.4 * faster, 1.0),
            "control": measured(1.14, 2840.2, 0.98),
        },
        "settings": {
            "vllm": "0.25.0",
            "dtype": "bfloat16",
            "concurrency": 32,
            "max_tokens": 256,
            "sampling": {"temperature": 0.0},
            "prompts": "5ca1ab1e5ca1ab1e",
        },
        "versions": {"torch": "2.9.0", "vllm": "0.25.0", "transformers": "5.1.0"},
        "looks": [{"fraction": 0.25, "settled": None}, {"fraction": 0.5, "settled": None}],
        "drift": {"tokens_per_s": 1.01, "emitted_tokens_per_step": 1.0},
    }
    return AcceptanceReport(**{**fields, **changed})


def measured(length: float, tokens_per_s: float, latency: float) -> dict[str, Any]:
    """What a report holds of one role; ``latency`` scales its waits."""
    drafts, share = 50_000, 1 - 1 / (length + 0.02)
    per_position = [round(drafts * share ** (k + 1)) for k in range(7)]
    accepted = sum(per_position)
    counts = {"num_requests": 285, "num_tokens": 90_000, "num_drafts": drafts, "num_accepted_tokens": accepted}
    lengths = {"served_acceptance_length": 1 + accepted / drafts, "emitted_tokens_per_step": length}
    return {
        **counts,
        **lengths,
        "num_accepted_tokens_per_pos": per_position,
        "num_accepted_and_emitted": round(0.99 * accepted),
        "traffic": {"num_requests": 1900, **lengths},
        "tokens_per_s": tokens_per_s,
        "wall_s": 30.3,
        "num_replies_different": 0,
        "flagged": {"loop": 3, "overcount": 1},
        "walk": {"num_drafts": drafts, "num_accepted_tokens": round(1.01 * accepted)},
        "settings": {},
        "slices": {
            name: {"num_requests": one[3], "emitted_tokens_per_step": 1.2 * (one[0] if length > 1.5 else 1)}
            for name, one in ROUTES.items()
        },
        "general": {**counts, **lengths},
        "latency": {
            "ttft_p50_s": 0.041 * latency,
            "ttft_p99_s": 0.310 * latency,
            "itl_p50_s": 0.0123 * latency,
            "itl_p99_s": 0.0481 * latency,
        },
        "sittings": [],
    }


def sample_speed() -> SpeedReport:
    """Speculation pays up to 16 requests at a time, and less and less of it."""
    points = []
    for concurrency in (1, 2, 4, 8, 16, 32, 64):
        alone = 80 * concurrency / (1 + concurrency / 48)
        for k in (0, 3, 7, 15):
            gain = 1 if k == 0 else (1 + 0.36 * k**0.5) / (1 + k * concurrency / 160)
            points.append(
                {
                    "num_speculative_tokens": k,
                    "concurrency": concurrency,
                    "num_requests": 4 * concurrency,
                    "tokens_per_s": alone * gain,
                    "ttft_p50_s": 0.04,
                    "ttft_p99_s": 0.21 + concurrency / 200,
                    "itl_p50_s": concurrency / alone / gain,
                    "itl_p99_s": 3 * concurrency / alone / gain,
                    **({"acceptance_length": 1 + 0.36 * k**0.5} if k else {}),
                }
            )
    best: dict[int, dict[str, Any]] = {}
    for point in points:
        if point["tokens_per_s"] > best.get(point["concurrency"], {"tokens_per_s": 0})["tokens_per_s"]:
            best[point["concurrency"]] = point
    return SpeedReport(
        derivation_id="5beed00000000006",
        parents={"challenger": "bbbb000000000002"},
        points=points,
        recommended={str(c): point["num_speculative_tokens"] for c, point in best.items()},
        lossless={"num_prompts": 16, "num_different": 0, "num_different_plain": 1},
    )


def sample_curves() -> dict[str, list[dict[str, float]]]:
    """Role → training curve."""
    return {
        role: [
            {"step": s, "loss": 4 - gain * s / 200, "walk_acceptance_length": 1.1 + gain * s / 400}
            for s in range(0, 401, 50)
        ]
        for role, gain in (("challenger", 0.6), ("control", 0.1))
    }
