"""The order of a source's documents.

Guarantees: every epoch has every document once, in another order than the one before, as a pure
function of seed and place; by shards, only a few shards are mixed at a time.
"""

import numpy as np
import pytest

from paddle_vl.data.corpus.order import DocumentOrder, permuted

GROUPS = (5, 3, 9, 1, 7)


def epoch_of(order: DocumentOrder, epoch: int) -> list[int]:
    start = epoch * order.count
    return [order.document(start + place) for place in range(order.count)]


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000])
def test_a_permutation_has_every_number_once(count):
    assert sorted(permuted(i, count, (3, 4)) for i in range(count)) == list(range(count))


@pytest.mark.parametrize("at_once", [None, 1, 2, 9])
def test_an_epoch_has_every_document_once_in_its_own_order(at_once):
    order = DocumentOrder(GROUPS, at_once, seed=5)
    epochs = [epoch_of(order, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(25)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != epoch_of(DocumentOrder(GROUPS, at_once, seed=6), 0)
    assert epochs[1] == epoch_of(DocumentOrder(GROUPS, at_once, seed=5), 1)


def test_a_permutation_leaves_no_neighbours_together():
    images = np.array([permuted(i, 10_000, (1, 2)) for i in range(10_000)])
    steps = np.abs(np.diff(images))
    # Of random permutations a third of the range on average.
    assert 3000 < steps.mean() < 3700
    assert abs(np.corrcoef(images, np.arange(10_000))[0, 1]) < 0.05


def test_by_shards_a_few_are_mixed_at_a_time():
    order = DocumentOrder((100,) * 10, 2, seed=1)
    shards = np.array(epoch_of(order, 0)) // 100
    for block in shards.reshape(5, 200):
        assert len(set(block.tolist())) == 2
        # Both are mixed, not read one after the other.
        assert np.count_nonzero(np.diff(block)) > 50
    assert sorted(shards.tolist()) == sorted(np.repeat(np.arange(10), 100).tolist())
