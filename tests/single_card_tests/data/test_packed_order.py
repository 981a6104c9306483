"""Packing samples into rows, and the order of packed batches.

Guarantees: every sample is in one row of an epoch; no row exceeds its tokens or vision tokens; all
batches are full, equally many on every rank; 97 % of the tokens of a realistic mix are real after
padding, with a binding budget of vision tokens and without; the order follows from seed and epoch,
differs between epochs, and does not depend on the number of ranks.

The mix: half text of log-normal length (median 245 tokens, sigma 0.9, 16 to 3000 tokens), half with
one to three images of 64, 256, 400 or 784 tokens plus such a text, cut at a row of 4096.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_vl.data.loader import PackedOrder
from paddle_vl.data.packing import WINDOW, RowBudget, SampleLengths, fill_batches, pack

ROW = 4096


def realistic_mix(num_samples: int, seed: int = 0) -> SampleLengths:
    rng = np.random.default_rng(seed)
    text = np.clip(np.exp(rng.normal(5.5, 0.9, num_samples)), 16, 3000).astype(np.int64)
    images = rng.integers(1, 4, num_samples) * (rng.random(num_samples) < 0.5)
    vision = images * rng.choice([64, 256, 400, 784], num_samples)
    return SampleLengths(np.minimum(text + vision + 2 * images, ROW), vision)


def padded_tokens(rows: list, lengths: SampleLengths, batch_size: int) -> int:
    """Token count of batches padded to their longest row."""
    sums = np.array([lengths.tokens[row].sum() for row in rows]).reshape(-1, batch_size)
    return int(sums.max(axis=1).sum()) * batch_size


@pytest.mark.parametrize("vision_tokens", [None, 2400])
@pytest.mark.parametrize("num_samples", [3000, 20000])
def test_97_percent_of_the_tokens_are_real(num_samples, vision_tokens):
    lengths = realistic_mix(num_samples)
    order = PackedOrder(lengths, RowBudget(ROW, vision_tokens), batch_size=4, seed=3)
    rows = order.rows(0)
    assert lengths.tokens.sum() / (len(rows) * ROW) >= 0.97
    assert lengths.tokens.sum() / padded_tokens(rows, lengths, 4) >= 0.97
    vision = [lengths.vision[row].sum() for row in rows]
    assert max(vision) <= (vision_tokens or ROW)
    if vision_tokens is not None:
        assert max(vision) > 0.9 * vision_tokens


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, vision=st.sampled_from([None, 12, 15]), batch=st.integers(1, 5))
def test_rows_hold_every_sample_once_within_the_budget(sizes, vision, batch):
    tokens, seen = np.array(sizes).T
    lengths = SampleLengths(tokens, np.minimum(tokens, seen))
    budget = RowBudget(20, vision)
    rows = pack(np.arange(len(sizes)), lengths, budget, np.random.default_rng(0))
    rows = fill_batches(rows, lengths, batch)
    assert len(rows) % batch == 0
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(sizes)))
    for row in rows:
        assert lengths.tokens[row].sum() <= 20
        assert lengths.vision[row].sum() <= (vision or 20)
    empty = sum(not row.size for row in rows)
    assert empty < batch
    assert not empty or max(len(row) for row in rows[len(rows) - batch :]) == 1


def test_windows_lose_nothing_and_do_not_pile_up_what_fits_nowhere():
    """With samples of 0.6 rows, every row is too empty to be kept at first."""
    lengths = SampleLengths(np.full(3 * WINDOW, 6), np.zeros(3 * WINDOW, dtype=np.int64))
    rows = pack(np.arange(3 * WINDOW), lengths, RowBudget(10), None)
    assert sorted(row.tolist() for row in rows) == [[i] for i in range(3 * WINDOW)]


def test_a_sample_that_fits_no_row_is_refused():
    lengths = SampleLengths(np.array([5, 9]), np.array([0, 8]))
    with pytest.raises(ValueError, match="sample 1 has 9 tokens and a packed row holds 8"):
        pack(np.arange(2), lengths, RowBudget(8), None)
    with pytest.raises(ValueError, match="sample 1 has 8 vision tokens and a packed row holds 7"):
        pack(np.arange(2), lengths, RowBudget(9, 7), None)


def order(rank: int = 0, size: int = 1, seed: int = 1, batch_size: int = 4) -> PackedOrder:
    lengths = realistic_mix(300)
    lengths.tokens[[7, 11]] = 0
    return PackedOrder(lengths, RowBudget(ROW), batch_size // size, seed, rank, size)


def batches(source: PackedOrder, epoch: int) -> list:
    numbers = range(source.batches_in(epoch))
    return [[row.tolist() for row in source.batch(epoch, number)] for number in numbers]


def test_an_epoch_has_every_sample_once_but_those_without_tokens():
    for epoch in range(3):
        rows = [number for batch in batches(order(), epoch) for row in batch for number in row]
        assert sorted(rows) == [number for number in range(300) if number not in (7, 11)]


def test_order_follows_from_seed_and_epoch():
    assert batches(order(), 2) == batches(order(), 2)
    assert batches(order(), 1) != batches(order(), 2)
    assert batches(order(seed=2), 1) != batches(order(), 1)


def test_ranks_together_have_the_rows_of_one_process():
    one = batches(order(), 0)
    ranks = [batches(order(rank, 2), 0) for rank in range(2)]
    assert [len(batch) for batch in ranks[0]] == [2] * len(one)
    for whole, *parts in zip(one, *ranks, strict=True):
        assert [whole[0::2], whole[1::2]] == parts


def test_fewer_samples_than_rows_of_a_batch_are_refused():
    lengths = SampleLengths(np.array([5, 0, 5]), np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="2 samples do not fill one batch of 3 packed rows on 1"):
        PackedOrder(lengths, RowBudget(8), 3, 0)
