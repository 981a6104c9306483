"""Attention on the CPU in query blocks.

Guarantees: for scores of any size, chunks of any size and masks of any kind, values and gradients
are those of the plain implementation, also without oneDNN; keys that no query of a block sees are
not multiplied; probabilities are not kept for the backward pass; a single query over whole buffers
sees the keys so far and no hidden or free position.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.nn.attention import (
    CachedKeys,
    PackedSamples,
    cached_attention,
    causal_attention,
    masked_attention,
)
from paddle_vl.nn.attention_masks import MASKED_SCORE, AttentionMask, BlockMask
from paddle_vl.nn.cpu import attention, onednn
from paddle_vl.nn.dispatch import use_kernels

pytestmark = pytest.mark.usefixtures("uncompiled")


def draw(*shape, seed=0, scale=1.0):
    value = np.random.default_rng(seed).normal(size=shape) * scale
    return paddle.to_tensor(value.astype(np.float32), stop_gradient=False)


def qkv(length=300, scale=1.0, value_scale=1.0):
    return [draw(2, length, 4, 8, seed=1, scale=scale), draw(2, length, 2, 8, seed=2),
            draw(2, length, 2, 8, seed=3, scale=value_scale)]  # fmt: skip


def gradients(run, inputs):
    out = run(*inputs)
    weight = paddle.to_tensor(np.random.default_rng(9).normal(size=out.shape).astype(np.float32))
    return [out, *paddle.grad((out * weight).sum(), inputs)]


def assert_equals_plain(run, inputs, tolerance=1e-5):
    """Values and gradients, relative to the largest."""
    results = []
    for kernels in ("cpu", "plain"):
        with use_kernels(kernels):
            results.append(gradients(run, inputs))
    for mine, plain in zip(*results, strict=True):
        mine, plain = mine.numpy(), plain.numpy()
        np.testing.assert_allclose(mine, plain, atol=tolerance * np.abs(plain).max())


CHUNKS = pytest.mark.parametrize("chunk", [1, 1 << 20, 8 << 20], ids=["heads", "some", "all"])


@CHUNKS
@pytest.mark.parametrize("has_library", [True, False], ids=["oneDNN", "Paddle"])
def test_heads_are_computed_in_chunks(monkeypatch, chunk, has_library):
    if not has_library:
        monkeypatch.setattr(onednn, "is_available", lambda: False)
    monkeypatch.setattr(attention, "_CHUNK_BYTES", chunk)
    assert_equals_plain(causal_attention, qkv())


@pytest.mark.parametrize(
    ("scale", "value_scale", "tolerance"),
    [(20.0, 1.0, 1e-4), (300.0, 1.0, 2e-3), (1.0, 1e35, 1e-5)],
)
def test_scores_and_values_of_any_size_are_exact(scale, value_scale, tolerance):
    assert_equals_plain(causal_attention, qkv(40, scale, value_scale), tolerance)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_so(which, value):
    inputs = [x.numpy() for x in qkv(length=20)]
    inputs[which][0, 3, 0, 0] = value
    with use_kernels("cpu"):
        out = causal_attention(*map(paddle.to_tensor, inputs))
    assert not np.isfinite(out[0, 3:].numpy()).all()
    assert np.isfinite(out[1].numpy()).all()


def test_packed_samples_equal_a_dense_mask():
    packed = PackedSamples(np.array([0, 200, 300, 430, 600]), 300)
    assert_equals_plain(lambda *x: causal_attention(*x, packed=packed), qkv(scale=20.0), 1e-4)


@pytest.mark.parametrize("keys", [slice(200, 300), slice(0, 10)], ids=["last", "first"])
def test_masked_keys_are_not_seen(keys):
    bias = np.zeros([2, 300], np.float32)
    bias[1, keys] = MASKED_SCORE
    seen = np.ones([2, 300, 1, 1], np.float32)
    seen[1, : keys.stop if keys.start == 0 else 0] = 0.0

    def run(q, k, v):
        # The first queries see masked keys only: any finite average.
        out = causal_attention(q, k, v, paddle.to_tensor(bias))
        assert np.isfinite(out.numpy()).all()
        return out * paddle.to_tensor(seen)

    assert_equals_plain(run, qkv())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_query_without_a_key_gets_the_average_or_zero(implementation):
    visible = np.random.default_rng(4).random([2, 300, 300]) < 0.3
    visible[0, 5] = visible[1, 200:] = False
    mask = AttentionMask(paddle.to_tensor(visible))
    q, k, v = qkv()
    with use_kernels("cpu"):
        out = masked_attention(q, k, v, mask, 0.3, implementation)
    wanted = v[1].mean(axis=0).repeat_interleave(2, axis=0) * (implementation == "eager")
    np.testing.assert_allclose(out[1, 250].numpy(), wanted.numpy(), atol=1e-6)
    assert_equals_plain(lambda *x: masked_attention(*x, mask, 0.3, implementation), [q, k, v])


@CHUNKS
@pytest.mark.parametrize("queries", [50, 300], ids=["one block", "blocks"])
def test_chunks_of_heads_have_their_own_masks(monkeypatch, chunk, queries):
    monkeypatch.setattr(attention, "_CHUNK_BYTES", chunk)
    visible = np.random.default_rng(4).random([2, queries, 300]) < 0.3
    mask = AttentionMask(paddle.to_tensor(visible))
    q, k, v = qkv()
    q = q.detach()[:, :queries]
    q.stop_gradient = False
    assert_equals_plain(lambda *x: masked_attention(*x, mask, 0.3, "sdpa"), [q, k, v])


def test_keys_that_a_block_does_not_see_are_not_multiplied(monkeypatch):
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


def test_other_dtypes_are_computed_in_theirs():
    inputs = [x.detach().astype("float64") for x in qkv(length=150)]
    for x in inputs:
        x.stop_gradient = False
    with use_kernels("cpu"):
        found = gradients(lambda *x: causal_attention(*x).astype("float32"), inputs)
    assert [x.dtype for x in found[1:]] == [paddle.float64] * 3
    assert_equals_plain(lambda *x: causal_attention(*x).astype("float32"), inputs, 1e-6)


def test_backward_keeps_no_probabilities():
    """Live memory after the forward pass is that of a few rows, not of scores."""
    length = 1024
    inputs = [draw(1, length, 4, 8, seed=s) for s in (1, 2, 3)]
    core = paddle.base.core
    with use_kernels("cpu"):
        # Masks are made once.
        causal_attention(*inputs)
        before = core.host_memory_stat_current_value("Allocated", 0)
        out = causal_attention(*inputs)
        kept = core.host_memory_stat_current_value("Allocated", 0) - before
    scores = 4 * length * length * 4 // 2
    assert kept < scores / 8, out.shape


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("is_padded", [False, True])
def test_whole_buffers_give_the_attention_of_the_keys_so_far(length, is_padded):
    batch, heads, key_heads, width, capacity, keys = 2, 6, 2, 8, 11, 7
    query = draw(batch, length, heads, width)
    buffers = [draw(batch, key_heads, capacity, width, seed=seed) for seed in (1, 2)]
    bias_BS = None
    if is_padded:
        bias_BS = paddle.zeros([batch, keys])
        bias_BS[1, :3] = MASKED_SCORE
    with use_kernels("plain"):
        wanted = cached_attention(query, *buffers, CachedKeys(keys, bias_BS)).numpy()
    with use_kernels("cpu"):
        found = cached_attention(query, *buffers, CachedKeys(keys, bias_BS)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    hidden = buffers[1].detach().clone()
    hidden[:, :, keys:] = 1e4
    if is_padded:
        hidden[1, :, :3] = -1e4
    with use_kernels("cpu"):
        again = cached_attention(query, buffers[0], hidden, CachedKeys(keys, bias_BS)).numpy()
    np.testing.assert_array_equal(again, found)
