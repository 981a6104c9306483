"""Softmax attention: causal, within segments, and under any mask.

All of it is `softmax(scale * q @ k^T + mask) @ v`, with grouped key heads: query head n reads key
head n // G. Shapes: B batch, L query length, S key length, N query heads, K key heads, G = N / K
query heads per key head, H head width, P packed rows.

The plain implementations are Paddle's `scaled_dot_product_attention`, or a composition in float32.
Kernels: query blocks on the CPU (`paddle_vl.nn.cpu.attention`), FlashMask for packed samples on a
GPU (`paddle_vl.nn.gpu.attention`). Over 350 lines, to have every form of the formula side by
side.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.batch.positions import key_ends
from paddle_vl.nn.operations import operation

# Below any score, yet finite: a query that sees only padding gets an average instead of NaN.
MASKED_SCORE = -1e30
# The lowest float32 absorbs any score added to it, so a query that sees no key weighs all keys
# equally. Source: Gemma's attention in openpi.
_LOWEST_SCORE = -2.3819763e38


class PackedSamples:
    """Offsets of the samples in packed rows; one object for all layers of a step.

    Not a tuple, which Paddle would search for tensors.

    Args:
        cu_seqlens: see `paddle_vl.batch.positions`; on the host.
        length: padded length of a row.
    """

    def __init__(self, cu_seqlens: np.ndarray, length: int):
        self.offsets = tuple(cu_seqlens.tolist())
        self._key_ends_BL = key_ends(cu_seqlens, length)

    @cached_property
    def key_ends_B1L1(self) -> Tensor:
        """int32: for each key, the first later query of its row that does not see it."""
        return paddle.to_tensor(self._key_ends_BL[:, None, :, None])

    @cached_property
    def mask_B1LL(self) -> Tensor:
        """float32 additive mask, 0 or `MASKED_SCORE`."""
        place = np.arange(self._key_ends_BL.shape[1])
        visible = place[:, None] < self._key_ends_BL[:, None, None, :]
        visible &= place[:, None] >= place
        return paddle.to_tensor(np.where(visible, 0.0, MASKED_SCORE).astype(np.float32))


@operation
def causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """Each query sees the keys up to its own position; the last query is aligned to the last key.

    Scores are scaled by H^-0.5; the softmax is computed in float32.

    Args:
        key_bias_BS: float32 added to every score of a key, 0 or `MASKED_SCORE`; None masks nothing.
        packed: offsets of packed samples, each of which sees only itself. Then S = L and
            `key_bias_BS` is None: padding is a segment of its own.

    Returns:
        `[B, L, N, H]` in the dtype of the queries. A query that sees no unmasked key gets a finite
        average of masked ones.
    """
    batch, length = q_BLNH.shape[:2]
    keys = k_BSKH.shape[1]
    if packed is not None:
        mask = packed.mask_B1LL
    elif key_bias_BS is None and length == keys:
        return F.scaled_dot_product_attention(q_BLNH, k_BSKH, v_BSKH, is_causal=True)
    else:
        mask = _causal_mask(batch, length, keys, key_bias_BS)
    # The kernels take a mask in the dtype of the queries only.
    mask = None if mask is None else mask.astype(q_BLNH.dtype)
    return F.scaled_dot_product_attention(q_BLNH, k_BSKH, v_BSKH, attn_mask=mask, is_causal=False)


def _causal_mask(batch: int, length: int, keys: int, key_bias_BS: Tensor | None) -> Tensor | None:
    """`[B, 1, L, S]` additive float32 mask; flash attention does not broadcast it over the batch.

    None if every query sees every key: a single query, the last.
    """
    if length == 1:
        return None if key_bias_BS is None else key_bias_BS.unsqueeze([1, 2])
    allowed = paddle.tril(paddle.ones([length, keys]), keys - length)
    mask = ((1.0 - allowed) * MASKED_SCORE).unsqueeze([0, 1])
    if key_bias_BS is None:
        return mask.expand([batch, 1, length, keys])
    return mask + key_bias_BS.unsqueeze([1, 2])


class PaddedSegments(NamedTuple):
    """Segments as tensors, for programs that do not know their number or lengths.

    Shapes: S segments, each padded to the longest length L.

    Attributes:
        rows: `[S, L]` int64 packed row at each place; any row at padding.
        bias: `[S, L]` float32, 0 at rows and `MASKED_SCORE` at padding.
        place: `[P]` int64 place of each packed row among the S * L.
    """

    rows: Tensor
    bias: Tensor
    place: Tensor


def segment_attention(
    q_PNH: Tensor,
    k_PNH: Tensor,
    v_PNH: Tensor,
    segments: Sequence[tuple[int, int]] | PaddedSegments,
) -> Tensor:
    """Every row sees all rows of its own segment and no others; scores are scaled by H^-0.5.

    Args:
        segments: (count, length) of runs of consecutive segments of equal length, on the host; the
            sum of count * length is P. Each run is one batched product. Or tensors, in a traced
            program.

    Returns:
        `[P, N, H]` in the dtype of the queries.
    """
    if isinstance(segments, PaddedSegments):
        return padded_segment_attention(q_PNH, k_PNH, v_PNH, segments)
    if len(segments) == 1:
        return equal_segments_attention(q_PNH, k_PNH, v_PNH, *segments[0])
    sizes = [count * length for count, length in segments]
    q_runs, k_runs, v_runs = (paddle.split(x, sizes, axis=0) for x in (q_PNH, k_PNH, v_PNH))
    return paddle.concat(
        [
            equal_segments_attention(q_runs[i], k_runs[i], v_runs[i], *segment)
            for i, segment in enumerate(segments)
        ],
        axis=0,
    )


def padded_segment_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: PaddedSegments
) -> Tensor:
    """`segment_attention` with segments as tensors."""
    _, heads, width = q_PNH.shape

    def padded(x_PNH: Tensor) -> Tensor:
        x_SLNH = paddle.gather_nd(x_PNH, segments.rows.unsqueeze(-1))
        return x_SLNH.transpose([0, 2, 1, 3])

    q_SNLH, k_SNLH, v_SNLH = padded(q_PNH * width**-0.5), padded(k_PNH), padded(v_PNH)
    # The bias is one more channel: adding it to the scores would broadcast over queries, slowly.
    bias_SNL1 = paddle.zeros_like(k_SNLH[..., :1]) + segments.bias.unsqueeze(1).unsqueeze(-1)
    k_SNLH = paddle.concat([k_SNLH, bias_SNL1.astype(k_SNLH.dtype)], axis=-1)
    q_SNLH = paddle.concat([q_SNLH, paddle.ones_like(q_SNLH[..., :1])], axis=-1)
    scores = paddle.matmul(q_SNLH, k_SNLH, transpose_y=True)
    out_SNLH = paddle.matmul(F.softmax(scores.astype("float32")).astype(v_SNLH.dtype), v_SNLH)
    out_QC = out_SNLH.transpose([0, 2, 1, 3]).reshape([-1, heads * width])
    return paddle.index_select(out_QC, segments.place).reshape([-1, heads, width])


@operation
def equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    """`segment_attention` of `count` segments of one `length`."""
    heads = q_PNH.shape[1:]
    q, k, v = (x.reshape([count, length, *heads]) for x in (q_PNH, k_PNH, v_PNH))
    return F.scaled_dot_product_attention(q, k, v).reshape([-1, *heads])


class AttentionMask:
    """Which keys each query sees; one object for all layers of a forward pass.

    Not a tuple, which Paddle would search for tensors.

    Args:
        visible_BLS: bool.
    """

    def __init__(self, visible_BLS: Tensor):
        self.visible_BLS = visible_BLS
        self._biases: dict[int, Tensor] = {}

    @cached_property
    def has_key_BL11(self) -> Tensor:
        """float32, 1 where a query sees any key."""
        return self.visible_BLS.any(axis=-1).astype("float32").unsqueeze([-1, -1])

    @cached_property
    def all_see(self) -> bool:
        """Whether every query sees a key. Reads the device, so for the CPU only."""
        return bool(self.visible_BLS.any(axis=-1).all())

    @cached_property
    def bias_B1LS(self) -> Tensor:
        """float32 to be added to scores, 0 or the lowest number."""
        hidden = paddle.logical_not(self.visible_BLS).astype("float32")
        return (hidden * _LOWEST_SCORE).unsqueeze(1)

    def prepare(self) -> None:
        """Make the masks of the `sdpa` attention now, outside of a loop of a program."""
        self._prepared = self.bias_B1LS, self.has_key_BL11

    def bias(self, heads: int) -> Tensor:
        """`[B, heads, L, S]`: Paddle's CPU kernels are slow at broadcasting over a middle dim."""
        if heads not in self._biases:
            self._biases[heads] = paddle.concat([self.bias_B1LS] * heads, axis=1)
        return self._biases[heads]


def masked_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str = "eager",
) -> Tensor:
    """Each query sees the keys that the mask allows.

    Args:
        scale: factor of the scores.
        implementation: as in HF transformers. `eager` computes scores and softmax in float32; a
            query without a key gets the average of all values. `sdpa` gives it zero, and the
            kernel chooses the dtype of the scores. In both, such a query passes no gradient to
            queries and keys.

    Returns:
        `[B, L, N, H]` in the dtype of the values.

    Raises:
        ValueError: another implementation.
    """
    if implementation not in ("eager", "sdpa"):
        raise ValueError(f"attention implementation is {implementation!r}; 'eager' or 'sdpa'")
    return eager_or_sdpa_attention(q_BLNH, k_BSKH, v_BSKH, mask, scale, implementation)


@operation
def eager_or_sdpa_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str,
) -> Tensor:
    """See `masked_attention`."""
    if implementation == "eager":
        return _float32_attention(q_BLNH, k_BSKH, v_BSKH, mask, scale)
    # The kernel scales by H^-0.5, and takes a mask in the dtype of the queries only.
    factor = scale * q_BLNH.shape[-1] ** 0.5
    q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
    bias = mask.bias_B1LS.astype(q_BLNH.dtype)
    out_BLNH = F.scaled_dot_product_attention(q_BLNH, k_BSKH, v_BSKH, attn_mask=bias)
    return out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)


def _float32_attention(
    q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: AttentionMask, scale: float
) -> Tensor:
    groups = q_BLNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (
        x if groups == 1 else x.repeat_interleave(groups, axis=2) for x in (k_BSKH, v_BSKH)
    )
    q_BNLH, k_BNSH = (x.transpose([0, 2, 1, 3]).astype("float32") for x in (q_BLNH, k_BSNH))
    scores = paddle.matmul(q_BNLH, k_BNSH, transpose_y=True) * scale
    lowest = paddle.full([], _LOWEST_SCORE, dtype="float32")
    scores = paddle.where(mask.visible_BLS.unsqueeze(1), scores, lowest)
    probability = F.softmax(scores).astype(v_BSNH.dtype)
    return paddle.matmul(probability, v_BSNH.transpose([0, 2, 1, 3])).transpose([0, 2, 1, 3])
