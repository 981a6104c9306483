"""Softmax attention: causal, within segments, under any mask, and over a cache.

All of it is `softmax(scale * q @ k^T + mask) @ v`, with grouped key heads: query head n reads key
head n // G. Shapes: B batch, L query length, S key length, N query heads, K key heads, G = N / K
query heads per key head, H head width, P packed rows; C capacity of a cache's buffers, which have
heads first, so that one position is written in place.

The plain implementations are Paddle's `scaled_dot_product_attention`, or a composition in float32.
Kernels: C or query blocks on the CPU (`paddle_vl.nn.cpu`); flash attention on a GPU, over a mask's
row intervals where it has them (`paddle_vl.nn.gpu.attention`). Over 350 lines, to have every
form of the formula side by side.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.batch.positions import key_ends
from paddle_vl.nn.operations import operation

# Below any score, yet finite: a query that sees only padding gets an average instead of NaN.
MASKED_SCORE = -1e30


class PackedSamples:
    """Offsets of the samples in packed rows; one object for all layers of a step.

    Not a tuple, which Paddle would search for tensors.

    Args:
        cu_seqlens: see `paddle_vl.batch.positions`; on the host.
        length: padded length of a row.
        key_ends_BL: `batch.positions.key_ends` of them on the device, if it was copied with the
            batch; None copies it when a kernel needs it.
    """

    def __init__(self, cu_seqlens: np.ndarray, length: int, key_ends_BL: Tensor | None = None):
        self.offsets = tuple(cu_seqlens.tolist())
        self._cu_seqlens, self._length, self._key_ends_BL = cu_seqlens, length, key_ends_BL

    @cached_property
    def key_ends_B1L1(self) -> Tensor:
        """int32: for each key, the first later query of its row that does not see it."""
        ends_BL = self._key_ends_BL
        if ends_BL is None:
            ends_BL = paddle.to_tensor(key_ends(self._cu_seqlens, self._length))
        return ends_BL.unsqueeze([1, 3])

    @cached_property
    def mask_B1LL(self) -> Tensor:
        """float32 additive mask, 0 or `MASKED_SCORE`."""
        place_L = paddle.arange(self._length, dtype="int32")
        visible = paddle.logical_and(
            place_L.unsqueeze(1) < self.key_ends_B1L1.transpose([0, 1, 3, 2]),
            place_L.unsqueeze(1) >= place_L,
        )
        return paddle.logical_not(visible).astype("float32") * MASKED_SCORE


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
        average of masked ones, or zero.
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


class Segments:
    """Consecutive segments of packed rows, known on the host; one object for all layers of a step.

    Not a tuple, which Paddle would search for tensors.

    Args:
        runs: (count, length) of runs of consecutive segments of equal length.

    Attributes:
        count: number of segments.
        longest: length of the longest.
    """

    def __init__(self, runs: Sequence[tuple[int, int]]):
        self.runs = tuple(runs)
        self.count = sum(count for count, _ in self.runs)
        self.longest = max((length for _, length in self.runs), default=0)

    @cached_property
    def offsets(self) -> Tensor:
        """`[count + 1]` int32 first row of each segment, and the end; made on the device."""
        lengths = [paddle.full([count], length, "int32") for count, length in self.runs]
        return paddle.cumsum(paddle.concat([paddle.zeros([1], "int32"), *lengths]), dtype="int32")

    def attend(self, q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor) -> Tensor:
        """See `segment_attention`."""
        return runs_attention(q_PNH, k_PNH, v_PNH, self)


class SegmentAttention(Protocol):
    """Attention within segments, however these are known."""

    def attend(self, q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor) -> Tensor:
        """Every row sees all rows of its own segment and no others; scores are scaled by H^-0.5.

        Returns:
            `[P, N, H]` in the dtype of the queries.
        """
        ...


def segment_attention(
    q_PNH: Tensor,
    k_PNH: Tensor,
    v_PNH: Tensor,
    segments: SegmentAttention | Sequence[tuple[int, int]],
) -> Tensor:
    """See `SegmentAttention.attend`.

    Args:
        segments: their lengths sum to P; a sequence is that of `Segments.runs`.
    """
    if isinstance(segments, Sequence):
        segments = Segments(segments)
    return segments.attend(q_PNH, k_PNH, v_PNH)


@operation
def runs_attention(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: Segments) -> Tensor:
    """`segment_attention`; each run of segments of equal length is one batched product."""
    runs = segments.runs
    if len(runs) == 1:
        return equal_segments_attention(q_PNH, k_PNH, v_PNH, *runs[0])
    sizes = [count * length for count, length in runs]
    q_runs, k_runs, v_runs = (paddle.split(x, sizes, axis=0) for x in (q_PNH, k_PNH, v_PNH))
    return paddle.concat(
        [
            equal_segments_attention(q_runs[i], k_runs[i], v_runs[i], *run)
            for i, run in enumerate(runs)
        ],
        axis=0,
    )


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

    Subclasses know a structure that kernels use in place of the dense mask, which is made only if
    it is needed. Not a tuple, which Paddle would search for tensors.

    Args:
        visible_BLS: bool, or a function that makes it.
        on_host: makes the same in NumPy; None to copy it from the device.

    Attributes:
        some_see_nothing: False if every query is known to see a key.
    """

    some_see_nothing = True

    def __init__(
        self,
        visible_BLS: Tensor | Callable[[], Tensor],
        on_host: Callable[[], np.ndarray] | None = None,
    ):
        self._visible, self._on_host = visible_BLS, on_host
        self._narrow_biases: dict[str, Tensor] = {}

    @cached_property
    def visible_BLS(self) -> Tensor:
        """bool."""
        return self._visible() if callable(self._visible) else self._visible

    def visible_on_host(self) -> np.ndarray:
        """bool `[B, L, S]`."""
        return self.visible_BLS.numpy() if self._on_host is None else self._on_host()

    @cached_property
    def has_key_BL11(self) -> Tensor:
        """float32, 1 where a query sees any key."""
        return self.visible_BLS.any(axis=-1).astype("float32").unsqueeze([2, 3])

    @cached_property
    def bias_B1LS(self) -> Tensor:
        """float32 to be added to scores, 0 or `MASKED_SCORE`: a query that sees no key weighs all
        keys equally. (Flash attention multiplies a mask by the root of H; the lowest float32, which
        the originals use, would become infinite.)"""
        return self._bias_of(self.visible_BLS)

    def bias_in(self, dtype: Any) -> Tensor:
        """`bias_B1LS` in another dtype."""
        return self._narrow("all", lambda: self.bias_B1LS, dtype)

    def row_bias_in(self, dtype: Any) -> Tensor:
        """`bias_in`, or `[B, 1, 1, S]` if all queries see the same keys."""
        return self.bias_in(dtype)

    def _narrow(self, kind: str, make: Callable[[], Tensor], dtype: Any) -> Tensor:
        key = f"{kind} {dtype}"
        if key not in self._narrow_biases:
            self._narrow_biases[key] = make().astype(dtype)
        return self._narrow_biases[key]

    def row_intervals(self) -> Tensor | None:
        """The mask as FlashMask takes it: int32 `[B, 1, S, 2]` first and end row, `(first, end)` of
        each key, of which rows `[end, first)` see the key. None for a mask of another kind.

        Rows that see no key may see some here: their output is to be replaced.
        """
        return None

    @staticmethod
    def _bias_of(visible_BLS: Tensor) -> Tensor:
        return (paddle.logical_not(visible_BLS).astype("float32") * MASKED_SCORE).unsqueeze(1)


class BlockMask(AttentionMask):
    """Tokens see their own block and earlier ones; padding neither sees nor is seen.

    Mark 1 begins a block, 0 continues it. Marks 0 0 0 | 1 0 | 1 | 1 are a block of three, a block
    of two and two causal tokens:

        1 1 1 0 0 0 0
        1 1 1 0 0 0 0
        1 1 1 0 0 0 0
        1 1 1 1 1 0 0
        1 1 1 1 1 0 0
        1 1 1 1 1 1 0
        1 1 1 1 1 1 1

    Args:
        pad_BL: bool, True for real tokens.
        marks_BL: bool or int.
    """

    def __init__(self, pad_BL: Tensor, marks_BL: Tensor):
        super().__init__(self._dense, self._dense_on_host)
        self._pad_BL, self._marks_BL = pad_BL, marks_BL

    @cached_property
    def has_key_BL11(self) -> Tensor:
        # A real token sees itself.
        return self._pad_BL.astype("float32").unsqueeze([-1, -1])

    def row_intervals(self) -> Tensor:
        return self._intervals_B1L2

    def of_queries(self, queries: slice) -> AttentionMask:
        """The mask of some of the queries over all keys."""
        mask = AttentionMask(lambda: self._dense(queries), lambda: self._dense_on_host(queries))
        mask.has_key_BL11 = self.has_key_BL11[:, queries]
        return mask

    @cached_property
    def _intervals_B1L2(self) -> Tensor:
        """All rows from the first of its block see a key. That of padding is seen by none: its
        interval ends where it begins, at its own row, so that both of FlashMask's triangles are
        masked whole."""
        place_L = paddle.arange(self._pad_BL.shape[1], dtype="int32")
        begins_BL = self._marks_BL.astype("int32") * place_L
        first_BL = paddle.cummax(begins_BL, axis=1)[0]
        end_BL = paddle.full_like(begins_BL, self._pad_BL.shape[1])
        both = (paddle.where(self._pad_BL, x, place_L.expand(x.shape)) for x in (end_BL, first_BL))
        return paddle.stack(list(both), axis=-1).unsqueeze(1)

    def _dense(self, queries: slice = slice(None)) -> Tensor:
        key_BS, query_BL = self._blocks(queries)
        return key_BS.unsqueeze(1) <= query_BL.unsqueeze(2)

    def _dense_on_host(self, queries: slice = slice(None)) -> np.ndarray:
        key_BS, query_BL = (x.numpy() for x in self._blocks(queries))
        return key_BS[:, None] <= query_BL[:, :, None]

    def _blocks(self, queries: slice) -> tuple[Tensor, Tensor]:
        """The block of every key and query: a query sees the keys whose block is not above its own.
        That of padding is above all others as a key, and below them as a query."""
        block_BL = paddle.cumsum(self._marks_BL.astype("int32"), axis=1)
        above_BL = paddle.full_like(block_BL, 2**31 - 1)
        key_BL = paddle.where(self._pad_BL, block_BL, above_BL)
        query_BL = paddle.where(self._pad_BL, block_BL, paddle.full_like(block_BL, -1))
        return key_BL, query_BL if queries == slice(None) else query_BL[:, queries]


class KeyMask(AttentionMask):
    """All queries see the same keys, and every query sees one.

    Args:
        seen_BS: bool, the keys that are seen.
        num_queries: L.
    """

    some_see_nothing = False

    def __init__(self, seen_BS: Tensor, num_queries: int):
        super().__init__(lambda: seen_BS.unsqueeze(1).expand([-1, num_queries, -1]))
        self._seen_BS = seen_BS

    def row_bias_in(self, dtype: Any) -> Tensor:
        return self._narrow("row", lambda: self._bias_of(self._seen_BS.unsqueeze(1)), dtype)


class HistoryMask(AttentionMask):
    """Each frame of a video sees the real frames up to its own. B = videos * copies: consecutive
    entries of a batch, such as the patches of a video, have one mask. L = S frames.

    Args:
        real_VF: bool of V videos.
        copies: entries of each video.
    """

    def __init__(self, real_VF: Tensor, copies: int):
        super().__init__(self._dense)
        self._real_VF, self.copies = real_VF, copies

    @cached_property
    def row_ends_V1R1(self) -> Tensor:
        """int32: the entries of a video as one row of R = copies * F frames, in which each entry is
        a causal document; for each key the first later row that does not see it, its own if it is
        not real."""
        frames = self._real_VF.shape[1]
        place_R = paddle.arange(self.copies * frames, dtype="int32")
        end_R = (place_R // frames + 1) * frames
        real_VR = paddle.tile(self._real_VF, [1, self.copies])
        end_VR, place_VR = end_R.expand(real_VR.shape), place_R.expand(real_VR.shape)
        ends_VR = paddle.where(real_VR, end_VR, place_VR)
        return ends_VR.unsqueeze([1, 3])

    def _dense(self) -> Tensor:
        order_VF = paddle.cumsum(paddle.ones_like(self._real_VF, dtype="int64"), axis=1)
        causal_VFF = order_VF.unsqueeze(2) >= order_VF.unsqueeze(1)
        visible_V1FF = paddle.logical_and(self._real_VF.unsqueeze(1), causal_VFF).unsqueeze(1)
        return visible_V1FF.expand([-1, self.copies, -1, -1]).flatten(0, 1)


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
        implementation: as in HF transformers. `eager` rounds as a composition with scores and
            softmax in float32, or computes them in a flash kernel; a query without a key gets the
            average of all values. `sdpa` gives it zero, and the kernel chooses the dtype of the
            scores. In both, such a query passes no gradient to queries and keys.

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
    bias = mask.bias_in(q_BLNH.dtype)
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
    lowest = paddle.full([], MASKED_SCORE, dtype="float32")
    scores = paddle.where(mask.visible_BLS.unsqueeze(1), scores, lowest)
    probability = F.softmax(scores).astype(v_BSNH.dtype)
    return paddle.matmul(probability, v_BSNH.transpose([0, 2, 1, 3])).transpose([0, 2, 1, 3])


class CachedKeys:
    """How many positions of the buffers hold keys, and which of them are hidden; one object for
    all layers of a forward pass.

    Not a tuple, which Paddle would search for tensors.

    Args:
        length: S, the new tokens' keys among them.
        key_bias_BS: float32 added to every score of a key, 0 or `MASKED_SCORE`; None hides nothing.
    """

    def __init__(self, length: int, key_bias_BS: Tensor | None = None):
        self.length, self.key_bias_BS = length, key_bias_BS
        self._biases: dict[tuple[int, ...], Tensor] = {}

    def bias(self, batch: int, key_heads: int, groups: int, capacity: int) -> Tensor:
        """Bias `[B, K, G, C]` of a single query over whole buffers; it hides free positions too.

        Of full shape: Paddle's CPU kernels are slow at broadcasting over middle dims.
        """
        shape = (batch, key_heads, groups, capacity)
        if shape not in self._biases:
            hidden_BC = np.zeros((batch, capacity), dtype=np.float32)
            hidden_BC[:, self.length :] = MASKED_SCORE
            bias_BC = paddle.to_tensor(hidden_BC)
            if self.key_bias_BS is not None:
                bias_BC[:, : self.length] = self.key_bias_BS
            self._biases[shape] = bias_BC.reshape([batch, 1, 1, capacity]).tile(
                [1, key_heads, groups, 1]
            )
        return self._biases[shape]


@operation
def cached_attention(
    q_BLNH: Tensor, key_BKCH: Tensor, value_BKCH: Tensor, cached: CachedKeys
) -> Tensor:
    """`causal_attention` over the first S positions of buffers; the last query is the last key's.

    Returns:
        `[B, L, N, H]` in the dtype of the queries.
    """
    key_BSKH, value_BSKH = (
        buffer[:, :, : cached.length].transpose([0, 2, 1, 3]) for buffer in (key_BKCH, value_BKCH)
    )
    return causal_attention(q_BLNH, key_BSKH, value_BSKH, cached.key_bias_BS)


def biased_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """`softmax(q @ k^T + bias) @ v` of the last two dims, the softmax in float32."""
    scores = paddle.matmul(q, k, transpose_y=True).astype("float32") + bias
    return paddle.matmul(F.softmax(scores).astype(v.dtype), v)
