import pytest

from bench.oracles.near_pairs import exact_pairs, near_duplicate_figures, records


def test_the_oracle_counts_pairs_as_by_hand():
    texts = ["abcdefgh", "ABCDEFGX", "abcdefgh ", "zzzzz", "好好学习天天向上", "好好学习天天向下"]
    # Four pieces each: of the first two three are shared, of five; of the last two three, of five.
    assert exact_pairs(texts, 0.5) == {(0, 1): 0.6, (0, 2): 1.0, (1, 2): 0.6, (4, 5): 0.6}
    assert exact_pairs(texts, 0.8) == {(0, 2): 1.0}


def test_the_records_are_alike_at_all_similarities():
    values = exact_pairs(records(800, seed=1), 0.3).values()
    for low in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        assert sum(low <= value < low + 0.1 for value in values) > 10


@pytest.mark.parametrize("similarity", [0.7, 0.9])
def test_what_is_found_is_what_the_oracle_finds(similarity):
    figures = near_duplicate_figures(count=1500, similarity=similarity, seed=3)
    assert all(figure["met"] for figure in figures.values()), figures
