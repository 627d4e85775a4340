import itertools
from collections import Counter

import pytest

from pipeline.workloads import general, support_mails

WORKLOADS = pytest.mark.parametrize("workload", [support_mails, general])


def texts(requests):
    return [request["messages"][-1]["content"] for request in requests]


@WORKLOADS
def test_a_seed_names_its_prompts_and_a_shorter_run_is_their_beginning(workload):
    whole = list(workload.prompts(300, seed=5))
    assert whole == list(workload.prompts(300, seed=5))
    assert whole[:40] == list(workload.prompts(40, seed=5))
    assert list(itertools.islice(workload.prompts(10**9, seed=5), 40)) == whole[:40]


@WORKLOADS
def test_no_two_of_a_thousand_are_alike_and_another_seed_writes_others(workload):
    first, second = texts(workload.prompts(1000, seed=0)), texts(workload.prompts(1000, seed=1))
    assert len(set(first)) == 1000
    assert len(set(first) & set(second)) < 100


@WORKLOADS
def test_every_slice_has_its_share_and_some_requests_are_sampled(workload):
    requests = list(workload.prompts(1000, seed=0))
    slices = Counter(request["slice"] for request in requests)
    assert len(slices) >= 8
    assert min(slices.values()) > 1000 / len(slices) / 2
    assert 100 < sum(request["temperature"] == 0.7 for request in requests) < 200


def test_a_mail_names_its_order_and_its_product_and_some_customers_write_twice():
    requests = list(support_mails.prompts(500, seed=0))
    clean = sum(any(product in text for product in support_mails.PRODUCTS) for text in texts(requests))
    assert clean > 450  # the others have their typo there
    assert 400 < len({request["conversation"] for request in requests}) < 480
