"""Examples of every form of attention."""

from collections.abc import Callable

import numpy as np
import paddle

from paddle_vl.doctor.example import Inputs, Sizes, example, normal
from paddle_vl.nn.attention import (
    MASKED_SCORE,
    AttentionMask,
    BlockMask,
    HistoryMask,
    KeyMask,
    PackedSamples,
    Segments,
)
from paddle_vl.nn.cached_attention import CachedKeys


def _heads(rng: np.random.Generator, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q_BLNH, k_BLKH, v_BLKH of a batch of two."""
    q = normal(rng, 2, sizes.length, sizes.heads, sizes.head_width)
    k, v = (normal(rng, 2, sizes.length, sizes.key_heads, sizes.head_width) for _ in range(2))
    return q, k, v


def _scores_work(sizes: Sizes, share: float = 1.0) -> int:
    return int(2 * 4 * sizes.length**2 * sizes.heads * sizes.head_width * share)


@example("causal_attention", has_products=True)
def _causal_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs(_heads(rng, sizes), work=_scores_work(sizes, 0.5))


@example("causal_attention.packed", has_products=True)
def _packed_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    length = sizes.length
    offsets = np.array([0, length // 3, length, length + length // 2, 2 * length])
    # Made anew for each dtype: its masks are tensors on the device.
    packed: Callable[[], PackedSamples] = lambda: PackedSamples(offsets, length)  # noqa: E731
    shares = np.diff(offsets) / length
    work = _scores_work(sizes, 0.25 * float((shares**2).sum()))
    return Inputs((*_heads(rng, sizes), None, packed), work=work)


@example("causal_attention.padded", has_products=True)
def _padded_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    bias = np.zeros([2, sizes.length], np.float32)
    bias[1, : sizes.length // 4] = MASKED_SCORE
    # Queries that see no key have no defined result, so the second row starts with its first key.
    bias[1, 0] = 0.0
    return Inputs((*_heads(rng, sizes), bias), tables=(3,), work=_scores_work(sizes, 0.5))


@example("causal_attention.cached", has_products=True)
def _cached_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    q, k, v = _heads(rng, sizes)
    return Inputs((q[:, -4:].copy(), k, v), work=_scores_work(sizes, 4 / sizes.length))


@example("cached_attention", has_products=True)
def _cached_keys(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return _with_buffers(rng, sizes, 1)


@example("cached_attention.prompt", has_products=True)
def _cached_prompt(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return _with_buffers(rng, sizes, sizes.length // 2)


def _with_buffers(rng: np.random.Generator, sizes: Sizes, queries: int) -> Inputs:
    """Buffers with a quarter of their positions free."""
    shape = (2, sizes.key_heads, sizes.length, sizes.head_width)
    q = normal(rng, 2, queries, sizes.heads, sizes.head_width)
    used = 3 * sizes.length // 4
    # Made anew for each device, which its bias lies on.
    cached: Callable[[], CachedKeys] = lambda: CachedKeys(used)  # noqa: E731
    work = 4 * 2 * queries * used * sizes.heads * sizes.head_width
    return Inputs((q, normal(rng, *shape), normal(rng, *shape), cached), work=work)


@example("equal_segments_attention", has_products=True)
def _segments(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    count, rows = 4, sizes.length // 4
    q, k, v = (normal(rng, count * rows, sizes.heads, sizes.head_width) for _ in range(3))
    work = 4 * count * rows**2 * sizes.heads * sizes.head_width
    return Inputs((q, k, v, count, rows), work=work)


@example("runs_attention", has_products=True)
def _runs(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    length = sizes.length // 4
    runs = [(2, length), (1, 2 * length), (3, length // 2)]
    rows = sum(count * own for count, own in runs)
    q, k, v = (normal(rng, rows, sizes.heads, sizes.head_width) for _ in range(3))
    # Made anew for each device, which its offsets lie on.
    segments: Callable[[], Segments] = lambda: Segments(runs)  # noqa: E731
    work = 4 * sum(count * own**2 for count, own in runs) * sizes.heads * sizes.head_width
    return Inputs((q, k, v, segments), work=work)


@example("eager_or_sdpa_attention.blocks", has_products=True)
def _blocks(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    real = np.ones([2, sizes.length], bool)
    marks = np.zeros([2, sizes.length], bool)
    # A block of images and text, a second block, causal tokens at the end.
    marks[:, [sizes.length // 2, *range(3 * sizes.length // 4, sizes.length)]] = True
    mask: Callable[[], BlockMask] = lambda: BlockMask(  # noqa: E731
        paddle.to_tensor(real), paddle.to_tensor(marks)
    )
    args = (*_heads(rng, sizes), mask, sizes.head_width**-0.5, "sdpa")
    return Inputs(args, work=_scores_work(sizes))


@example("eager_or_sdpa_attention.keys", has_products=True)
def _keys(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    q, k, v = _heads(rng, sizes)
    queries = sizes.length // 4
    seen = np.ones([2, sizes.length], bool)
    seen[1, sizes.length // 2 :] = False
    mask: Callable[[], KeyMask] = lambda: KeyMask(paddle.to_tensor(seen), queries)  # noqa: E731
    args = (q[:, :queries].copy(), k, v, mask, sizes.head_width**-0.5, "sdpa")
    return Inputs(args, work=_scores_work(sizes, 0.25))


@example("eager_or_sdpa_attention.history", has_products=True)
def _history(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    frames, patches = 6, sizes.length // 4
    real = np.ones([2, frames], bool)
    shape = (2 * patches, frames, sizes.heads, sizes.head_width)
    mask: Callable[[], HistoryMask] = lambda: HistoryMask(  # noqa: E731
        paddle.to_tensor(real), patches
    )
    q, k, v = (normal(rng, *shape) for _ in range(3))
    args = (q, k, v, mask, sizes.head_width**-0.5, "sdpa")
    return Inputs(args, work=2 * shape[0] * frames**2 * sizes.heads * sizes.head_width)


def _masked(rng: np.random.Generator, sizes: Sizes, implementation: str) -> Inputs:
    visible = rng.random([2, sizes.length, sizes.length]) < 0.7
    visible[:, :, 0] = True
    mask: Callable[[], AttentionMask] = lambda: AttentionMask(paddle.to_tensor(visible))  # noqa: E731
    args = (*_heads(rng, sizes), mask, sizes.head_width**-0.5, implementation)
    return Inputs(args, work=_scores_work(sizes))


@example("eager_or_sdpa_attention", has_products=True)
def _eager(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return _masked(rng, sizes, "eager")


@example("eager_or_sdpa_attention.sdpa", has_products=True)
def _sdpa(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return _masked(rng, sizes, "sdpa")
