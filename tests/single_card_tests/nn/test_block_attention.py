"""Attention to chosen blocks: what is computed of which tokens, in all implementations.

Shapes: as in `paddle_vl.nn.block_attention`.
"""

from itertools import pairwise

import numpy as np
import paddle
import pytest

from paddle_vl.nn.attention import causal_attention
from paddle_vl.nn.block_attention import best_blocks, block_attention, chosen_attention
from paddle_vl.nn.block_samples import BlockSamples, BlockSizes, Choosing, equal_samples
from paddle_vl.nn.cpu import block_attention as in_c
from paddle_vl.nn.cpu import kernels
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.examples import normal
from tests.support.implementations import implementation, require_compiled

# Tokens of a block, blocks of a query; query and key heads, width; tokens of samples, and how many
# of them are only keys, of tokens before.
SIZES = {
    "published groups": (4, 6, 12, 1, 32, (150, 20, 31), 0),
    "one head per key": (4, 3, 3, 3, 72, (40,), 0),
    "odd sizes": (3, 5, 10, 2, 17, (100, 21, 22), 0),
    "a token per block": (1, 5, 4, 2, 8, (30, 6), 0),
    "large blocks": (16, 3, 5, 1, 16, (130, 64), 0),
    "keys of before": (4, 3, 4, 2, 12, (60, 50), 31),
}


def drawn(sizes, seed=0):
    """Samples, queries, keys, values and a random choice."""
    size, number, heads, key_heads, width, lengths, before = sizes
    rng = np.random.default_rng(seed)
    ends = np.cumsum(lengths)
    rows = [
        (end - length - n * before, length - before, end - length, length)
        for n, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    samples = BlockSamples(np.array(rows, dtype=np.int64), BlockSizes(size, number))
    places = np.concatenate([part.places().numpy().ravel() for part in samples.parts])
    chosen = [np.sort(rng.permutation((place + 1) // size)[:number]) for place in places]
    shapes = (ends[-1] - before * len(lengths), heads), *[(ends[-1], key_heads)] * 2
    qkv = [normal(rng, *shape, width) for shape in shapes]
    return samples, qkv, np.array(chosen, dtype=np.int32)


def values_and_gradients(samples, qkv, chosen, trained=(True, True, True)):
    inputs = [paddle.to_tensor(x, stop_gradient=not of) for x, of in zip(qkv, trained, strict=True)]
    out = chosen_attention(*inputs, paddle.to_tensor(chosen), samples)
    out.backward(paddle.cos(paddle.arange(out.size, dtype="float32")).reshape(out.shape))
    return [out.numpy(), *(None if x.grad is None else x.grad.numpy() for x in inputs)]


@pytest.mark.parametrize("name", SIZES)
def test_the_compiled_kernel_equals_the_plain_operation(name):
    """Of more than one chunk of queries, and of sizes that no vector divides."""
    given = drawn(SIZES[name])
    with use_kernels("plain"):
        wanted = values_and_gradients(*given)
    with implementation("compiled"):
        found = values_and_gradients(*given)
        assert chosen_attention.chosen(*_tensors(given)) == in_c.chosen_attention
    for mine, plain in zip(found, wanted, strict=True):
        assert np.abs(mine - plain).max() < 3e-6 * np.abs(plain).max()


def _tensors(given):
    samples, qkv, chosen = given
    return *map(paddle.to_tensor, qkv), paddle.to_tensor(chosen), samples


@pytest.mark.parametrize("places", [(0,), (1, 2), (0, 1, 2)])
def test_what_is_frozen_gets_no_gradient(places):
    given, trained = drawn(SIZES["odd sizes"]), [n in places for n in range(3)]
    with implementation("compiled"):
        all_three, some = values_and_gradients(*given), values_and_gradients(*given, trained)
    for of, mine, wanted in zip(trained, some[1:], all_three[1:], strict=True):
        assert (mine == wanted).all() if of else mine is None


def test_bits_do_not_depend_on_the_number_of_threads():
    require_compiled()
    given, found, before = drawn(SIZES["published groups"]), [], kernels.library()
    threads = before.omp_get_max_threads()
    try:
        for count in (1, 2, 3):
            before.omp_set_num_threads(count)
            with implementation("compiled"):
                found.append(values_and_gradients(*given))
    finally:
        before.omp_set_num_threads(threads)
    for one, other in pairwise(found):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


def test_the_compiled_kernel_does_not_read_tokens_that_no_query_sees():
    """A product with NaN is NaN, masked or not."""
    samples, (q, k, v), chosen = drawn(SIZES["published groups"])
    size, number = samples.sizes
    chosen[:] = np.arange(number)
    # The last tokens of blocks that none chose, which are in no tail.
    unseen = [
        part.key + np.arange((number + 1) * size - 1, part.place + part.count, size)
        for part in samples.parts
    ]
    with implementation("compiled"):
        wanted = values_and_gradients(samples, (q, k, v), chosen)
        k[np.concatenate(unseen)] = v[np.concatenate(unseen)] = np.nan
        found = values_and_gradients(samples, (q, k, v), chosen)
    for mine, clean in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, clean)
    assert not found[2][np.concatenate(unseen)].any()


@pytest.mark.parametrize("name", ["plain", "cpu"])
def test_products_of_a_query_do_not_grow_with_its_sample(name, monkeypatch):
    """Multiplications and additions: those of its head with P keys, and with P values."""
    counts, product = [], paddle.matmul

    def counted(x, y, **options):
        out = product(x, y, **options)
        counts.append(out.size * x.shape[-1])
        return out

    monkeypatch.setattr(paddle, "matmul", counted)
    size, number, heads, key_heads, width, *_ = SIZES["published groups"]
    for length in (50, 400):
        given = drawn((size, number, heads, key_heads, width, (length,), 0))
        counts.clear()
        with implementation(name):
            chosen_attention(*_tensors(given))
        reach = size * number + size - 1
        assert sum(counts) == given[0].num_queries * reach * width * heads * 2


# Scores of a row's blocks by name, of which 4 are chosen.
SCORES = {
    "all zero": np.zeros(9),
    "all equal": np.full(9, 0.3),
    "fewer than chosen": np.array([0, 0, 1, 0, 0, 0, 2, 0, 0]),
    "equal at the cut": np.array([3, 1, 5, 1, 1, 5, 1, 4, 1]),
    "neighbours": np.nextafter(np.float32(0.5), np.arange(9) % 3, dtype=np.float32),
    "tiny and huge": np.array([1e-45, 3e38, 0, np.inf, 1e-38, 3e38, 2e-45, 1e-45, 1e-45]),
}


@pytest.mark.parametrize("name", ["plain", "compiled"])
def test_the_best_blocks_are_the_first_ones_of_a_stable_order(name):
    """Of complete blocks: the first queries have less of them behind them."""
    sizes, scores = BlockSizes(2, 4), np.stack([*SCORES.values()]).astype(np.float32)
    for seen in range(8, 14):
        part = Choosing(0, len(scores), 0, seen - 1, 0, 0, 9)
        complete = [(seen + n) // 2 for n in range(len(scores))]
        wanted = [
            sorted(np.argsort(-row[:number], kind="stable")[:4].tolist())
            for row, number in zip(scores, complete, strict=True)
        ]
        with implementation(name):
            found = best_blocks(paddle.to_tensor(scores), part, sizes)
        assert (found.dtype, found.tolist()) == (paddle.int32, wanted)


@pytest.mark.parametrize("name", ["plain", "cpu", "compiled"])
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_to_all_blocks_is_dense(name, batch):
    """A sample of as many blocks as are chosen and one more, whose last query chooses."""
    sizes, rng = BlockSizes(4, 5), np.random.default_rng(1)
    length = sizes.reach + 1
    samples = equal_samples(batch, length, sizes)
    q, k, v = (paddle.to_tensor(normal(rng, batch * length, n, 16)) for n in (4, 2, 2))
    with implementation(name):
        chosen = paddle.to_tensor(np.tile(np.arange(5, dtype=np.int32), [batch, 1]))
        found = block_attention(q, k, v, chosen, samples).reshape([batch, length, 4, 16])
        dense = causal_attention(*(x.reshape([batch, length, *x.shape[1:]]) for x in (q, k, v)))
    np.testing.assert_allclose(found[:, :-1].numpy(), dense[:, :-1].numpy(), atol=1e-6)
    assert np.abs((found - dense)[:, -1].numpy()).max() > 1e-3
