"""A streamed run: every row once and in the planned order, within the budget, whatever is killed and whenever."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import streams

from drafter.stream_plan import plan_stream
from pipeline.errors import ConfigError, StageError
from tests.pipeline.test_state_queue import watched


def train_rows(rows):
    return [row["row_id"] for row in rows if row["split"] == "train"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A root where the responses and the held-out states are complete."""
    root = tmp_path_factory.mktemp("site")
    plan_of(streams.config_of(root))
    return root


def plan_of(config):
    responses = streams.response_set(config, streams.corpus())
    return plan_stream(config, responses, streams.held_out(config, responses), block_size=4)


def test_the_plan_deals_every_train_row_once_and_never_more_than_half_the_budget_at_a_time(site):
    plan = plan_of(streams.config_of(site))
    dealt = [row.row_id for row in plan.rows()]
    assert sorted(dealt) == sorted(train_rows(streams.corpus()))
    assert dealt != train_rows(streams.corpus()), "shuffled"
    assert len(plan.windows) > 4
    for window in plan.windows:
        assert sum(plan.expected[part] for part in window.parts) <= plan.queue_bytes // 2
        sizes = {len(window.rows_of(step)) for step in window.steps}
        assert max(sizes) <= 2 and max(sizes) - min(sizes) <= 1
    assert [window.first_step for window in plan.windows] == [
        sum(one.num_steps for one in plan.windows[:n]) for n in range(len(plan.windows))
    ]
    assert list(plan.expected) == [part for window in plan.windows for part in window.parts]


def test_the_plan_follows_from_seed_and_budget_alone(site):
    config = streams.config_of(site)
    assert plan_of(config) == plan_of(config)
    others = [plan_of(streams.config_of(site, seed=1)), plan_of(streams.config_of(site, max_bytes=200_000))]
    orders = [[row.row_id for row in plan.rows()] for plan in (plan_of(config), *others)]
    assert all(sorted(a) == sorted(b) and a != b for a, b in itertools.combinations(orders, 2))


def test_a_run_of_fewer_steps_asks_for_no_part_that_it_does_not_train_on(site):
    whole, short = plan_of(streams.config_of(site)), plan_of(streams.config_of(site, steps=9))
    assert short.num_steps == 9 and list(short.rows()) == list(whole.rows())[: short.num_rows]
    assert set(short.expected) == {part for window in short.windows for part in window.parts} < set(whole.expected)
    assert short.windows[-1].first_step < 9 and short.parts_before(9) == len(short.expected)


def test_a_part_is_held_only_while_steps_may_still_ask_for_it(site):
    plan = plan_of(streams.config_of(site))
    for step in range(plan.num_steps + 1):
        asked = {part for later in range(step, plan.num_steps) for part in plan.window_of(later).parts}
        assert set(list(plan.expected)[plan.parts_before(step) :]) == asked


@pytest.mark.parametrize(
    ("settings", "rows", "error", "words"),
    [
        ({"max_bytes": None}, None, ConfigError, r"needs capture\.max_bytes"),
        ({"max_bytes": 50_000}, None, ConfigError, "the held-out rows alone take about"),
        ({"max_bytes": 65_000}, None, ConfigError, r"part \d+ takes about \d+ bytes.*raise capture\.max_bytes"),
        ({}, [streams.response(9, "gate"), streams.response(1, num_tokens=5)], StageError, "no train row has room"),
    ],
)
def test_what_cannot_stream_is_refused_before_anything_is_captured(tmp_path, settings, rows, error, words):
    with pytest.raises(error, match=words):
        streams.run(streams.config_of(tmp_path, **settings), rows)
    assert not list((tmp_path / "queue").glob("*/*"))


@pytest.mark.parametrize("states_format", ["bf16", "int8"])
def test_a_corpus_larger_than_the_disk_is_trained_on_once_and_the_disk_never_holds_more(
    tmp_path, monkeypatch, states_format
):
    config = streams.config_of(tmp_path, capture_settings={"states_format": states_format})
    plan = plan_of(config)
    streams.log_steps(tmp_path / "log", monkeypatch.setattr)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        most = pool.submit(watched_queue, tmp_path / "queue", ended)
        trained = streams.run(config, engines=streams.CodeEngines(seconds=0.002))
        ended.set()
    steps = streams.logged_steps(tmp_path / "log")
    assert [[row_id for row_id, _ in step] for step in steps] == [
        [row.row_id for row in plan.window_of(step).rows_of(step)] for step in range(plan.num_steps)
    ]
    assert all(len(anchors) == 4 for step in steps for _, anchors in step)
    assert sum(plan.expected.values()) > 4 * plan.queue_bytes
    assert 0 < most.result() <= plan.queue_bytes + 4000, "heartbeat, locks and counts beside the states"
    assert trained.manifest.counts["train_rows"] == len(train_rows(streams.corpus()))
    assert trained.manifest.counts["steps"] == len(steps) and trained.manifest.rejects == {}
    assert not (tmp_path / "queue" / trained.id).exists()


def watched_queue(queues, ended):
    while not (folders := list(queues.glob("*/"))):
        time.sleep(0.001)
    return watched(folders[0], ended)
