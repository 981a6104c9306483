"""Rows that a mixture draws.

Guarantees: numbers, ratios, weights and strategies draw what other trainers draw from them; draws
depend on the seed and their own source alone.
"""

import numpy as np
import pytest

from paddle_vl.config.row_sources import STOPPING, RowSourceConfig
from paddle_vl.data.rows.mixture import drawn_rows, draws_of, interleaved


def source(**settings):
    return RowSourceConfig(**{"path": "a.jsonl", **settings})


@pytest.mark.parametrize(
    ("settings", "times", "rest"),
    [
        ({}, 1, 0), ({"num_samples": 4}, 0, 4), ({"num_samples": 25}, 2, 5),
        ({"num_samples": 20}, 2, 0), ({"ratio": 0.55}, 0, 5), ({"ratio": 2.5}, 2, 5),
    ],
)  # fmt: skip
def test_a_source_is_drawn_whole_as_often_as_it_fits(settings, times, rest):
    rows = drawn_rows(source(**settings), 10, seed=3)
    assert rows[: 10 * times].tolist() == [*range(10)] * times
    assert len(rows) == 10 * times + rest
    assert len(set(rows[10 * times :])) == rest


def test_draws_depend_on_the_seed_and_their_own_source():
    some, other = source(num_samples=50), source(path="b.jsonl", num_samples=50)
    rows = drawn_rows(some, 1000, seed=3).tolist()
    assert rows == drawn_rows(some, 1000, seed=3).tolist()
    assert rows != drawn_rows(some, 1000, seed=4).tolist()
    assert rows != drawn_rows(other, 1000, seed=3).tolist()
    again = draws_of([some, some], [1000, 1000], seed=3)
    assert (again.rows[:50] != again.rows[50:]).any()
    mixed = draws_of([other, some], [1000, 1000], seed=3)
    assert mixed.rows[mixed.sources == 1].tolist() == rows
    assert mixed.sources.tolist() == [0] * 50 + [1] * 50


def one_by_one(lengths, probabilities, stopping, seed):
    """What `datasets.interleave_datasets` does, a row at a time."""
    rng, used = np.random.default_rng(seed), [0] * len(lengths)
    stops = any if stopping == "first_exhausted" else all
    found = []
    while True:
        for each in rng.choice(len(lengths), size=1000, p=probabilities):
            if stops(n >= length for n, length in zip(used, lengths, strict=True)):
                return found
            if "without" not in stopping or used[each] < lengths[each]:
                found.append((int(each), used[each] % lengths[each]))
                used[each] += 1


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("lengths", [(5, 9), (1, 1, 1), (3, 400, 20)])
@pytest.mark.parametrize("seed", [0, 7])
def test_chance_is_that_of_interleave_datasets(stopping, lengths, seed):
    weights = [2.0, 5.0, 1.0][: len(lengths)]
    found = interleaved(lengths, weights, STOPPING[stopping], seed=seed)
    wanted = one_by_one(lengths, np.array(weights) / sum(weights), stopping, seed)
    assert [*zip(*(each.tolist() for each in found), strict=True)] == wanted


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("interleave_under", ["a0", "b0", "a1", "b1"]),
        ("interleave_over", ["a0", "b0", "a1", "b1", "a0", "b2"]),
        ("interleave_once", ["a0", "b0", "a1", "b1", "b2"]),
    ],
)
def test_without_weights_sources_take_turns(strategy, places):
    found = interleaved([2, 3], None, strategy, seed=0)
    assert [f"{'ab'[s]}{place}" for s, place in zip(*found, strict=True)] == places


def test_interleaved_draws_are_rows_of_their_sources():
    sources = [source(num_samples=3, weight=1.0), source(path="b", weight=0.0), source(weight=2.0)]
    drawn = draws_of(sources, [100, 10, 7], "interleave_once", seed=1)
    assert sorted(drawn.rows[drawn.sources == 2].tolist()) == [*range(7)]
    first = drawn_rows(sources[0], 100, seed=1).tolist()
    assert drawn.rows[drawn.sources == 0].tolist() == first
    assert len(drawn) == 10


@pytest.mark.parametrize(
    ("settings", "strategy", "reason"),
    [
        ([{"weight": 1.0}, {}], "interleave_over", "1 of 2 sources have a weight"),
        ([{"weight": 0.0}, {"weight": 0.0}], "interleave_over", "all weights are 0"),
        ([{"weight": 1.0}, {"weight": 3.0}], "concat", "no use for"),
        ([{"ratio": 0.05}], "concat", "gives no row"),
        (
            [{"weight": 1e-9}, {"weight": 1.0}],
            "interleave_over",
            r"1e\+10.*raise the smallest",
        ),
    ],
)
def test_mixtures_that_say_nothing_are_refused(settings, strategy, reason):
    with pytest.raises(ValueError, match=reason):
        draws_of([source(**each) for each in settings], [10] * len(settings), strategy, seed=0)


def test_a_source_has_one_number_of_rows():
    with pytest.raises(ValueError, match="set one"):
        source(num_samples=1, ratio=0.5)
