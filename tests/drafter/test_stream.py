"""A streamed run: every row once and in the planned order, within the budget, whatever is killed and whenever."""

import itertools
import json
import multiprocessing
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import streams
import toys
from pydantic import ValidationError
from safetensors.torch import load_file

from drafter import loop, stream, train, trainer
from drafter.stream_plan import plan_stream
from pipeline import capture
from pipeline.engines import CaptureRequest
from pipeline.errors import ConfigError, StageError
from pipeline.stages import exclusive
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
    others = [plan_of(streams.config_of(site, seed=1)), plan_of(streams.config_of(site, max_bytes=450_000))]
    orders = [[row.row_id for row in plan.rows()] for plan in (plan_of(config), *others)]
    assert all(sorted(a) == sorted(b) and a != b for a, b in itertools.combinations(orders, 2))


def test_a_run_of_fewer_steps_asks_for_no_part_that_it_does_not_train_on(site):
    whole, short = plan_of(streams.config_of(site)), plan_of(streams.config_of(site, steps=9))
    assert short.num_steps == 9 and list(short.rows()) == list(whole.rows())[: short.num_rows]
    assert set(short.expected) == {part for window in short.windows for part in window.parts} < set(whole.expected)
    assert short.windows[-1].first_step < 9 and short.parts_before(9) == len(short.expected)


def test_the_plan_knows_what_its_rows_weigh_in_the_loss(tmp_path):
    rows = [streams.response(n, num_tokens=size) | {"weight": weight}
            for n, (size, weight) in enumerate([(30, 1), (8, 3), (30, 40), (5, 40)])]  # fmt: skip
    config = streams.config_of(tmp_path)
    responses = streams.response_set(config, [*rows, streams.response(9, "validation"), streams.response(10, "gate")])
    plan = plan_stream(config, responses, streams.held_out(config, responses), block_size=4)
    # four anchors at most; a reply of five tokens has room for two, one of two tokens for none
    assert plan.mean_weight == (4 * 1 + 2 * 3 + 4 * 16) / 3 and plan.num_short == 1


def test_rows_too_short_for_a_block_are_counted_whatever_parts_they_are_in(tmp_path):
    short = [streams.response(100 + n, num_tokens=6) for n in range(3)]
    trained = streams.run(streams.config_of(tmp_path, steps=2), [*short, *streams.corpus()])
    assert trained.manifest.counts["too_short"] == 3


def test_a_stream_in_which_no_step_has_a_row_of_its_own_is_refused(site):
    config = streams.config_of(site, steps=1, blocks_per_step=4)
    responses = streams.response_set(config, streams.corpus())
    with pytest.raises(ConfigError, match=r"train\.steps = 1: with 1 rows a step, 10% of them replayed, no step"):
        plan_stream(config, responses, streams.held_out(config, responses), block_size=4, replay_share=0.1)


def test_a_part_is_held_only_while_steps_may_still_ask_for_it(site):
    plan = plan_of(streams.config_of(site))
    for step in range(plan.num_steps + 1):
        asked = {part for later in range(step, plan.num_steps) for part in plan.window_of(later).parts}
        assert set(list(plan.expected)[plan.parts_before(step) :]) == asked


@pytest.mark.parametrize(
    ("settings", "rows", "error", "words"),
    [
        ({"max_bytes": None}, None, ValidationError, "stream = true needs max_bytes"),
        ({"max_bytes": None, "capture_settings": {"stream": False}}, None, ConfigError, r"needs capture\.max_bytes"),
        ({"max_bytes": 250_000}, None, ConfigError, "the held-out rows alone take about"),
        ({"max_bytes": 327_000}, None, ConfigError, r"part \d+ takes about \d+ bytes.*raise capture\.max_bytes"),
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


@pytest.fixture(scope="module")
def processes():
    """New processes in which torch is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streams"])
    return context


def start(processes, root, seconds, **settings):
    process = processes.Process(target=streams.run_logged, args=(root, root / "log", seconds, settings))
    process.start()
    return process


def wait_for_steps(process, log, num_steps):
    """Wait until so many more steps are begun."""
    goal = count(log) + num_steps
    while process.is_alive() and count(log) < goal:
        time.sleep(0.002)


def test_kills_at_random_moments_change_neither_the_rows_of_any_step_nor_the_weights(tmp_path, processes):
    rng, settings = random.Random(7), {"checkpoint_every": 5}
    straight = streams.config_of(tmp_path / "straight", **settings)
    streams.response_set(streams.config_of(tmp_path / "killed", **settings), streams.corpus())
    expected = streams.run(straight)
    plan = plan_of(straight)
    kills, ended = 0, False
    while not ended:
        process = start(processes, tmp_path / "killed", 0.005, **settings)
        if kills % 3:  # two of three amid the steps, the others anywhere
            wait_for_steps(process, tmp_path / "killed" / "log", rng.randint(1, 4))
        process.join(rng.uniform(0, 0.02 if kills % 3 else 2) if kills < 9 else None)
        ended = process.exitcode == 0
        if not ended:
            assert process.exitcode is None, "it failed on its own"
            process.kill()
            process.join()
            kills += 1
    assert kills >= 6
    (folder,) = [path.parent for path in (tmp_path / "killed" / "drafters").glob("*/manifest.json")]
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (expected.folder / name).read_bytes()
    steps = streams.logged_steps(tmp_path / "killed" / "log")
    planned = {tuple(row.row_id for row in plan.window_of(n).rows_of(n)): n for n in range(plan.num_steps)}
    taken = [planned[tuple(row_id for row_id, _ in step)] for step in steps]
    assert taken[0] == 0 and taken[-1] == plan.num_steps - 1
    back = [before + 1 - after for before, after in itertools.pairwise(taken)]
    assert all(0 <= one <= 5 for one in back), "each goes on from the last checkpoint: nothing is skipped"
    assert 0 < sum(one > 0 for one in back) <= kills
    anchors = {}
    for step in steps:
        for row_id, drawn in step:
            assert anchors.setdefault(row_id, drawn) == drawn, "a step that is done again is the same step"
    assert not list((tmp_path / "killed" / "queue").glob("*/")) and not list(folder.glob("*.pt"))


def test_a_run_goes_on_although_somebody_removed_its_queue(tmp_path, monkeypatch):
    config, log = streams.config_of(tmp_path), tmp_path / "log"
    straight = streams.run(streams.config_of(tmp_path / "straight"))
    with monkeypatch.context() as patch:
        streams.log_steps(log, patch.setattr)
        logged = loop.backward
        patch.setattr(loop, "backward", lambda *a, **k: logged(*a, **k) if count(log) < 12 else pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            streams.run(config)
    shutil.rmtree(tmp_path / "queue")
    engines = streams.CodeEngines()
    resumed = streams.run(config, engines=engines)
    assert (resumed.folder / "model.safetensors").read_bytes() == (straight.folder / "model.safetensors").read_bytes()
    passed = [row.row_id for row in list(plan_of(config).rows())[:18]]  # of 9 steps: three windows of three parts
    assert not set(passed) & set(engines.asked(CaptureRequest)), "what the checkpoint covers is not captured again"


def count(log):
    return len(streams.logged_steps(log)) if log.exists() else 0


def test_queues_of_runs_that_were_given_up_are_removed_and_those_of_others_are_not(tmp_path):
    config = streams.config_of(tmp_path)
    for name in ("given-up", "going-on"):
        (tmp_path / "queue" / name).mkdir(parents=True)
    with exclusive(tmp_path / "drafters" / "going-on", "train"):
        streams.run(config)
    assert [path.name for path in (tmp_path / "queue").iterdir()] == ["going-on"]


def test_the_queue_has_the_room_that_caches_which_stay_leave_and_older_ones_make_way(tmp_path):
    config = streams.config_of(tmp_path)
    plan = plan_of(config)
    for name in ("old", "current"):
        (tmp_path / "states" / name).mkdir(parents=True)
        (tmp_path / "states" / name / "manifest.json").write_text("{}")
        (tmp_path / "states" / name / "states.arrow").write_bytes(bytes(150_000))
    (tmp_path / "current.json").write_text('{"general-states": "current"}')
    trained = streams.run(config)
    assert trained.manifest.counts["steps"] == plan.num_steps
    assert [(tmp_path / "states" / name).exists() for name in ("old", "current")] == [False, True]
    (tmp_path / "states" / "current" / "states.arrow").write_bytes(bytes(300_000))
    with pytest.raises(StageError, match=rf"together take {plan.window_bytes} bytes.*beside the caches that stay"):
        streams.run(streams.config_of(tmp_path, seed=5))


def test_rows_that_are_kept_out_are_counted_and_the_others_trained_on(tmp_path, monkeypatch):
    config = streams.config_of(tmp_path, capture_settings={"max_reject_share": 0.1})
    windows = [[row.row_id for row in window.rows] for window in plan_of(config).windows]
    broken, together, apart = windows[0][0], [*windows[0][1:3], windows[2][0]], [windows[1][0], windows[3][0]]

    def states(row_id, ids):
        words = engines.code(row_id, ids)
        if row_id == broken:
            words[3, 1, 2] = 0x7F80
        for twins in (together, apart):
            if row_id in twins:
                words[-1] = 0x3F80 + len(twins)  # of all that the row is made from, the last state tells
        return words

    engines = streams.CodeEngines(states=states)
    streams.log_steps(tmp_path / "log", monkeypatch.setattr)
    trained = streams.run(config, engines=engines)
    seen = [row_id for step in streams.logged_steps(tmp_path / "log") for row_id, _ in step]
    kept_out = {broken, *together, apart[1]}  # apart[0] was trained on before anybody could know
    assert sorted(seen) == sorted(set(train_rows(streams.corpus())) - kept_out)
    assert trained.manifest.rejects == {"not_finite": 1, "duplicate_states": 4}
    rejects = map(json.loads, (trained.folder / "rejects.jsonl").read_text().splitlines())
    assert {reject["row_id"] for reject in rejects} == kept_out
    assert trained.manifest.counts["train_rows"] == len(seen)


def engines_with_twins(row_ids):
    """Engines whose last state is the same for all of these rows."""

    def states(row_id, ids):
        words = engines.code(row_id, ids)
        if row_id in row_ids:
            words[-1] = 0x3F82
        return words

    engines = streams.CodeEngines(states=states)
    return engines


def test_a_kill_between_a_checkpoint_and_its_release_forgets_no_row_that_was_left_out(tmp_path, monkeypatch):
    config = streams.config_of(tmp_path, checkpoint_every=1000, capture_settings={"max_reject_share": 0.1})
    twins = {row.row_id for row in plan_of(config).windows[0].rows[:2]}
    engines = engines_with_twins(twins)
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="killed"):
        patch.setattr(stream.StreamFeed, "covered", lambda self, step: step and pytest.fail("killed"))
        streams.run(config, engines=engines)
    trained = streams.run(config, engines=engines)
    assert trained.manifest.rejects == {"duplicate_states": 2}
    assert trained.manifest.counts["train_rows"] == len(train_rows(streams.corpus())) - 2
    rejects = map(json.loads, (trained.folder / "rejects.jsonl").read_text().splitlines())
    assert {reject["row_id"] for reject in rejects} == twins


@pytest.mark.parametrize("is_killed", [False, True], ids=["at once", "killed before it was written down"])
def test_a_run_that_stops_amid_a_window_counts_what_it_was_kept_from(is_killed, tmp_path, monkeypatch):
    settings = {"patience": 1, "checkpoint_every": 2, "learning_rate": 1e-12}
    config = streams.config_of(tmp_path, capture_settings={"max_reject_share": 0.2}, **settings)
    window = plan_of(config).windows[0]
    assert window.num_steps > 2
    twins = {row.row_id for row in window.rows_of(0)}
    engines = engines_with_twins(twins)
    streams.log_steps(tmp_path / "log", monkeypatch.setattr)
    if is_killed:
        with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="killed"):
            patch.setattr(trainer, "_export", lambda *a: pytest.fail("killed"))
            streams.run(config, engines=engines)
    trained = streams.run(config, engines=engines)
    seen = {row_id for step in streams.logged_steps(tmp_path / "log") for row_id, _ in step}
    assert trained.manifest.counts["steps"] == 2 and len(twins) > 1
    assert trained.manifest.counts["train_rows"] == len(seen) == len(window.rows_of(1))
    assert trained.manifest.rejects == {"duplicate_states": len(twins)}
    rejects = map(json.loads, (trained.folder / "rejects.jsonl").read_text().splitlines())
    assert {reject["row_id"] for reject in rejects} == twins


def test_too_many_rows_that_are_kept_out_end_the_run(tmp_path):
    engines = streams.CodeEngines(states=lambda row_id, ids: engines.code(row_id, ids) * (row_id in ("row-1", "row-2")))
    with pytest.raises(StageError, match=r"zero_states.*capture\.max_reject_share"):
        streams.run(streams.config_of(tmp_path), engines=engines)


def test_when_the_engine_fails_training_ends_with_its_error_and_the_next_run_goes_on(tmp_path):
    def fails(row_id, ids):
        if row_id == list(plan_of(config).rows())[-1].row_id:
            raise StageError("the engine is broken")
        return broken.code(row_id, ids)

    config, broken, sound = streams.config_of(tmp_path), streams.CodeEngines(states=fails), streams.CodeEngines()
    with pytest.raises(StageError, match="the engine is broken"):
        streams.run(config, engines=broken)
    trained = streams.run(config, engines=sound)
    assert trained.manifest.counts["train_rows"] == len(train_rows(streams.corpus()))
    assert 0 < len(sound.asked(CaptureRequest)) < len(train_rows(streams.corpus()))


def test_a_streamed_drafter_names_the_responses_and_a_change_of_their_order_is_another_run(tmp_path):
    config = streams.config_of(tmp_path, steps=2)
    trained = streams.run(config)
    responses = streams.response_set(config, streams.corpus())
    states = streams.held_out(config, responses)
    assert trained.manifest.parents == {"states": states.id, "responses": responses.id}
    assert streams.run(config).id == trained.id
    assert streams.run(streams.config_of(tmp_path, steps=2, max_bytes=450_000)).id != trained.id
    assert train.run(config, cached(config, responses), start=None, role="champion").id != trained.id


def test_of_a_stream_the_anchors_mean_something_only_where_rows_are_replayed(tmp_path, monkeypatch):
    earlier, meanings = toys.cache(tmp_path, [("train", toys.row(30, 3))], fingerprint=None), []
    monkeypatch.setattr(train, "complete", lambda *a, **named: meanings.append(named["meaning"]))
    for replay in ([], [earlier]):
        for settings in ({"anchors": "uniform"}, {}, {"uniform_share": 0.5}):
            streams.run(streams.config_of(tmp_path, **settings), replay=replay)
    assert meanings[0] == meanings[1] == meanings[2]
    assert meanings[3] != meanings[4] != meanings[5] != meanings[3]


def test_a_stream_leaves_no_room_for_a_cache_that_has_nothing_to_replay(tmp_path):
    config = streams.config_of(tmp_path, blocks_per_step=20, replay_share=0.5)
    short = toys.cache(tmp_path, [("train", toys.row(20, 18))], fingerprint=None)
    trained = streams.run(config, replay=[short])
    assert trained.manifest.parents.keys() == {"states", "responses"}
    assert trained.manifest.counts["steps"] == plan_of(config).num_steps


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_streamed_run_replays_cached_rows_and_still_sees_each_of_its_own_once(share, tmp_path, monkeypatch):
    config = streams.config_of(tmp_path, blocks_per_step=20, replay_share=share)
    earlier = toys.cache(
        tmp_path, [("train", toys.row(30, 3, seed=n, name=f"earlier-{n}")) for n in range(5)], fingerprint=None
    )
    streams.log_steps(tmp_path / "log", monkeypatch.setattr)
    trained = streams.run(config, replay=[earlier])
    steps = [[row_id for row_id, _ in step] for step in streams.logged_steps(tmp_path / "log")]
    own = [row_id for step in steps for row_id in step if not row_id.startswith("earlier")]
    assert sorted(own) == sorted(train_rows(streams.corpus()))
    assert trained.manifest.counts["train_rows"] == len(own) and trained.manifest.parents["replay_1"] == earlier.id
    replayed = [row_id for step in steps for row_id in step if row_id.startswith("earlier")]
    assert len(replayed) == int(len(steps) * 5 * share)
    assert max(map(len, steps)) <= 6 and len(replayed) / (len(own) + len(replayed)) == pytest.approx(share, rel=0.3)


def cached(config, responses):
    return capture.run(config, responses, engines=streams.CodeEngines(), target_layer_ids=streams.LAYERS)


def test_two_processes_take_each_row_once_between_them_and_the_last_one_there_lets_it_go(tmp_path, processes):
    config = streams.config_of(tmp_path)
    responses = streams.response_set(config, streams.corpus())
    states = streams.held_out(config, responses)
    alone = streams.run(streams.config_of(tmp_path / "alone"))
    folder = tmp_path / "drafters" / "two"
    folder.mkdir(parents=True)
    arguments = (tmp_path, folder, config, states, responses)
    ranks = [processes.Process(target=streams.train_rank, args=(rank, *arguments)) for rank in (0, 1)]
    with stream.fed(folder, config, states, None, responses, engines=streams.CodeEngines()):
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    steps = [streams.logged_steps(tmp_path / f"log-{rank}") for rank in (0, 1)]
    both = [[row_id for row_id, _ in (*a, *b)] for a, b in zip(*steps, strict=True)]
    assert sorted(row_id for step in both for row_id in step) == sorted(train_rows(streams.corpus()))
    assert all(len(step) == 1 for step in steps[1])
    found, expected = (load_file(one / "model.safetensors") for one in (folder, alone.folder))
    assert all((found[name].float() - expected[name].float()).abs().max() < 0.01 for name in expected)
