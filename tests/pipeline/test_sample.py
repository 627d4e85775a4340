import itertools
import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from pipeline.errors import StageError
from pipeline.sample import bottom, draw, estimated_tokens, inclusion_probability, merged, stratum_of
from pipeline.sketches import rank_of
from pipeline.split import SplitKey
from pipeline.subjects import Subjects, require_subjects

SHARES = {"train": 0.65, "validation": 0.1, "gate": 0.25}
KEY = SplitKey(b"the split key of these tests")


def traffic(count, seed=0):
    """Rows as (key, rank, row, tokens): three splits, tenants and routes of very different sizes, skewed lengths."""
    dice = random.Random(seed)
    rows = []
    for n in range(count):
        split = dice.choices(list(SHARES), SHARES.values())[0]
        tenant = dice.choices(["big", "middle", "small"], [90, 9, 1])[0]
        tokens = round(dice.lognormvariate(5, 1)) + 1
        route = dice.choice(["a", "b"])
        rows.append(((split, tenant, route), rank_of(KEY, f"{seed} {n}"), n, tokens))
    return rows


def strata_of(rows, limit=None):
    keys, ranks, names, tokens = zip(*rows, strict=True) if rows else ((), (), (), ())
    return bottom(keys, np.array(ranks, np.uint64), np.array(names, np.int64), np.array(tokens, np.int64), limit=limit)


def drawn(rows, *, max_prompts=None, max_prompt_tokens=None, allocation="proportional", shares=SHARES):
    return draw(
        strata_of(rows, max_prompts),
        shares=shares,
        allocation=allocation,
        max_prompts=max_prompts,
        max_prompt_tokens=max_prompt_tokens,
    )


def same(one, other):
    assert one.keys() == other.keys()
    for key, stratum in one.items():
        assert (stratum.num_rows, stratum.num_tokens) == (other[key].num_rows, other[key].num_tokens)
        for name in ("ranks", "rows", "tokens"):
            assert np.array_equal(getattr(stratum, name), getattr(other[key], name)), (key, name)


def test_without_a_budget_every_row_is_kept_for_sure():
    found = drawn(traffic(500))
    assert sorted(found.rows.tolist()) == list(range(500))
    assert (found.probabilities == 1).all()


def test_of_every_stratum_the_rows_of_lowest_keyed_hash_are_kept():
    rows = traffic(2000)
    found = set(drawn(rows, max_prompts=300).rows.tolist())
    assert len(found) == 300
    for key in {row[0] for row in rows}:
        stratum = sorted((row for row in rows if row[0] == key), key=lambda row: row[1])
        taken = [row[2] in found for row in stratum]
        assert taken == sorted(taken, reverse=True) and any(taken)


@pytest.mark.parametrize("allocation", ["proportional", "equal"])
@pytest.mark.parametrize("limits", [(150, None), (None, 30_000), (150, 20_000)])
def test_the_order_of_rows_changes_nothing(allocation, limits):
    rows = traffic(1000)
    settings = {"max_prompts": limits[0], "max_prompt_tokens": limits[1], "allocation": allocation}
    first = drawn(rows, **settings)
    again = drawn(random.Random(1).sample(rows, len(rows)), **settings)
    told = [dict(zip(one.rows.tolist(), one.probabilities.tolist(), strict=True)) for one in (first, again)]
    assert told[0] == told[1]


def test_the_samples_of_parts_merge_into_that_of_the_whole_however_they_are_dealt():
    rows = traffic(1200)
    for parts, seed in ((2, 0), (7, 1), (40, 2)):
        dice = random.Random(seed)
        dealt = [[] for _ in range(parts)]
        for row in rows:
            dealt[dice.randrange(parts)].append(row)
        pieces = [strata_of(part, 50) for part in dealt]
        same(merged(pieces, limit=50), strata_of(rows, 50))
        same(merged([merged(pieces[:1], limit=50), merged(pieces[1:], limit=50)], limit=50), strata_of(rows, 50))


@pytest.mark.parametrize("allocation", ["proportional", "equal"])
@pytest.mark.parametrize("name", ["max_prompts", "max_prompt_tokens"])
def test_a_larger_budget_keeps_all_that_a_smaller_one_kept(allocation, name):
    rows = traffic(700)
    budgets = range(25, 400) if name == "max_prompts" else range(5000, 60_000, 250)
    before, dimensions = set(), None
    for budget in budgets:
        found = drawn(rows, **{name: budget}, allocation=allocation)
        now = set(found.rows.tolist())
        if found.num_dimensions == dimensions:
            assert before <= now
        before, dimensions = now, found.num_dimensions
    assert dimensions == 2


def test_no_budget_is_ever_exceeded_and_none_is_left_lying():
    rows = traffic(3000)
    tokens = {row[2]: row[3] for row in rows}
    for budget in (5_000, 50_000, 200_000):
        found = drawn(rows, max_prompt_tokens=budget)
        assert found.num_tokens == sum(tokens[row] for row in found.rows.tolist()) <= budget
        assert found.num_tokens > budget - max(tokens.values())
    assert len(drawn(rows, max_prompts=123).rows) == 123
    assert len(drawn(rows, max_prompts=123, max_prompt_tokens=1000).rows) < 123


def test_proportional_keeps_the_same_share_of_every_stratum_and_equal_the_same_number():
    sizes = itertools.product(("train", "gate"), (("big", 900), ("small", 100)))
    keys = [(split, tenant) for split, (tenant, size) in sizes for _ in range(size)]
    rows = [(key, rank_of(KEY, str(n)), n, 10) for n, key in enumerate(keys)]
    shares = {"train": 0.75, "gate": 0.25}
    kept = {key: k for key, (_, k) in drawn(rows, max_prompts=400, shares=shares).strata.items()}
    assert kept == {("train", "big"): 270, ("train", "small"): 30, ("gate", "big"): 90, ("gate", "small"): 10}
    found = drawn(rows, max_prompts=400, allocation="equal", shares=shares)
    kept = {key: k for key, (_, k) in found.strata.items()}
    assert kept == {("train", "big"): 200, ("train", "small"): 100, ("gate", "big"): 50, ("gate", "small"): 50}


def test_what_one_set_is_too_small_for_goes_to_the_others():
    rows = [(("gate",), n, n, 1) for n in range(10)] + [(("train",), 100 + n, 100 + n, 1) for n in range(1000)]
    kept = {key: k for key, (_, k) in drawn(rows, max_prompts=200).strata.items()}
    assert kept == {("gate",): 10, ("train",): 190}


def test_which_train_rows_there_are_says_nothing_about_which_gate_rows_are_kept():
    rows = traffic(1500)
    gate = [row for row in rows if row[0][0] == "gate"]
    others = traffic(1500, seed=9)
    changed = gate + [(row[0], row[1], 10_000 + row[2], row[3]) for row in others if row[0][0] != "gate"]
    first, second = (
        {row for row in drawn(some, max_prompts=300).rows.tolist() if row in {one[2] for one in gate}}
        for some in (rows, changed)
    )
    assert first == second and len(first) == 75


@pytest.mark.parametrize("allocation", ["proportional", "equal"])
def test_rows_weighted_by_their_inclusion_probability_tell_unbiased_totals(allocation):
    """Over 400 keys: totals of requests and of tokens, in all and of the smallest tenant, each within 4 standard
    errors; and the standard error is small enough to see a bias of 4%."""
    rows = traffic(1500)
    truth = totals(rows, {row[2]: 1.0 for row in rows})
    estimates = []
    for number in range(400):
        key = SplitKey(f"another key of this test {number}".encode())
        mine = [(row[0], rank_of(key, str(row[2])), row[2], row[3]) for row in rows]
        found = drawn(mine, max_prompts=150, allocation=allocation)
        estimates.append(totals(mine, dict(zip(found.rows.tolist(), (1 / found.probabilities).tolist(), strict=True))))
    estimates = np.array(estimates)
    error = estimates.std(0, ddof=1) / len(estimates) ** 0.5
    assert (np.abs(estimates.mean(0) - truth) <= 4 * error + 1e-9 * truth).all()
    assert (error[:2] < 0.01 * truth[:2]).all()
    # A stratum's size is known, not estimated.
    assert np.allclose(estimates[:, 0], truth[0])


def totals(rows, weights):
    """Requests, tokens, the smallest tenant's requests and tokens; each row weighted."""
    found = np.zeros(4)
    for key, _, name, tokens in rows:
        if name in weights:
            small = key[1] == "small"
            found += weights[name] * np.array([1, tokens, small, small * tokens])
    return found


def test_under_a_budget_of_tokens_the_bias_is_of_the_order_of_one_over_the_rows_kept():
    rows = traffic(1500)
    lengths = np.array([row[3] for row in rows])
    estimates, kept = [], []
    for number in range(400):
        key = SplitKey(f"another key of this test {number}".encode())
        mine = [(row[0], rank_of(key, str(row[2])), row[2], row[3]) for row in rows]
        found = drawn(mine, max_prompt_tokens=35_000)
        kept.append(len(found.rows))
        weights = dict(zip(found.rows.tolist(), (1 / found.probabilities).tolist(), strict=True))
        estimates.append(totals(mine, weights)[1] / lengths.sum())
    # By Wald's identity it is the squared coefficient of variation of the lengths, over the rows kept.
    expected = lengths.var() / lengths.mean() ** 2 / np.mean(kept)
    error = np.std(estimates, ddof=1) / len(estimates) ** 0.5
    assert abs(np.mean(estimates) - 1) < 2 * expected + 4 * error
    assert np.mean(kept) > 100 and expected < 0.03


def test_dimensions_are_dropped_from_the_end_where_not_every_stratum_would_have_a_row():
    rows = [(("train", str(n % 4), str(n % 100)), rank_of(KEY, str(n)), n, 10) for n in range(2000)]
    shares = {"train": 1.0}
    assert drawn(rows, max_prompts=100, shares=shares).num_dimensions == 2
    some = drawn(rows, max_prompts=99, shares=shares)
    assert some.num_dimensions == 1
    assert {key: k for key, (_, k) in some.strata.items()} == {
        ("train", "0"): 25, ("train", "1"): 25, ("train", "2"): 25, ("train", "3"): 24,
    }  # fmt: skip
    none = drawn(rows, max_prompts=3, shares=shares)
    assert (none.num_dimensions, none.strata) == (0, {("train",): (2000, 3)})
    assert none.probabilities.tolist() == [3 / 2000] * 3
    assert drawn(rows, max_prompt_tokens=990, shares=shares).num_dimensions == 1


def test_a_budget_that_the_first_prompt_exceeds_is_an_error_that_says_by_how_much():
    rows = [(("train",), 5, 0, 900)]
    with pytest.raises(StageError, match=r"max_prompt_tokens = 100; the first one has 900 tokens"):
        drawn(rows, max_prompt_tokens=100)
    assert len(drawn([], max_prompts=5).rows) == 0


def test_a_stratum_is_named_by_split_and_by_the_dimensions_asked_for_in_their_order():
    slices = json.dumps({"route": "mails", "tenant": "acme", "language": "de", "thinking": "on"})
    every = ("tenant", "route", "language", "length", "acceptance")
    told = stratum_of("gate", slices, num_tokens=600, accepted_per_step=1.7, by=every)
    assert told == ("gate", "acme", "mails", "de", "≤2048", "≤2")
    told = stratum_of("train", "{}", num_tokens=9000, accepted_per_step=None, by=("length", "acceptance", "tenant"))
    assert told == ("train", ">8192", "unknown", "unknown")
    assert stratum_of("train", "{}", num_tokens=1, accepted_per_step=9.0, by=("acceptance",)) == ("train", ">4")


def test_tokens_are_estimated_by_bytes():
    assert estimated_tokens("word" * 25) == 25
    assert estimated_tokens("你好吗") == 3
    assert estimated_tokens("a", None) == 1
    assert estimated_tokens("") == 1


def test_the_probability_of_a_row_is_that_of_the_tap_times_that_of_the_sampling():
    assert inclusion_probability(1, 1 / 0.5, 0.25) == 0.125
    assert inclusion_probability(10, 10 / 0.5, 0.25) == pytest.approx(0.125)
    # Three requests, tapped at 1, 1/2 and 1/4, stand for 7; so do three at 3/7 each.
    weight, served = 3, 1 + 2 + 4
    assert weight / inclusion_probability(weight, served, 0.1) == pytest.approx(70)


def test_tap_and_sampling_together_tell_unbiased_totals():
    """Requests tapped with a bias, merged into rows, sampled, and weighed back: the number that was served."""
    dice = np.random.default_rng(0)
    served = [(prompt, 0.9 if prompt % 3 else 0.2) for prompt in range(200) for _ in range(1 + prompt % 5)]
    estimates = []
    for number in range(600):
        tapped = Counter(), Counter()
        for prompt, probability in served:
            if dice.random() < probability:
                tapped[0][prompt] += 1
                tapped[1][prompt] += 1 / probability
        key = SplitKey(f"a key of this test {number}".encode())
        rows = [(("train",), rank_of(key, str(prompt)), prompt, 1) for prompt in tapped[0]]
        found = drawn(rows, max_prompts=60, shares={"train": 1.0})
        estimates.append(
            sum(
                tapped[0][p] / inclusion_probability(tapped[0][p], tapped[1][p], sampled)
                for p, sampled in zip(found.rows.tolist(), found.probabilities.tolist(), strict=True)
            )
        )
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - len(served)) < 4 * error
    assert error < 0.01 * len(served)


# -- subjects -------------------------------------------------------------------------------------------------------


def counted(**tenants):
    found = Subjects()
    for tenant, rows in tenants.items():
        for subject, count in rows.items():
            for _ in range(count):
                found.add(tenant, subject)
    return found


def check(subjects, *, min_subjects=5, max_subject_share=0.5):
    require_subjects(
        subjects, min_subjects=min_subjects, max_subject_share=max_subject_share, is_shared=subjects.is_shared
    )


MANY = {f"s{n}": 2 for n in range(8)}


def test_a_tenant_of_few_subjects_is_left_out_of_a_shared_drafter_and_no_other():
    assert counted(acme=MANY, globex={"x": 50, "y": 50}).too_small(min_subjects=5) == {"globex"}
    assert counted(acme={"x": 9}).too_small(min_subjects=5) == set()


def test_too_few_subjects_stop_a_shared_drafter_with_the_hint():
    with pytest.raises(StageError, match=r"of 4 subjects.*collect\.min_subjects = 5"):
        check(counted(acme={"a": 1, "b": 1}, globex={"a": 1, "b": 1}))  # four people: a hash is a tenant's own
    check(counted(acme=MANY, globex=MANY))


def test_one_subject_may_not_be_most_of_what_a_shared_drafter_learns():
    with pytest.raises(StageError, match=r"53\.5% .* of one subject.*max_subject_share = 0\.5"):
        check(counted(acme=MANY | {"s0": 23}, globex={f"g{n}": 1 for n in range(6)}))


def test_rows_on_record_without_a_subject_are_one_persons():
    subjects = counted(acme=MANY)
    for _ in range(40):
        subjects.add("globex", None)
    assert subjects.too_small(min_subjects=2) == {"globex"}
    with pytest.raises(StageError, match="without a subject"):
        check(subjects)


def test_a_tenants_own_drafter_asks_for_no_number_of_subjects():
    check(counted(acme={"only": 10}))
    check(Subjects())


def test_floors_hold_for_what_is_left_where_all_other_tenants_were_left_out():
    with pytest.raises(StageError, match="of 1 subjects"):
        require_subjects(counted(acme={"a": 3}), min_subjects=5, max_subject_share=1.0, is_shared=True)


def test_counts_of_parts_add_up():
    whole, parts = Subjects(), [counted(acme={"a": 1}), counted(acme={"a": 2, "b": 1}, globex={"c": 1})]
    whole.merge(parts)
    assert {tenant: dict(rows) for tenant, rows in whole.rows.items()} == {
        "acme": {"a": 3, "b": 1}, "globex": {"c": 1},
    }  # fmt: skip
    assert list(itertools.chain(*whole.rows.values())) == ["a", "b", "c"]
