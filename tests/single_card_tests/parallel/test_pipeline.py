"""The split of layers into model chunks: the most expensive one is as cheap as possible, and the
others are even."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vl.parallel.pipeline.schedule import split_layers


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    chunks=st.integers(1, 5),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)
def test_split_by_cost_is_the_best_there_is(costs, chunks, before, after):
    if chunks > len(costs):
        with pytest.raises(
            ValueError, match=f"{len(costs)} layers cannot fill {chunks} model chunks"
        ):
            split_layers(costs, chunks, before, after)
        return

    def most_expensive(bounds: list[int]) -> int:
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    found = split_layers(costs, chunks, before, after)
    assert [layer for chunk in found for layer in chunk] == list(range(len(costs)))
    assert all(len(chunk) > 0 for chunk in found)
    least = min(
        most_expensive([0, *cuts, len(costs)])
        for cuts in combinations(range(1, len(costs)), chunks - 1)
    )
    assert most_expensive([chunk.start for chunk in found] + [len(costs)]) == least


def test_equal_layers_are_split_evenly_and_the_first_parts_are_the_shorter():
    assert split_layers([1] * 10, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 10)]


def test_parts_that_are_not_the_most_expensive_are_even():
    found = split_layers([1.0] * 34, 4, before=16.0)
    assert [len(chunk) for chunk in found] == [1, 11, 11, 11]
