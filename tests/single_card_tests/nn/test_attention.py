"""Causal and segment attention of every implementation, against softmax over a dense mask.

The oracle repeats key heads and masks densely in double precision. Which kernels a GPU runs:
`test_gpu_kernel_contracts`.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.batch.positions import segment_offsets
from paddle_vl.nn.attention import (
    CachedKeys,
    PackedSamples,
    Segments,
    cached_attention,
    causal_attention,
    masked_attention,
)
from paddle_vl.nn.attention_masks import MASKED_SCORE, AttentionMask, BlockMask
from paddle_vl.nn.cpu import attention, onednn
from paddle_vl.nn.cpu.attention import packed_blocks
from tests.support.implementations import implementation


@pytest.fixture(params=["cpu", "plain", "a100", "h100"])
def _kernels(request):
    with implementation(request.param):
        yield


def draw(*shape, seed=0, scale=1.0):
    value = np.random.default_rng(seed).normal(size=shape) * scale
    return paddle.to_tensor(value.astype(np.float32), stop_gradient=False)


def dense(q, k, v, allowed):
    """Softmax with a dense `[B, 1, L, S]` mask and repeated key heads."""
    q, k, v = (x.astype("float64").transpose([0, 2, 1, 3]) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, axis=1) for x in (k, v))
    scores = paddle.matmul(q, k, transpose_y=True) * q.shape[-1] ** -0.5
    scores = paddle.where(paddle.to_tensor(allowed), scores, paddle.full_like(scores, -1e30))
    out = paddle.matmul(paddle.nn.functional.softmax(scores), v)
    return out.transpose([0, 2, 1, 3]).astype("float32")


def assert_same(found, wanted, inputs, rows=None):
    """Equal values and gradients on the selected rows."""
    keep = np.ones(found.shape[:2], bool) if rows is None else rows
    weight = np.random.default_rng(5).normal(size=found.shape) * keep[..., None, None]
    weight = paddle.to_tensor(weight.astype(np.float32))
    np.testing.assert_allclose(found.numpy()[keep], wanted.numpy()[keep], atol=3e-6)
    pairs = [paddle.grad((out * weight).sum(), inputs) for out in (found, wanted)]
    for mine, plain in zip(*pairs, strict=True):
        np.testing.assert_allclose(mine.numpy(), plain.numpy(), atol=1e-5)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
def test_causal_attention_equals_a_dense_mask(length, heads, key_heads):
    q = draw(2, length, heads, 8, seed=1)
    k, v = (draw(2, length, key_heads, 8, seed=s) for s in (2, 3))
    allowed = np.tril(np.ones((length, length), bool))[None, None]
    assert_same(causal_attention(q, k, v), dense(q, k, v, allowed), [q, k, v])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("length", [1, 3, 150])
def test_queries_after_cached_keys_see_all_of_them(length):
    q = draw(2, length, 4, 8, seed=1)
    k, v = (draw(2, length + 9, 2, 8, seed=s) for s in (2, 3))
    allowed = np.tril(np.ones((length, length + 9), bool), 9)[None, None]
    assert_same(causal_attention(q, k, v), dense(q, k, v, allowed), [q, k, v])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("length", [6, 200])
def test_masked_keys_are_not_seen_and_a_row_of_masked_keys_is_finite(length):
    q = draw(2, length, 4, 8, seed=1)
    k, v = (draw(2, length, 2, 8, seed=s) for s in (2, 3))
    keep_BS = np.ones((2, length), bool)
    keep_BS[1, : length // 2] = False
    bias = paddle.to_tensor(np.where(keep_BS, 0.0, MASKED_SCORE).astype(np.float32))
    allowed = np.tril(np.ones((length, length), bool))[None, None] & keep_BS[:, None, None]
    found = causal_attention(q, k, v, bias)
    assert np.isfinite(found.numpy()).all()
    assert_same(found, dense(q, k, v, allowed), [q, k, v], rows=keep_BS)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("segments", [((1, 12),), ((3, 4),), ((2, 4), (1, 6), (3, 2))])
def test_segments_see_themselves_only(segments):
    lengths = [length for count, length in segments for _ in range(count)]
    rows = sum(lengths)
    q, k, v = (draw(rows, 2, 8, seed=s) for s in (1, 2, 3))
    label = np.repeat(np.arange(len(lengths)), lengths)
    allowed = (label[:, None] == label[None, :])[None, None]
    wanted = dense(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), allowed)
    found = Segments(segments).attend(q, k, v).unsqueeze(0)
    assert_same(found, wanted, [q, k, v])


PACKINGS = {
    "short ones": ([[3, 1, 5], [7, 2], []], 9),
    "a block and more": ([[128, 2], [1, 129]], 130),
    "long and short": ([[300, 10, 20, 5], [40, 100, 200]], 345),
}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2)])
def test_packed_samples_see_themselves_only(packing, heads, key_heads):
    lengths, length = PACKINGS[packing]
    batch = len(lengths)
    q = draw(batch, length, heads, 8, seed=1)
    k, v = (draw(batch, length, key_heads, 8, seed=s) for s in (2, 3))
    offsets = segment_offsets(lengths, length)
    label = np.repeat(np.arange(offsets.size - 1), np.diff(offsets)).reshape(batch, 1, length)
    allowed = np.tril(np.ones((length, length), bool)) & (label[..., None] == label[:, :, None])
    found = causal_attention(q, k, v, packed=PackedSamples(offsets, length))
    assert_same(found, dense(q, k, v, allowed), [q, k, v])


def test_scores_of_packed_samples_are_those_of_each_alone_but_for_blocks():
    """4 samples of 1000 tokens: a sixth of the row's scores, half a block above the minimum."""
    offsets = tuple(range(0, 4001, 1000))
    blocks = packed_blocks(offsets, 1)
    scores = [(b.end - b.begin) * (b.end_key - b.first_key) for b in blocks]
    assert sum(scores) <= 4 * (1000 * 1000 / 2 + 1000 * 64)
    assert all(tuple(block.bias().shape) == (b, k) for block, b, k in (
        (block, block.end - block.begin, block.end_key - block.first_key) for block in blocks
    ))  # fmt: skip
    assert len(packed_blocks(tuple(range(0, 1281, 10)), 1)) == 11


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_inputs_without_gradient_get_none_and_the_others_theirs(trained):
    inputs = [draw(1, 5, 2, 8, seed=s) for s in (1, 2, 3)]
    wanted = paddle.grad(causal_attention(*inputs).sum(), inputs)[trained]
    for i, x in enumerate(inputs):
        x.stop_gradient = i != trained
    causal_attention(*inputs).sum().backward()
    np.testing.assert_array_equal(inputs[trained].grad.numpy(), wanted.numpy())
    assert [x.grad is None for x in inputs] == [i != trained for i in range(3)]


def test_tokens_of_a_block_mask_see_their_block_and_earlier_ones():
    marks = np.array([[0, 0, 0, 1, 0, 1, 1], [1, 0, 1, 0, 0, 0, 1]])
    real = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]], bool)
    block = marks.cumsum(axis=1)
    wanted = (block[:, None] <= block[:, :, None]) & real[:, None] & real[:, :, None]
    mask = BlockMask(paddle.to_tensor(real), paddle.to_tensor(marks))
    for queries in (slice(0, 7), slice(2, 5), slice(6, 7)):
        part = mask.of_queries(queries)
        np.testing.assert_array_equal(part.visible_BLS.numpy(), wanted[:, queries])
    np.testing.assert_array_equal(mask.visible_BLS.numpy(), wanted)


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
        with implementation(kernels):
            results.append(gradients(run, inputs))
    for mine, plain in zip(*results, strict=True):
        mine, plain = mine.numpy(), plain.numpy()
        np.testing.assert_allclose(mine, plain, atol=tolerance * np.abs(plain).max())


@pytest.mark.parametrize("chunk", [1, 1 << 20, 8 << 20], ids=["heads", "some", "all"])
@pytest.mark.parametrize("queries", [50, 300], ids=["one block", "blocks"])
@pytest.mark.parametrize("has_library", [True, False], ids=["oneDNN", "Paddle"])
def test_heads_are_computed_in_chunks_with_their_own_masks(
    monkeypatch, chunk, queries, has_library
):
    if not has_library:
        monkeypatch.setattr(onednn, "is_available", lambda: False)
    monkeypatch.setattr(attention, "_CHUNK_BYTES", chunk)
    assert_equals_plain(causal_attention, qkv(queries))
    visible = np.random.default_rng(4).random([2, queries, 300]) < 0.3
    mask = AttentionMask(paddle.to_tensor(visible))
    q, k, v = qkv()
    q = q.detach()[:, :queries]
    q.stop_gradient = False
    assert_equals_plain(lambda *x: masked_attention(*x, mask, 0.3, "sdpa"), [q, k, v])


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
    with implementation("cpu"):
        out = causal_attention(*map(paddle.to_tensor, inputs))
    assert not np.isfinite(out[0, 3:].numpy()).all()
    assert np.isfinite(out[1].numpy()).all()


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_a_query_without_a_key_gets_the_average_or_zero(kind):
    visible = np.random.default_rng(4).random([2, 300, 300]) < 0.3
    visible[0, 5] = visible[1, 200:] = False
    mask = AttentionMask(paddle.to_tensor(visible))
    q, k, v = qkv()
    with implementation("cpu"):
        out = masked_attention(q, k, v, mask, 0.3, kind)
    wanted = v[1].mean(axis=0).repeat_interleave(2, axis=0) * (kind == "eager")
    np.testing.assert_allclose(out[1, 250].numpy(), wanted.numpy(), atol=1e-6)
    assert_equals_plain(lambda *x: masked_attention(*x, mask, 0.3, kind), [q, k, v])


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
    with implementation("cpu"):
        masked_attention(q, k, v, mask, 0.3)
    assert [size for size in sizes if size] == [128, 256, 384, 512]


def test_other_dtypes_are_computed_in_theirs():
    inputs = [x.detach().astype("float64") for x in qkv(length=150)]
    for x in inputs:
        x.stop_gradient = False
    with implementation("cpu"):
        found = gradients(lambda *x: causal_attention(*x).astype("float32"), inputs)
    assert [x.dtype for x in found[1:]] == [paddle.float64] * 3
    assert_equals_plain(lambda *x: causal_attention(*x).astype("float32"), inputs, 1e-6)


def test_backward_keeps_no_probabilities():
    """Live memory after the forward pass is that of a few rows, not of scores."""
    length = 1024
    inputs = [draw(1, length, 4, 8, seed=s) for s in (1, 2, 3)]
    core = paddle.base.core
    with implementation("cpu"):
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
    with implementation("plain"):
        wanted = cached_attention(query, *buffers, CachedKeys(keys, bias_BS)).numpy()
    with implementation("cpu"):
        found = cached_attention(query, *buffers, CachedKeys(keys, bias_BS)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    hidden = buffers[1].detach().clone()
    hidden[:, :, keys:] = 1e4
    if is_padded:
        hidden[1, :, :3] = -1e4
    with implementation("cpu"):
        again = cached_attention(query, buffers[0], hidden, CachedKeys(keys, bias_BS)).numpy()
    np.testing.assert_array_equal(again, found)
