"""Slices of the token rows for context parallelism.

Guarantees: slices have equally many rows and cover all of them once; the bounds of a key are those
of the rows that see it, causally and within its segment; every rank has about as many visible pairs
as the others, of one segment and of many; rows that ranks do not divide are refused.
"""

import numpy as np
import pytest

from paddle_vl.batch.row_slices import RowSlice, slice_of_rows

SEGMENTS = {
    "of every size": [21, 8, 30, 5],
    "one": [64],
    "shorter than the chunks": [3, 1, 1, 3, 56],
    "of one token each": [1] * 8,
}


def offsets(segments: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(segments)])


def test_the_documented_example():
    found = slice_of_rows(offsets([8, 5, 1]), 2)
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_bounds_are_those_of_the_rows_that_see_a_key(segments, size):
    starts = offsets(segments)
    segment_T = np.repeat(np.arange(len(segments)), segments)
    slices = [RowSlice.of(starts, rank, size) for rank in range(size)]
    keys = np.concatenate([own.rows for own in slices])
    np.testing.assert_array_equal(np.sort(keys), np.arange(starts[-1]))
    for own in slices:
        assert len(own.rows) == starts[-1] // size
        seen = (segment_T[own.rows][:, None] == segment_T[keys]) & (own.rows[:, None] >= keys)
        place = np.arange(len(own.rows))[:, None]
        ends_T, firsts_T = own.key_rows[0, 0].T
        np.testing.assert_array_equal((place < ends_T) & (place >= firsts_T), seen)
        numbers = np.arange(0, starts[-1], 3)
        chosen = own.chosen(numbers)
        np.testing.assert_array_equal(chosen, np.isin(numbers, own.rows))
        np.testing.assert_array_equal(own.rows[own.places[numbers[chosen]]], numbers[chosen])
        halves = np.concatenate([each.rows for each in slices]).reshape(2 * size, -1)
        for number, rows in enumerate(halves if len(own.rows) % 2 == 0 else ()):
            assert (own.shards(rows, 2) == number).all()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["one", "many", "long and short"])
def test_ranks_have_equal_shares_of_the_visible_pairs(kind, size):
    rng = np.random.default_rng(3)
    many = np.cumsum(rng.lognormal(7.5, 1, 40).astype(int) + 1)
    segments = {"one": [], "many": many, "long and short": 20000 + many}[kind]
    starts = np.array([0, *(end for end in segments if end < 32768), 32768])
    place_T = np.arange(32768) - np.repeat(starts[:-1], np.diff(starts))
    pairs = np.bincount(slice_of_rows(starts, size), weights=place_T + 1)
    assert pairs.max() / pairs.mean() < 1.01


def test_rows_that_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"14 token rows .* by the context-parallel degree 4: set"):
        slice_of_rows(offsets([8, 6]), 4)
