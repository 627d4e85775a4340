"""What a step is dealt: rows, anchors, weights, and the replayed rows among them."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import toys

from drafter.dataset import read_rows
from drafter.feed import CachedFeed, Dealer
from drafter.mixed_feed import MixedFeed
from pipeline.errors import StageError


def rows_of(name, count, *, num_tokens=40):
    return [toys.row(num_tokens, 4, seed=n, name=f"{name}-{n}") for n in range(count)]


def settings(tmp_path, **train):
    return toys.config(tmp_path, **{"blocks_per_step": 40, "anchors_per_row": 4, "steps": 1000, **train}).train


def mixed(tmp_path, sizes, *, own=12, **train):
    config = settings(tmp_path, **train)
    caches = [rows_of(f"cache{n}", size) for n, size in enumerate(sizes)]
    feed = CachedFeed(rows_of("own", own), config, block_size=4, leaves_room=True)
    return MixedFeed(feed, caches, config, block_size=4)


def dealt(feed, steps):
    return [[deal.row.row_id for deal in feed.rows_of(step)] for step in steps]


# On policy a draw's anchors lie as one random offset has them: of a short reply two of four draws may be the same.
@pytest.mark.parametrize(("anchors", "different"), [("uniform", 4), ("on_policy", 3)])
def test_anchors_are_drawn_anew_each_epoch_and_for_each_row(anchors, different, tmp_path):
    dealer = Dealer(rows_of("own", 2), settings(tmp_path, anchors_per_row=5, anchors=anchors), block_size=4)
    epochs = [{deal.row.row_id: deal.anchors.tolist() for deal in dealer.deal(range(n, n + 2))} for n in (0, 2, 0)]
    assert epochs[0] == epochs[2]
    assert len({tuple(some) for epoch in epochs[:2] for some in epoch.values()}) == different
    assert all(min(a) >= 4 and max(a) <= 36 and a == sorted(set(a)) for e in epochs for a in e.values())


@pytest.mark.parametrize("stopped_at", [4, 6], ids=["at an epoch's end", "amid an epoch"])
@pytest.mark.parametrize("anchors", ["uniform", "on_policy"])
def test_a_resumed_feed_deals_what_a_straight_one_deals(stopped_at, anchors, tmp_path):
    # 8 rows, 2 a step, 3 epochs: 12 steps
    config = settings(tmp_path, blocks_per_step=8, anchors=anchors)

    def feed():
        return CachedFeed(rows_of("own", 8), config, block_size=4)

    def go(one, steps):
        for step in steps:
            deals = one.rows_of(step)
            one.learn([(deal.anchors * 7 + step) % 4 for deal in deals])
            yield [(deal.row.row_id, deal.anchors.tolist()) for deal in deals]

    straight = list(go(feed(), range(12)))
    first, second = feed(), feed()
    interrupted = list(go(first, range(stopped_at)))
    second.restore(first.state())
    interrupted += go(second, range(stopped_at, 12))
    assert interrupted == straight
    assert Counter(row_id for step in straight for row_id, _ in step) == {f"own-{n}": 3 for n in range(8)}


@pytest.mark.parametrize("anchors", ["uniform", "on_policy"])
def test_a_feed_goes_on_with_the_rows_that_its_state_is_of_and_with_no_others(anchors, tmp_path):
    config, rows = settings(tmp_path, anchors=anchors), rows_of("own", 8)

    def feed(rows):
        return CachedFeed(rows, config, block_size=4)

    def cached(shard_bytes):
        cache = toys.cache(tmp_path / str(shard_bytes), [("train", row) for row in rows], shard_bytes=shard_bytes)
        return read_rows(cache, "train")

    state = feed(cached(1 << 28)).state()
    feed(cached(1 << 28)).restore(state)
    for others in (rows[:7], rows_of("own", 9), rows[::-1], cached(5000)):
        with pytest.raises(StageError, match=r"captured again meanwhile.*resume\.pt"):
            feed(others).restore(state)


def test_a_mixed_feed_goes_on_with_the_caches_that_its_state_is_of(tmp_path):
    with pytest.raises(StageError, match=r"2 caches are replayed.*resume\.pt"):
        mixed(tmp_path, [5, 3]).restore(mixed(tmp_path, [5]).state())


def test_a_row_counts_as_often_as_it_was_served_up_to_the_cap(tmp_path):
    rows = [replace(row, weight=weight) for row, weight in zip(rows_of("own", 3), (1, 9, 1000), strict=True)]
    for cap, expected in ((16, {1.0, 9.0, 16.0}), (1, {1.0})):
        feed = CachedFeed(rows, settings(tmp_path, max_row_weight=cap, blocks_per_step=12), block_size=4)
        deals = feed.rows_of(0)
        assert {deal.weight for deal in deals} == expected
        assert sum(deal.total_weight for deal in deals) == 4 * sum(min(row.weight, cap) for row in rows)


@pytest.mark.parametrize(("share", "sizes"), [(0.1, [7]), (0.25, [5, 3]), (0.3, [4, 1, 9]), (0.03, [2])])
def test_every_epoch_of_every_cache_deals_each_row_once_in_its_share_of_each_step(share, sizes, tmp_path):
    feed = mixed(tmp_path, sizes, replay_share=share)
    steps = dealt(feed, range(400))
    assert all(len(step) == 10 for step in steps)
    replayed = [sum(not row_id.startswith("own") for row_id in step) for step in steps]
    for end in range(1, 401):
        assert sum(replayed[:end]) == int(end * 10 * Fraction(str(share))), "the share, to the row, at any time"
    assert max(replayed) - min(replayed) <= 1
    flat = [row_id for step in steps for row_id in step]
    for name, size in {"own": 12, **{f"cache{n}": size for n, size in enumerate(sizes)}}.items():
        seen = [row_id for row_id in flat if row_id.startswith(f"{name}-")]
        epochs = [Counter(seen[start : start + size]) for start in range(0, len(seen) - size, size)]
        assert epochs and all(epoch == {f"{name}-{n}": 1 for n in range(size)} for epoch in epochs)
    counts = [sum(row_id.startswith(f"cache{n}-") for row_id in flat) for n in range(len(sizes))]
    assert max(counts) - min(counts) <= 1, "caches of any size have equal parts"


@pytest.mark.parametrize("anchors", ["uniform", "on_policy"])
def test_what_is_replayed_has_its_share_of_the_loss_however_often_the_own_rows_were_served(anchors, tmp_path):
    config = settings(tmp_path, replay_share=0.2, anchors=anchors)
    own = [replace(row, weight=weight) for row, weight in zip(rows_of("own", 8), (1, 3, 9, 40) * 2, strict=True)]
    own += rows_of("own-short", 2, num_tokens=8)  # with two blocks each, the others with four
    cache = [replace(row, weight=2) for row in rows_of("earlier", 4, num_tokens=9)]
    feed = MixedFeed(CachedFeed(own, config, block_size=4, leaves_room=True), [cache], config, block_size=4)
    deals = [deal for step in range(50) for deal in feed.rows_of(step)]  # whole epochs of both
    weights = Counter()
    for deal in deals:
        weights[deal.row.row_id] += deal.total_weight
    replayed = sum(weight for row_id, weight in weights.items() if row_id.startswith("earlier"))
    assert replayed / weights.total() == pytest.approx(0.2)
    assert weights["own-3"] == pytest.approx(16 * weights["own-0"]), "among each other they weigh what they weigh"


def test_a_row_has_no_more_anchors_than_a_step_has_blocks(tmp_path):
    for blocks, rows, most in ((8, 1, 8), (32, 1, 32), (100, 3, 32)):
        feed = CachedFeed(
            rows_of("own", 6, num_tokens=80),
            settings(tmp_path, blocks_per_step=blocks, anchors_per_row=32),
            block_size=4,
        )
        assert [len(deal.anchors) for deal in feed.rows_of(0)] == [most] * rows


def test_without_anything_to_replay_the_own_rows_fill_the_step(tmp_path):
    config = settings(tmp_path)
    feed = CachedFeed(rows_of("own", 12), config, block_size=4)
    assert [len(step) for step in dealt(feed, range(6))] == [10] * 6


def test_a_step_is_the_same_whenever_it_is_asked_for(tmp_path):
    straight = dealt(mixed(tmp_path, [5, 3], replay_share=0.3), range(30))
    feed = mixed(tmp_path, [5, 3], replay_share=0.3)
    assert dealt(feed, reversed(range(30))) == straight[::-1]


def test_a_mixed_feed_goes_on_from_its_state_and_tells_each_part_of_its_own_rows(tmp_path):
    feeds = [mixed(tmp_path, [5, 3], replay_share=0.3, anchors="on_policy") for _ in range(3)]

    def go(feed, steps):
        for step in steps:
            deals = feed.rows_of(step)
            feed.learn([deal.anchors % 4 for deal in deals])
            yield [(deal.row.row_id, deal.anchors.tolist()) for deal in deals]

    straight = list(go(feeds[0], range(20)))
    parts = list(go(feeds[1], range(9)))
    feeds[2].restore(feeds[1].state())
    assert [*parts, *go(feeds[2], range(9, 20))] == straight
    for table in (part._visits for part in (feeds[0]._own._dealer, *feeds[0]._dealers)):
        for row in range(len(table.sizes)):
            known = torch.from_numpy(table.known)[table.offsets[row] : table.offsets[row] + table.sizes[row]]
            where = (known >= 0).nonzero().squeeze(1)
            assert len(where) and torch.equal(known[where].long(), (where + 4) % 4), "each count where it was found"


def test_a_row_without_room_for_a_block_is_never_dealt(tmp_path):
    config = settings(tmp_path, blocks_per_step=4)
    feed = CachedFeed([toys.row(6, 4, name="short"), toys.row(20, 4, name="long")], config, block_size=4)
    assert dealt(feed, range(8)).count([]) == 4 and {"long"} == {one for step in dealt(feed, range(8)) for one in step}
