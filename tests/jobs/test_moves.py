"""Which moves count: the rule by itself, without MLflow."""

import itertools

from jobs.registry.moves import Move, parse, replay, state_after


def moves(*written):
    return [Move(f"m{i}", *move, number=i + 1) for i, move in enumerate(written)]


def test_of_two_moves_from_the_same_place_the_first_in_the_log_counts():
    first, second = replay(moves(("champion", "2", {"champion": None}), ("champion", "3", {"champion": None})))
    assert (first.refused, first.previous) == (None, None)
    assert second.refused == "alias champion names version 2, expected no version"
    assert state_after([first, second]) == {"champion": "2"}


def test_a_move_counts_only_while_the_aliases_that_it_rests_on_stay():
    told = replay(
        moves(
            ("champion", "1", {}),
            ("champion", "2", {"champion": "1"}),
            ("approved", "3", {"approved": None, "champion": "1"}),
            ("approved", "4", {"approved": None, "champion": "2"}),
        )
    )
    assert [move.refused is None for move in told] == [True, True, False, True]
    assert state_after(told) == {"champion": "2", "approved": "4"}


def test_an_unconditional_move_always_counts_and_knows_where_it_started():
    told = replay(moves(("challenger", "2", {}), ("challenger", "3", {})))
    assert [(move.previous, move.version) for move in told] == [(None, "2"), ("2", "3")]


def test_an_entry_that_was_written_twice_counts_once():
    once = Move("m0", "champion", "2", {"champion": None}, number=1)
    back = Move("m1", "champion", "1", {"champion": "2"}, number=2)
    twice = Move("m0", "champion", "2", {"champion": None}, number=3)
    assert state_after(replay([once, back, twice])) == {"champion": "1"}
    assert replay([once, back, twice])[2].refused == "was written twice; the first counts"


def test_every_order_of_eight_promoters_has_one_winner_the_first():
    written = [("approved", str(n), {"approved": None, "champion": "1"}) for n in range(2, 7)]
    for order in itertools.permutations(written):
        told = replay(moves(("champion", "1", {}), *order))
        assert [move.version for move in told if move.alias == "approved" and not move.refused] == [order[0][1]]


def test_a_move_is_read_as_it_was_written():
    move = Move("m0", "approved", "2", {"champion": "1"}, "gate passed", "g1", "ada@host", "2026-01-01T00:00:00+00:00")
    assert parse(move.as_json(), number=4, applied=True) == Move(
        *("m0", "approved", "2", {"champion": "1"}, "gate passed", "g1", "ada@host", "2026-01-01T00:00:00+00:00"),
        number=4,
        applied=True,
    )
