"""Which layers go to which part of a pipeline.

Guarantees: the costliest part is the least possible, and the others are even.
"""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vl.parallel.pipeline.split import split_layers


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    parts=st.integers(1, 5),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)
def test_split_by_cost_is_the_best_there_is(costs, parts, before, after):
    if parts > len(costs):
        with pytest.raises(ValueError, match=f"{len(costs)} layers cannot fill {parts} parts"):
            split_layers(costs, parts, before, after)
        return

    def costliest(bounds: list[int]) -> int:
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    found = split_layers(costs, parts, before, after)
    assert [layer for part in found for layer in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in found)
    least = min(
        costliest([0, *cuts, len(costs)]) for cuts in combinations(range(1, len(costs)), parts - 1)
    )
    assert costliest([part.start for part in found] + [len(costs)]) == least


def test_equal_layers_are_split_evenly_and_the_first_parts_are_the_shorter():
    assert split_layers([1] * 10, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 10)]


def test_parts_that_are_not_the_costliest_are_even():
    found = split_layers([1.0] * 34, 4, before=16.0)
    assert [len(part) for part in found] == [1, 11, 11, 11]
