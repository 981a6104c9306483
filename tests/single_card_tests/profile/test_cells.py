"""Batch sizes that a matrix tries.

Guarantees: sizes double up to the maximum, then bisect between fitting and not fitting down to the
resolution; they shrink if the first size does not fit; given sizes end at the first that does not
fit; known sizes of a resumed matrix are not tried again; invalid rules are refused.
"""

import pytest

from paddle_vl.profile.cells import Growth


def sizes_tried(growth, capacity: int, known: dict[int, bool] | None = None) -> list[int]:
    fits = dict(known or {})
    tried = []
    while (size := growth.next_size(fits)) is not None:
        assert size not in fits
        tried.append(size)
        fits[size] = size <= capacity
    return tried


@pytest.mark.parametrize(
    ("growth", "capacity", "tried"),
    [
        (Growth(largest=12), 100, [1, 2, 4, 8, 12]),
        (Growth(largest=64, resolution=0), 11, [1, 2, 4, 8, 16, 12, 10, 11]),
        (Growth(largest=64, resolution=0.25), 11, [1, 2, 4, 8, 16, 12, 10]),
        (Growth(first=8), 3, [8, 4, 2, 3]),
        (Growth(first=8), 0, [8, 4, 2, 1]),
        (Growth(largest=1), 0, [1]),
        (Growth(sizes=[8, 12, 20]), 100, [8, 12, 20]),
        (Growth(sizes=[8, 12, 20, 40]), 12, [8, 12, 20]),
    ],
)
def test_sizes_that_are_tried(growth, capacity, tried):
    assert sizes_tried(growth, capacity) == tried


def test_known_sizes_are_not_tried_again():
    assert sizes_tried(Growth(), 5, {1: True, 2: True, 4: True}) == [8, 6, 5]
    assert sizes_tried(Growth(sizes=[1, 2, 3]), 9, {1: True, 2: True}) == [3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Growth(first=0), "from 0 to 64"),
        (lambda: Growth(first=9, largest=8), "from 9 to 8"),
        (lambda: Growth(sizes=[2, 1]), "ascending"),
    ],
)
def test_senseless_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
