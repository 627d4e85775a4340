"""What is written is drawn with the probability that its record carries, so that weighting undoes every choice."""

import random

import pytest
from tapped import ANSWER, app_that_answers, outcomes, records, send

from serving.tap import TrafficTap
from serving.tap.sampling import Sampling


def counts(accepted, drafted=70):
    return {"num_drafts": 10, "num_draft_tokens": drafted, "num_accepted_tokens": accepted}


def test_the_bias_falls_in_a_straight_line_and_never_to_zero():
    sampling = Sampling(accepted_factor=0.1)
    assert [sampling.of_reply(counts(accepted)) for accepted in (0, 35, 70)] == pytest.approx([1.0, 0.55, 0.1])
    assert sampling.of_reply(None) == sampling.of_reply(counts(0, drafted=0)) == 1.0
    assert sampling.of_reply(counts(71)) == pytest.approx(0.1)
    assert Sampling().of_reply(counts(70)) == 1.0


def test_a_tenant_has_its_own_rate_or_everyones():
    sampling = Sampling(0.1, {"acme": 1.0, "globex": 0.0})
    assert [sampling.of_request(tenant) for tenant in ("acme", "globex", "initech", None)] == [1.0, 0.0, 0.1, 0.1]


def test_weighting_by_the_inverse_probability_is_unbiased_under_rates_and_bias():
    """20,000 requests of two tenants, acceptance tied to length: weighted sums meet the whole's within 4 deviations."""
    sampling, draw = Sampling(0.3, {"acme": 0.8}, 0.05), random.Random(7)
    whole = {"requests": 0.0, "tokens": 0.0, "accepted": 0.0}
    estimate, variance, plain = dict.fromkeys(whole, 0.0), dict.fromkeys(whole, 0.0), 0.0
    for _ in range(20_000):
        tenant, accepted = draw.choice(["acme", "globex"]), draw.randrange(71)
        first, second = sampling.of_request(tenant), sampling.of_reply(counts(accepted))
        kept = draw.random() < first and draw.random() < second
        plain += accepted * kept
        for name, value in {"requests": 1.0, "tokens": 20.0 + 2 * accepted, "accepted": float(accepted)}.items():
            probability = first * second
            whole[name] += value
            estimate[name] += kept * value / probability
            variance[name] += value**2 * (1 - probability) / probability
    for name, total in whole.items():
        assert abs(estimate[name] - total) < 4 * variance[name] ** 0.5, name
        assert variance[name] ** 0.5 < 0.05 * total, "the law would hold for anything"
    assert plain / whole["accepted"] < 0.3, "without weights the bias would be plain to see"


def test_the_tap_draws_by_tenant_and_writes_the_product_that_it_used(tmp_path, monkeypatch):
    for name, value in {
        "DIR": str(tmp_path),
        "CONSENT": "allow_all",
        "TENANT_HEADER": "x-tenant",
        "RATE": "0.5; acme=1; globex=0",
        "ACCEPTED_FACTOR": "0.25",
    }.items():
        monkeypatch.setenv(f"SLIPSTREAM_TAP_{name}", value)
    spec = {"num_spec_steps": 2, "num_draft_tokens": 8, "num_accepted_draft_tokens": 4}
    tap = TrafficTap(app_that_answers(ANSWER | {"metrics": {"speculative_decoding": spec}}))
    for tenant, times in (("acme", 200), ("globex", 20), ("initech", 200)):
        send(tap, headers={"X-Tenant": tenant}, times=times)
    kept = records(tap)
    probabilities = {(record["tenant"], record["inclusion_probability"]) for record in kept}
    assert probabilities == {("acme", 0.625), ("initech", 0.3125)}
    assert kept[0]["acceptance"] == {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 4}
    found = outcomes(tap)
    assert 90 <= sum(record["tenant"] == "acme" for record in kept) <= 160  # 125 expected, 5 deviations are 34
    assert found["written"] == len(kept) and found["not_sampled_accepted"] > 0
    assert 20 + 65 <= found["not_sampled"] <= 20 + 135
    assert sum(found.values()) == 420
