"""Softmax attention: causal, within segments, under any mask, and over a cache; the rotary position
embedding of its queries and keys; and a decoder's layer of it.

All of it is `softmax(scale * q @ k^T + mask) @ v`, with grouped key heads: query head n reads key
head n // G. Shapes: B batch, L query length, S key length, N query heads, K key heads, G = N / K
query heads per key head, H head width, P packed rows; C capacity of a cache's buffers, which have
heads first, so that one position is written in place; R rows that share a memory of M places; T
token rows, or any leading dims; D width.

The plain implementations are Paddle's `scaled_dot_product_attention`, or a composition in float32.
Kernels: C or query blocks on the CPU (`paddle_vl.nn.cpu`); flash attention on a GPU, over a mask's
row intervals where it has them (`paddle_vl.nn.gpu`).

Rotary angles are float32: in bfloat16, position 300 is off by up to one radian. Channel i is
rotated with channel i + H/2 ("rotate half" of HF transformers).

Source of rotary embedding: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.batch.positions import key_ends
from paddle_vl.nn.attention_masks import MASKED_SCORE, AttentionMask, SliceMask
from paddle_vl.nn.dispatch import operation
from paddle_vl.nn.operations import gemma_rms_norm, rms_norm
from paddle_vl.nn.transfer import device_tensor, host_table

Made = TypeVar("Made")


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
        self._made: dict[Any, Any] = {}

    def once(self, make: Callable[[tuple[int, ...]], Made]) -> Made:
        """What a function makes of the offsets; for all layers of the step it is called once."""
        if make not in self._made:
            self._made[make] = make(self.offsets)
        return self._made[make]

    @cached_property
    def key_ends_B1L1(self) -> Tensor:
        """int32: for each key, the first later query of its row that does not see it."""
        ends_BL = self._key_ends_BL
        if ends_BL is None:
            ends_BL = device_tensor(key_ends(self._cu_seqlens, self._length))
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
        """Every row sees all rows of its own segment and no others; scores are scaled by H^-0.5.

        Args:
            q_PNH, k_PNH, v_PNH: the lengths of the segments sum to P.

        Returns:
            `[P, N, H]` in the dtype of the queries.
        """
        return runs_attention(q_PNH, k_PNH, v_PNH, self)


@operation
def runs_attention(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: Segments) -> Tensor:
    """`Segments.attend`; each run of segments of equal length is one batched product."""
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
    """`Segments.attend` of `count` segments of one `length`."""
    heads = q_PNH.shape[1:]
    q, k, v = (x.reshape([count, length, *heads]) for x in (q_PNH, k_PNH, v_PNH))
    return F.scaled_dot_product_attention(q, k, v).reshape([-1, *heads])


@operation
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
    """
    if implementation == "eager":
        return _float32_attention(q_BLNH, k_BSKH, v_BSKH, mask, scale)
    # The kernel scales by H^-0.5, and takes a mask in the dtype of the queries only.
    factor = scale * q_BLNH.shape[-1] ** 0.5
    q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
    bias = mask.bias_in(q_BLNH.dtype)
    out_BLNH = F.scaled_dot_product_attention(q_BLNH, k_BSKH, v_BSKH, attn_mask=bias)
    return out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)


def with_averages(out_BLNH: Tensor, v_BSKH: Tensor, mask: AttentionMask) -> Tensor:
    """An output that is zero for a query without a key, with the average of all values there."""
    groups = out_BLNH.shape[2] // v_BSKH.shape[2]
    mean_B1KH = v_BSKH.astype("float32").mean(axis=1, keepdim=True).astype(v_BSKH.dtype)
    mean_B1NH = mean_B1KH if groups == 1 else mean_B1KH.repeat_interleave(groups, axis=2)
    return out_BLNH + mean_B1NH * (1.0 - mask.has_key_BL11).astype(out_BLNH.dtype)


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
        self._made: dict[Any, Any] = {}

    def once(self, make: Callable[..., Made], *args: Any) -> Made:
        """What a function makes of this and other arguments; for all layers it is called once."""
        if (key := (make, *args)) not in self._made:
            self._made[key] = make(self, *args)
        return self._made[key]

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

    def mask_of_heads(self, heads: int, dtype: Any) -> Tensor | None:
        """`[1, B * N, 1, S]` added to the scores of a single query of each prompt, by the heads of
        all prompts; None if every key is seen."""
        if self.key_bias_BS is None:
            return None
        shape = (1, self.key_bias_BS.shape[0] * heads, 1, self.length)
        if shape not in self._biases:
            mask_BNS = self.key_bias_BS.astype(dtype).unsqueeze(1).tile([1, heads, 1])
            self._biases[shape] = mask_BNS.reshape(shape)
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


@operation
def appended_attention(
    q_B1NH: Tensor,
    key_B1KH: Tensor,
    value_B1KH: Tensor,
    key_BKCH: Tensor,
    value_BKCH: Tensor,
    cached: CachedKeys,
) -> Tensor:
    """`cached_attention` of a new token, whose keys and values are written into the buffers first,
    at the last of the S positions."""
    last = cached.length - 1
    for buffer, new in ((key_BKCH, key_B1KH), (value_BKCH, value_B1KH)):
        buffer[:, :, last : last + 1] = new.transpose([0, 2, 1, 3])
    return cached_attention(q_B1NH, key_BKCH, value_BKCH, cached)


class PagedKeys(CachedKeys):
    """Where keys of rows of different lengths lie in a memory that they share; one object for all
    layers of a forward pass.

    Args:
        places: of each row those of its keys, int64 `[S]` on the host, the new tokens' last.
        num_new: L, the same for each row.
        rows: number of each row, for what layers keep beside keys.

    Attributes:
        of_rows: the places.
        lengths: S of each row; `length` is the longest.
        num_new: L.
        begins: whether no row has a key of before.
    """

    def __init__(
        self, places: Sequence[np.ndarray], num_new: int = 1, rows: Sequence[int] | None = None
    ):
        self.lengths, self._rows = [len(each) for each in places], rows
        super().__init__(max(self.lengths))
        self.begins = self.length == num_new
        self.of_rows, self.num_new = places, num_new

    @cached_property
    def new(self) -> Tensor:
        """Places of the new tokens, row by row: int64 `[R * L]`."""
        return device_tensor(np.concatenate([each[-self.num_new :] for each in self.of_rows]))

    @cached_property
    def places(self) -> Tensor:
        """Places of all keys, row by row: int64."""
        return device_tensor(np.concatenate(self.of_rows))

    @cached_property
    def offsets(self) -> Tensor:
        """int32 `[R + 1]`: where each row begins in `places`, and the end."""
        return device_tensor(np.cumsum([0, *self.lengths], dtype=np.int32))

    @cached_property
    def rows(self) -> Tensor:
        """Numbers of the rows: int64."""
        return device_tensor(np.array(self._rows, dtype=np.int64))

    @cached_property
    def queries(self) -> Tensor:
        """The offsets of one query of each row."""
        return device_tensor(np.arange(len(self.lengths) + 1, dtype=np.int32))


class RowPool:
    """What a decoder layer keeps of many rows that join and leave; see `LanguageModel.run`.

    Attributes:
        paged: where the keys of the rows lie that run next.
    """

    paged: PagedKeys

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> PagedKeys:
        """What the pools of all layers share."""
        return self.paged

    def fork(self, row: int, rows: Sequence[int]) -> None:
        """Copy what is kept of a row beside its keys to other rows."""


@operation
def paged_attention(q_RNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, paged: PagedKeys) -> Tensor:
    """One query of each row over all keys of that row: `[R, N, H]` in the dtype of the queries.

    Each row by itself, so that its result does not depend on the others.
    """
    keys, values = (
        paddle.split(paddle.index_select(memory, paged.places), paged.lengths)
        for memory in (key_MKH, value_MKH)
    )
    queries = paddle.split(q_RNH.unsqueeze(1), len(paged.lengths))
    rows = zip(queries, keys, values, strict=True)
    out = [causal_attention(q, k.unsqueeze(0), v.unsqueeze(0)) for q, k, v in rows]
    return paddle.concat(out).squeeze(1)


def biased_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """`softmax(q @ k^T + bias) @ v` of the last two dims, the softmax in float32."""
    scores = paddle.matmul(q, k, transpose_y=True).astype("float32") + bias
    return paddle.matmul(F.softmax(scores).astype(v.dtype), v)


class RotaryTables:
    """Cosines and sines of every token row; one object for all layers of a forward pass.

    Not a tuple, which Paddle's recompute searches for tensors; it unpacks like one. The tables get
    no gradient.

    Args:
        cos_TH, sin_TH: float32; the second half of the channels repeats the first.
    """

    def __init__(self, cos_TH: Tensor, sin_TH: Tensor):
        self.cos_TH, self.sin_TH = cos_TH, sin_TH
        self._by_heads: dict[int, tuple[Tensor, Tensor]] = {}
        self._by_dtype: dict[str, RotaryTables] = {}

    @classmethod
    def of_angles(cls, angle_TF: Tensor) -> "RotaryTables":
        """Tables of the angles of the first half of the channels, `F = H / 2`."""
        angle_TH = paddle.concat([angle_TF, angle_TF], axis=-1)
        return cls(paddle.cos(angle_TH), paddle.sin(angle_TH))

    def __iter__(self) -> Iterator[Tensor]:
        yield self.cos_TH
        yield self.sin_TH

    def astype(self, dtype: Any) -> "RotaryTables":
        """These tables rounded to another dtype, in which the rotation is then computed."""
        if self.cos_TH.dtype == dtype:
            return self
        name = str(dtype)
        if name not in self._by_dtype:
            self._by_dtype[name] = RotaryTables(
                self.cos_TH.astype(dtype), self.sin_TH.astype(dtype)
            )
        return self._by_dtype[name]

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[T, heads, H]`, kept: Paddle's CPU kernels take ten times as long to
        broadcast over a middle dim."""
        if heads not in self._by_heads:
            self._by_heads[heads] = (
                paddle.concat([self.cos_TH.unsqueeze(-2)] * heads, axis=-2),
                paddle.concat([self.sin_TH.unsqueeze(-2)] * heads, axis=-2),
            )
        return self._by_heads[heads]

    def prepare(self, num_heads: Sequence[int]) -> None:
        """Make the tables of these numbers of heads now, for plain operations too, and outside of a
        loop of a program that reads them."""
        for heads in num_heads:
            self.of_heads(heads)

    def for_product(self, heads: int) -> tuple[Tensor, Tensor]:
        """Tables that broadcast to `[T, heads, H]`: those of `prepare`, else `[T, 1, H]`."""
        if heads in self._by_heads:
            return self._by_heads[heads]
        return self.cos_TH.unsqueeze(-2), self.sin_TH.unsqueeze(-2)


def inverse_frequencies(num: int, theta: float) -> np.ndarray:
    """`theta^(-k / num)` for k in [0, num): float32 `[num]`."""
    return (1.0 / theta ** (np.arange(num, dtype=np.float32) / num)).astype(np.float32)


_frequency_table = host_table(inverse_frequencies)


def interleaved_mrope_axis(num_slots: int, mrope_section: list[int]) -> np.ndarray:
    """The position axis (0 time, 1 height, 2 width) of each frequency slot: `[num_slots]` int64.

    Slot k reads height when k mod 3 is 1 and k < 3 * section[1], width when k mod 3 is 2 and
    k < 3 * section[2], time otherwise. Sections [4, 2, 2] over 8 slots give T H W T H W T T.
    Source: apply_interleaved_mrope of HF transformers' Qwen3-VL.
    """
    slot = np.arange(num_slots)
    axis = np.zeros(num_slots, dtype=np.int64)
    for dim in (1, 2):
        axis[(slot % 3 == dim) & (slot < 3 * mrope_section[dim])] = dim
    return axis


@host_table
def _picked_frequencies(
    slots: int, theta: float, mrope_section: tuple[int, ...], interleaves: bool
) -> np.ndarray:
    """`[3, slots]` float32: each slot's frequency on its axis, 0 on the others, which select the
    axis without a gather, and export."""
    if interleaves:
        axis = interleaved_mrope_axis(slots, list(mrope_section))
    else:
        axis = np.repeat(np.arange(3), mrope_section)
    return np.eye(3, dtype=np.float32)[axis].T * inverse_frequencies(slots, theta)


def mrope_tables(
    position_ids_3BL: Tensor,
    head_dim: int,
    theta: float,
    mrope_section: list[int],
    interleaves: bool = True,
) -> RotaryTables:
    """Tables `[B, L, H]` of the decoder's multimodal rotary.

    Args:
        position_ids_3BL: int64 positions on the time, height and width axes.
        interleaves: whether the slots take time, height and width in turn; else one after the
            other, each as many as its section says.
    """
    picked_3S = _picked_frequencies(head_dim // 2, theta, tuple(mrope_section), interleaves)
    position_BL3 = position_ids_3BL.transpose([1, 2, 0]).astype("float32")
    time, height, width = (position_BL3[:, :, dim : dim + 1] * picked_3S[dim] for dim in range(3))
    return RotaryTables.of_angles(time + height + width)


def vision_tables(coordinates_P2: Tensor, head_dim: int, theta: float = 10000.0) -> RotaryTables:
    """Tables `[P, H]` of the vision tower.

    The first quarter of the channels is rotated by the patch's row, the second by its column.

    Args:
        coordinates_P2: row and column of each patch.
    """
    frequency_F = _frequency_table(head_dim // 4, theta)
    angle_P2F = coordinates_P2.astype("float32").unsqueeze(-1) * frequency_F
    return RotaryTables.of_angles(angle_P2F.reshape([-1, head_dim // 2]))


@operation
def apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate every head of queries and keys: `x * cos + rotate_half(x) * sin`.

    Computed in the dtype of the tables and cast to that of the inputs. Leading dims may be any
    number, the same for queries, keys (before the heads) and tables (before H).

    Returns:
        The rotated queries and keys. One of them without a gradient gives its input none.
    """

    def rotated(x_TNH: Tensor) -> Tensor:
        cos, sin = tables.for_product(x_TNH.shape[-2])
        wide = x_TNH.astype(cos.dtype)
        return (wide * cos + rotate_half(wide) * sin).astype(x_TNH.dtype)

    return rotated(q_TNH), rotated(k_TKH)


@operation
def normed_rotary(
    q_TNH: Tensor,
    k_TKH: Tensor,
    tables: RotaryTables,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    epsilon: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """`apply_rotary` of normalized queries and keys, on as many first channels as the tables have;
    the others are normalized alone.

    Args:
        offset: 1 takes `gemma_rms_norm`, 0 `rms_norm`.
    """
    norm, rotated = gemma_rms_norm if offset else rms_norm, tables.cos_TH.shape[-1]
    q, k = norm(q_TNH, q_weight_H, epsilon), norm(k_TKH, k_weight_H, epsilon)
    if rotated == q.shape[-1]:
        return apply_rotary(q, k, tables)
    parts = [paddle.split(x, [rotated, x.shape[-1] - rotated], axis=-1) for x in (q, k)]
    turned = apply_rotary(parts[0][0], parts[1][0], tables)
    q, k = (paddle.concat([x, rest], axis=-1) for x, (_, rest) in zip(turned, parts, strict=True))
    return q, k


def rotate_half(x: Tensor) -> Tensor:
    """`[-x2, x1]` for the halves `[x1, x2]` of the last dim."""
    half = x.shape[-1] // 2
    return paddle.concat([-x[..., half:], x[..., :half]], axis=-1)


class SelfAttention(Protocol):
    """What `self_attention` takes of a layer.

    Attributes:
        qkv_proj: gives queries, keys and values of all heads, `[T, heads * H]` each.
        o_proj: of the output `[T, N * H]`.
        biases: callables that add theirs to queries, keys and values; empty without.
        q_norm, k_norm: norms of a head, of one class; None without.
        head_dim: H.
        is_gated: a query head's projection has the query, then a gate, by whose sigmoid the head's
            output is multiplied.
        context: attends without a cache, see `placement.Context`.
    """

    qkv_proj: Any
    o_proj: Any
    biases: Any
    q_norm: Any
    k_norm: Any
    head_dim: int
    is_gated: bool
    context: Any


@operation
def self_attention(
    x_TD: Tensor,
    layer: SelfAttention,
    tables: RotaryTables,
    key_bias: Any = None,
    cache: Any = None,
    packed: PackedSamples | SliceMask | None = None,
) -> Tensor:
    """Causal grouped-query attention `[T, D]`; queries and keys are normalized, if the layer has
    norms, and rotated: as many of their first channels as the rotary tables have.

    Args:
        key_bias: `[B, S]` float32 added to the scores of keys; with a cache what caches share.
        cache: gets the new keys, see `paddle_vl.nn.key_value_cache`; None attends to these alone.
    """
    length, width = tables.cos_TH.shape[1], layer.head_dim
    qkv = layer.qkv_proj(x_TD)
    if layer.biases:
        qkv = [bias(rows) for bias, rows in zip(layer.biases, qkv, strict=True)]
    q_BLNH, k_BLKH, v_BLKH = [
        rows.reshape([-1, length, rows.shape[-1] // width, width]) for rows in qkv
    ]
    gate_BLNH = None
    if layer.is_gated:
        gated = q_BLNH.reshape([-1, length, q_BLNH.shape[2] // 2, 2 * width])
        q_BLNH, gate_BLNH = paddle.split(gated, 2, axis=-1)
    tables = tables.astype(x_TD.dtype)
    if layer.q_norm is None:
        q_BLNH, k_BLKH = apply_rotary(q_BLNH, k_BLKH, tables)
    else:
        norm, weights = layer.q_norm, (layer.q_norm.weight, layer.k_norm.weight)
        q_BLNH, k_BLKH = normed_rotary(q_BLNH, k_BLKH, tables, *weights, norm.epsilon, norm.offset)
    if cache is not None:
        out_BLNH = cache.attend(q_BLNH, k_BLKH, v_BLKH, key_bias)
    else:
        out_BLNH = layer.context.attend(q_BLNH, k_BLKH, v_BLKH, key_bias, packed)
    if gate_BLNH is not None:
        out_BLNH = out_BLNH * F.sigmoid(gate_BLNH)
    return layer.o_proj(out_BLNH.reshape([-1, out_BLNH.shape[2] * width]))
