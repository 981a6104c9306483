"""Sample order: a pure function of seed, epoch and batch number, split over ranks.

Guarantees: an epoch has every sample once; epochs and seeds differ; the order does not depend on
earlier calls; all ranks together see the batch of a single rank; an incomplete last batch is
dropped only on request.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vl.data.loader import SampleOrder


def order(num_samples=10, batch_size=2, **options):
    defaults = {"shuffle": True, "seed": 1, "drop_last": False}
    return SampleOrder(num_samples, batch_size, **{**defaults, **options})


def epoch_of(samples: SampleOrder, epoch: int) -> list[int]:
    batches = [samples.batch(epoch, number) for number in range(samples.batches_in(0))]
    return np.concatenate(batches).tolist()


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3), st.booleans())
def test_epoch_holds_every_sample_once(num_samples, batch_size, epoch, shuffle):
    samples = order(num_samples, batch_size, shuffle=shuffle)
    assert sorted(epoch_of(samples, epoch)) == list(range(num_samples))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_ranks_together_see_the_batches_of_one_process(num_samples, batch_size, size, drop_last):
    if drop_last and num_samples < batch_size * size:
        return
    one = order(num_samples, batch_size * size, drop_last=drop_last)
    ranks = [
        order(num_samples, batch_size, drop_last=drop_last, rank=rank, size=size)
        for rank in range(size)
    ]
    assert {rank.batches_in(0) for rank in ranks} == {one.batches_in(0)}
    for batch in range(one.batches_in(0)):
        parts = [rank.batch(2, batch).tolist() for rank in ranks]
        assert sorted(number for part in parts for number in part) == sorted(
            one.batch(2, batch).tolist()
        )
        lengths = [len(part) for part in parts]
        assert max(lengths) <= batch_size
        assert max(lengths) - min(lengths) <= (0 if drop_last else 1)


def test_epochs_and_seeds_have_different_orders():
    orders = [epoch_of(order(seed=seed), epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4


def test_order_does_not_depend_on_what_was_asked_before():
    first = order()
    for epoch in range(9):
        first.batch(epoch, 0)
    assert epoch_of(first, 3) == epoch_of(order(), 3)


def test_file_order_without_shuffling():
    assert epoch_of(order(5, shuffle=False), 7) == [0, 1, 2, 3, 4]


def test_rest_of_an_epoch_is_left_out_when_asked():
    assert [order(5, drop_last=drop).batches_in(0) for drop in (True, False)] == [2, 3]


def test_too_few_samples_for_a_batch_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"7 samples do not fill one batch of 4 on 2 .* rank"):
        order(7, 4, drop_last=True, size=2)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"rank": 2, "size": 2}, {"rank": -1}])
def test_impossible_numbers_are_refused(options):
    with pytest.raises(ValueError, match=r"at least 1|outside"):
        order(**options)
