"""Attention on the CPU by exponentials without a maximum.

Guarantees: where no score can leave the range of the exponential function, probabilities are
computed again in backward and none is kept; beyond it, for values too large for the sums, for rows
that see no key, for NaN and for other dtypes Paddle's softmax runs, with the same results as
without this path; a mask is divided like the heads, and keys that no query of a block sees are not
multiplied; results do not depend on the library that computes the exponentials.
"""

from itertools import pairwise

import numpy as np
import paddle
import pytest

from paddle_vl.nn.attention import (
    MASKED_SCORE,
    AttentionMask,
    BlockMask,
    PackedSamples,
    causal_attention,
    masked_attention,
)
from paddle_vl.nn.cpu import attention
from paddle_vl.nn.operations import use_kernels


def draw(*shape, seed, scale=1.0):
    value = np.random.default_rng(seed).normal(size=shape) * scale
    return paddle.to_tensor(value.astype(np.float32), stop_gradient=False)


@pytest.fixture
def paths(monkeypatch):
    """Whether each attention so far was by exponentials."""
    taken, run = [], attention._exponential_attention

    def recorded(*args):
        result = run(*args)
        taken.append(result[0] is not None)
        return result

    monkeypatch.setattr(attention, "_exponential_attention", recorded)
    return taken


def gradients(run, inputs):
    out = run(*inputs)
    weight = paddle.to_tensor(np.random.default_rng(9).normal(size=out.shape).astype(np.float32))
    return [out, *paddle.grad((out * weight).sum(), inputs)]


def assert_equals_softmax(run, inputs, tolerance=1e-5):
    """Values and gradients with this path equal those without, relative to the largest."""
    with use_kernels("cpu"):
        found = gradients(run, inputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "exponentials_are_safe", lambda *tensors: False)
            wanted = gradients(run, inputs)
    for mine, other in zip(found, wanted, strict=True):
        mine, other = mine.numpy(), other.numpy()
        np.testing.assert_allclose(mine, other, atol=tolerance * np.abs(other).max())


def qkv(length=300, scale=1.0, value_scale=1.0):
    return [draw(2, length, 4, 8, seed=1, scale=scale), draw(2, length, 2, 8, seed=2),
            draw(2, length, 2, 8, seed=3, scale=value_scale)]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 1 << 20, 8 << 20], ids=["heads", "some", "all"])
def test_scores_within_range_are_exponentiated_in_chunks(paths, monkeypatch, chunk):
    monkeypatch.setattr(attention, "_CHUNK_BYTES", chunk)
    assert_equals_softmax(causal_attention, qkv())
    assert paths == [True]


def test_scores_near_the_end_of_the_range_are_exact(paths):
    q, k, v = (x.detach() for x in qkv())
    longest = [float((x * x).sum(-1).max()) ** 0.5 for x in (q, k)]
    q = q * (0.99 * 40.0 * 8**0.5 / (longest[0] * longest[1]))
    inputs = [q, k, v]
    for x in inputs:
        x.stop_gradient = False
    assert_equals_softmax(causal_attention, inputs, 5e-5)
    assert paths == [True]


@pytest.mark.parametrize("scale", [20.0, 1e10, 1e30])
def test_scores_beyond_the_range_go_to_the_softmax(paths, scale):
    assert_equals_softmax(causal_attention, qkv(scale=scale))
    assert paths == []


@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["exponentials", "softmax"])
def test_packed_samples_equal_samples_alone_on_both_ways(paths, scale):
    ends = [0, 200, 430, 600]
    packed = PackedSamples(np.array(ends), 300)
    inputs = qkv(scale=scale)

    def alone(*tensors):
        rows = [x.reshape([1, 600, *x.shape[2:]]) for x in tensors]
        outputs = [
            causal_attention(*(x[:, begin:end] for x in rows)) for begin, end in pairwise(ends)
        ]
        return paddle.concat(outputs, axis=1).reshape(tensors[0].shape)

    with use_kernels("cpu"):
        found = gradients(lambda *x: causal_attention(*x, packed=packed), inputs)
    assert paths == [True] * (scale == 1.0)
    with use_kernels("plain"):
        wanted = gradients(alone, inputs)
    for mine, other in zip(found, wanted, strict=True):
        largest = np.abs(other.numpy()).max()
        np.testing.assert_allclose(mine.numpy(), other.numpy(), atol=2e-5 * largest)


def test_values_too_large_for_the_sums_go_to_the_softmax(paths):
    assert_equals_softmax(causal_attention, qkv(length=40, value_scale=1e37))
    assert paths == []


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_go_to_the_softmax(paths, which, value):
    inputs = [x.numpy() for x in qkv(length=20)]
    inputs[which][0, 3, 0, 0] = value
    inputs = [paddle.to_tensor(x) for x in inputs]
    assert not attention.exponentials_are_safe(*inputs)
    with use_kernels("cpu"):
        causal_attention(*inputs)
    assert paths == []


def test_masked_keys_are_not_seen(paths):
    bias = np.zeros([2, 300], np.float32)
    bias[1, 200:] = MASKED_SCORE
    bias = paddle.to_tensor(bias)
    assert_equals_softmax(lambda q, k, v: causal_attention(q, k, v, bias), qkv())
    assert paths == [True]


def test_a_row_of_masked_keys_goes_to_the_softmax(paths):
    bias = np.zeros([2, 300], np.float32)
    bias[1, :10] = MASKED_SCORE
    bias = paddle.to_tensor(bias)
    assert_equals_softmax(lambda q, k, v: causal_attention(q, k, v, bias), qkv())
    assert paths == [False]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_query_without_a_key_gets_what_the_softmax_gives(paths, implementation):
    visible = np.random.default_rng(4).random([2, 300, 300]) < 0.3
    visible[0, 5] = visible[1, 200:] = False
    mask = AttentionMask(paddle.to_tensor(visible))

    def run(q, k, v):
        return masked_attention(q, k, v, mask, 0.3, implementation)

    assert_equals_softmax(run, qkv())
    assert paths == [True]


@pytest.mark.parametrize("chunk", [1, 1 << 20, 8 << 20], ids=["heads", "some", "all"])
@pytest.mark.parametrize("queries", [50, 300], ids=["one block", "blocks"])
def test_chunks_of_heads_have_their_own_masks(paths, monkeypatch, chunk, queries):
    monkeypatch.setattr(attention, "_CHUNK_BYTES", chunk)
    visible = np.random.default_rng(4).random([2, queries, 300]) < 0.3
    mask = AttentionMask(paddle.to_tensor(visible))
    q, k, v = qkv()
    q = q.detach()[:, :queries]
    q.stop_gradient = False
    assert_equals_softmax(lambda *x: masked_attention(*x, mask, 0.3, "sdpa"), [q, k, v])
    assert paths == [True]


def test_keys_that_a_block_does_not_see_are_not_multiplied(paths, monkeypatch):
    length, sizes, product = 512, [], paddle.matmul
    marks = paddle.ones([1, length], dtype="int64")
    mask = BlockMask(paddle.ones([1, length], dtype="bool"), marks)
    q, k, v = (draw(1, length, 1, 8, seed=seed) for seed in range(3))

    def recorded(x, y, **settings):
        out = product(x, y, **settings)
        sizes.append(out.shape[-1] if settings else 0)
        return out

    monkeypatch.setattr(paddle, "matmul", recorded)
    with use_kernels("cpu"):
        masked_attention(q, k, v, mask, 0.3)
    assert [size for size in sizes if size] == [128, 256, 384, 512]
    assert paths == [True]


def test_small_gradients_at_the_end_of_the_range_are_exact(paths):
    q, k, v = (x.detach() for x in qkv())
    longest = [float((x * x).sum(-1).max()) ** 0.5 for x in (q, k)]
    q = q * (0.99 * 40.0 * 8**0.5 / (longest[0] * longest[1]))
    inputs = [q, k, v]
    for x in inputs:
        x.stop_gradient = False
    assert_equals_softmax(lambda *x: causal_attention(*x) * 1e-15, inputs, 5e-5)
    assert paths == [True]


def test_bfloat16_goes_to_the_softmax(paths):
    q, k, v = (x.astype("bfloat16") for x in qkv(length=20))
    assert not attention.exponentials_are_safe(q, k, v)


def test_backward_keeps_no_probabilities():
    """Live memory after the forward pass is that of a few rows, not of scores."""
    length = 1024
    inputs = [draw(1, length, 4, 8, seed=s) for s in (1, 2, 3)]
    core = paddle.base.core
    with use_kernels("cpu"):
        # Masks are made once.
        causal_attention(*inputs)
    kept = []
    for is_safe in (True, False):
        with pytest.MonkeyPatch.context() as patch, use_kernels("cpu"):
            if not is_safe:
                patch.setattr(attention, "exponentials_are_safe", lambda *tensors: False)
            before = core.host_memory_stat_current_value("Allocated", 0)
            out = causal_attention(*inputs)
            kept.append(core.host_memory_stat_current_value("Allocated", 0) - before)
            del out
    scores = 4 * length * length * 4 // 2
    assert kept[0] < scores / 8
    assert kept[1] > scores


def test_paddles_exponential_gives_the_same(paths, monkeypatch):
    if attention._vector_exponential() is None:
        pytest.skip("this build of Paddle has no library with vsExp")
    with use_kernels("cpu"):
        found = gradients(causal_attention, qkv())
        monkeypatch.setattr(attention, "_vector_exponential", lambda: None)
        other = gradients(causal_attention, qkv())
    for mine, theirs in zip(found, other, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-5)
    assert paths == [True, True]
