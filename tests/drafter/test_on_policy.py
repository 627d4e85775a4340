"""On-policy anchors against walks that are simulated, and against a recursion written out position by position."""

import time

import numpy as np
import pytest
import torch
import toys

from drafter.on_policy import VisitTable, visit_probabilities

B = 4


def known_table(counts, *, num_prompt_tokens=3):
    """A table over one reply in which these counts are known; None: nothing is."""
    row = toys.row(num_prompt_tokens + len(counts), num_prompt_tokens)
    table = VisitTable.of([row], B)
    places = torch.tensor([place for place, count in enumerate(counts) if count is not None], dtype=torch.int64)
    table.learn(0, num_prompt_tokens + places, torch.tensor([counts[place] for place in places.tolist()]).long())
    return table


def test_where_all_counts_are_known_the_visits_are_the_walk():
    counts = [2, 0, 1, 1, 3, 0, 0, 0, 0, 2, 0, 0]
    visits = torch.from_numpy(known_table(counts)._visits(np.array([0])))
    at, walked = 0, []
    while at < len(counts):
        walked.append(at)
        at += counts[at] + 1
    assert visits.nonzero().squeeze(1).tolist() == walked and visits[walked].tolist() == [1.0] * len(walked)


@pytest.mark.parametrize(("num_positions", "width"), [(10, 4), (64, 8), (65, 8), (300, 16), (200, 100)])
def test_visits_are_those_of_the_recursion_position_by_position(num_positions, width):
    generator = torch.Generator().manual_seed(num_positions)
    jumps = torch.rand(num_positions, width, generator=generator, dtype=torch.float64)
    jumps /= 1.1 * jumps.sum(dim=1, keepdim=True)
    starts = torch.zeros(num_positions, dtype=torch.float64)
    starts[[0, num_positions // 2]] = 1
    expected = starts.tolist()
    for at in range(num_positions):
        for jump in range(width):
            if at + jump + 1 < num_positions:
                expected[at + jump + 1] += expected[at] * float(jumps[at, jump])
    found = visit_probabilities(jumps.numpy(), starts.numpy())
    assert (torch.from_numpy(found) - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


def test_where_nothing_is_known_walks_jump_by_the_runs_own_distribution():
    table = known_table([None] * 60)
    for _ in range(400):  # three of four blocks accept nothing, one all three drafts: 1.75 tokens a step
        table.spread = 0.98 * table.spread + np.array([3.0, 0, 0, 1.0])
    generator = torch.Generator().manual_seed(0)
    visited, num_walks = torch.zeros(60), 4000
    for _ in range(num_walks):
        at = 0
        while at < 60:
            visited[at] += 1
            at += 4 if torch.rand((), generator=generator) < 0.25 else 1
    visits = torch.from_numpy(table._visits(np.array([0])))
    assert (visits - visited / num_walks).abs().max() < 0.04
    assert visits[30:].mean() == pytest.approx(1 / 1.75, rel=0.02)


def test_each_anchor_is_drawn_as_often_as_its_visits_and_the_uniform_floor_say():
    counts = [3, 1, 1, 1, 0, 2, 2, 2, 0, 0, 3, 3, 3, 3, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    table, limit, share = known_table(counts), 4, 0.25
    num_legal = len(counts) - B + 1
    visits = torch.from_numpy(table._visits(np.array([0])))[:num_legal]
    q = (1 - share) * visits / visits.sum() + share / num_legal
    assert limit * q.max() < 1
    drawn = torch.zeros(num_legal)
    for seed in range(6000):
        (anchors,) = table.draw([0], [seed], limit=limit, uniform_share=share)
        assert len(anchors.unique()) == limit and anchors.tolist() == sorted(anchors.tolist())
        drawn[anchors - 3] += 1
    assert (drawn / 6000 - limit * q).abs().max() < 0.02


def test_an_anchor_that_would_be_drawn_more_than_once_is_always_drawn():
    table = known_table([3] * 12)
    (anchors, *_), legal = table.draw([0], [5], limit=3, uniform_share=0.01), range(3, 12)
    assert anchors.tolist() == [3, 7, 11] and set(anchors.tolist()) <= set(legal)
    (everything,) = table.draw([0], [5], limit=9, uniform_share=0.01)
    assert everything.tolist() == list(legal)


def test_with_all_of_the_share_uniform_every_anchor_is_as_likely():
    table, drawn = known_table([3, 0] * 10), torch.zeros(17)
    for seed in range(4000):
        drawn[table.draw([0], [seed], limit=5, uniform_share=1.0)[0] - 3] += 1
    assert (drawn / 4000 - 5 / 17).abs().max() < 0.03


def test_replies_of_one_draw_do_not_reach_into_each_other():
    rows = [toys.row(3 + n, 3, seed=n) for n in (5, 70, 30)]
    table = VisitTable.of(rows, B)
    generator = torch.Generator().manual_seed(1)
    for row, n in enumerate((5, 70, 30)):
        table.learn(row, 3 + torch.arange(n), torch.randint(0, B, (n,), generator=generator))
    alone = [table._visits(np.array([row])) for row in range(3)]
    together = table._visits(np.array([2, 0, 1]))
    assert np.allclose(together, np.concatenate([alone[2], alone[0], alone[1]]), atol=1e-12)


def test_drawing_for_a_step_takes_milliseconds():
    rows = [toys.row(1030, 30, seed=n) for n in range(8)]
    table = VisitTable.of(rows, 8)
    started = time.perf_counter()
    for seed in range(20):
        table.draw(range(8), [seed] * 8, limit=32, uniform_share=0.25)
    assert (time.perf_counter() - started) / 20 < 0.1


def test_counts_of_the_longest_blocks_are_remembered_as_they_were():
    table = VisitTable.of([toys.row(400, 10)], 256)
    table.learn(0, torch.tensor([20, 40]), torch.tensor([199, 255]))
    restored = VisitTable.of([toys.row(400, 10)], 256)
    restored.restore(table.state())
    assert restored.known[[10, 30]].tolist() == [199, 255]
