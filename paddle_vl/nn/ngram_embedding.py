"""Embeddings of n-grams: hashes of a token with those before it choose rows of a table, which a
gate per residual stream weighs, and a dilated convolution spreads over later tokens.

The n-gram of order o that ends at a token is a XOR of o products, of ids and odd numbers; it has H
rows, one of each of H parts of the table, whose sizes are different primes. An n-gram ends at a
boundary token and at the first token of a sample: what is before reads as the boundary.

Shapes: B batch, L length, T = B * L token rows (of this rank: fewer under sequence parallelism); N
tokens of the longest n-gram, H heads per order, Y = (N - 1) * H heads, E width of a token's rows;
S streams, D width of a stream, C = S * D; J taps of the convolution, P = (J - 1) * N rows before.

Source: Qwen4ExpTextPLELayer and Qwen4ExpTextNGramEmbedding of HF transformers,
modeling_qwen4_exp.py; of the idea Huang et al., Over-Tokenized Transformer,
https://arxiv.org/abs/2501.16975.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.nn.attention import PackedSamples
from paddle_vl.nn.delta_rule import DeltaCache, DeltaPool, Reach, real_tokens
from paddle_vl.nn.dispatch import operation
from paddle_vl.nn.experts import RoutedRows
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.operations import slice_axis
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.residual_streams import Weight, spread, stream_norm
from paddle_vl.nn.transfer import device_tensor, host_table

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
# Between the seeds of two layers.
_LAYER_STEP = 10007
# The gate's root is of at least this.
_SMALLEST = 1e-6


class NgramHash(NamedTuple):
    """Constants of a layer's hash, exact integers.

    Attributes:
        multipliers: N odd numbers, whose products with ids are below 2^63.
        sizes: Y primes, the rows of each head.
        offsets: Y, the first row of each head.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of_sizes(cls, multipliers: Sequence[int], sizes: Sequence[int]) -> "NgramHash":
        """The heads' rows one behind the other."""
        offsets = [sum(sizes[:head]) for head in range(len(sizes))]
        return cls(tuple(multipliers), tuple(sizes), tuple(offsets))

    def num_rows(self, divisor: int) -> int:
        """Rows of the table, with those that are never read up to a multiple of a number."""
        return -(-sum(self.sizes) // divisor) * divisor


def ngram_hash(
    number: int, ngram_size: int, heads_per_ngram: int, vocab_size: int, base: int, seed: int
) -> NgramHash:
    """The constants of the layer of that number among those with n-grams.

    Args:
        base: least size of a head; sizes are the primes from it, each used once in a model.
    """
    most = max(1, ((1 << 63) - 1) // vocab_size // 2)
    start = seed + _LAYER_STEP * number
    multipliers = [
        2 * (_splitmix64(start + _GOLDEN * (place + 1)) % most) + 1 for place in range(ngram_size)
    ]
    heads = (ngram_size - 1) * heads_per_ngram
    sizes = primes_from(base, (number + 1) * heads)[number * heads :]
    return NgramHash.of_sizes(multipliers, sizes)


def _splitmix64(state: int) -> int:
    """Source: Vigna's splitmix64.c, https://prng.di.unimi.it/splitmix64.c (public domain)."""
    mixed = (state + _GOLDEN) & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31


def primes_from(least: int, count: int) -> list[int]:
    """The first primes that are at least a number."""
    found: list[int] = []
    begin, size = max(least, 2), 64 * count + 64
    while len(found) < count:
        # A sieve of the next numbers by all that may divide them.
        is_prime = np.ones(size, bool)
        for divisor in range(2, int((begin + size) ** 0.5) + 1):
            first = max(divisor * divisor, -(-begin // divisor) * divisor)
            is_prime[first - begin :: divisor] = False
        found += (begin + np.flatnonzero(is_prime)).tolist()
        begin += size
    return found[:count]


@host_table
def _constants(values: tuple[int, ...]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@operation
def ngram_rows(
    ids_BL: Tensor,
    constants: NgramHash,
    boundary: int,
    before_BN: Tensor | None = None,
    place_T: Tensor | None = None,
) -> Tensor:
    """Rows of the table that each token has: int64 `[T, Y]`.

    Args:
        ids_BL: int64; padding has the boundary's.
        boundary: id of the token at which n-grams end.
        before_BN: `[B, N - 1]`, the ids before; None for boundaries.
        place_T: number of tokens of its own sample before a token, with packed samples.
    """
    batch, length = ids_BL.shape
    earlier = len(constants.multipliers) - 1
    if before_BN is None:
        before_BN = paddle.full([batch, earlier], boundary, "int64")
    seen = paddle.concat([before_BN, ids_BL], axis=1)
    # As tensors: Paddle 3.3 takes a Python number through float64.
    multipliers = [_constants((each,)) for each in constants.multipliers]
    mixed_BL = ids_BL * multipliers[0]
    heads = len(constants.sizes) // earlier
    is_cut_BL, rows = None, []
    for back in range(1, earlier + 1):
        id_BL = seen[:, earlier - back : earlier - back + length]
        is_end_BL = id_BL == boundary
        if place_T is not None:
            is_end_BL = paddle.logical_or(is_end_BL, (place_T < back).reshape([batch, length]))
        is_cut_BL = is_end_BL if is_cut_BL is None else paddle.logical_or(is_cut_BL, is_end_BL)
        id_BL = paddle.where(is_cut_BL, paddle.full_like(id_BL, boundary), id_BL)
        mixed_BL = paddle.bitwise_xor(mixed_BL, id_BL * multipliers[back])
        own = slice((back - 1) * heads, back * heads)
        sizes, offsets = _constants(constants.sizes[own]), _constants(constants.offsets[own])
        rows.append(paddle.remainder(mixed_BL.reshape([-1, 1]), sizes) + offsets)
    return paddle.concat(rows, axis=-1)


@operation
def ngram_gates(
    x_TC: Tensor,
    key_TC: Tensor,
    query_norm_C: Tensor,
    key_norm_C: Tensor,
    streams: int,
    epsilon: float,
) -> Tensor:
    """A gate for each stream, `[T, S]`: with b the product of the stream and its key, both
    normalized, over sqrt(D), it is `sigmoid(sign(b) sqrt(|b|))`, the root of at least 1e-3."""
    query = stream_norm(x_TC, query_norm_C, streams, epsilon)
    product = query * stream_norm(key_TC, key_norm_C, streams, epsilon)
    width = x_TC.shape[1] // streams
    wide = product.astype("float32").reshape([-1, streams, width]).sum(axis=-1)
    b_TS = wide.astype(x_TC.dtype) / width**0.5
    root = paddle.sqrt(b_TS.abs().clip(min=_SMALLEST))
    return F.sigmoid(paddle.sign(b_TS) * root)


@operation
def dilated_conv_silu(
    u_BLC: Tensor,
    weight_CJ: Tensor,
    dilation: int,
    before_BPC: Tensor,
    place_BL: Tensor | None = None,
) -> Tensor:
    """`silu(y)` of a causal depthwise convolution whose taps are some rows apart:
    `y[t] = sum_j weight[:, j] u[t - (J - 1 - j) * dilation]`, summed in float32.

    Args:
        before_BPC: the rows before the first.
        place_BL: number of rows of its own sample before a row, which sees no others; None if all
            are of one.

    Returns:
        `[B, L, C]` in the dtype of `u`.
    """
    length, taps = u_BLC.shape[1], weight_CJ.shape[1]
    seen = paddle.concat([before_BPC, u_BLC], axis=1).astype("float32")
    weight_JC = weight_CJ.astype("float32").t()
    total: Any = None
    for tap in range(taps):
        term = seen[:, tap * dilation : tap * dilation + length] * weight_JC[tap]
        back = (taps - 1 - tap) * dilation
        if back and place_BL is not None:
            term = term * (place_BL >= back).astype("float32").unsqueeze(-1)
        total = term if total is None else total + term
    return F.silu(total.astype(u_BLC.dtype))


class _Places:
    """`place_T` of packed samples on the device; see `PackedSamples.once`."""

    def __init__(self, offsets: tuple[int, ...]):
        self.place_T = device_tensor(Reach(offsets).place_T.astype(np.int64))


@host_table
def _row_places(batch: int, length: int) -> np.ndarray:
    return np.tile(np.arange(length, dtype=np.int64), batch)


class NgramCache(DeltaCache):
    """What a DeltaNet layer with n-grams keeps during generation.

    Attributes:
        ngram_ids_BN: `[B, N - 1]` the last ids.
        ngram_rows_BPC: the last inputs of the dilated convolution.
    """

    def __init__(self):
        super().__init__()
        self.ngram_ids_BN: Tensor | None = None
        self.ngram_rows_BPC: Tensor | None = None


class NgramPool(DeltaPool):
    """`NgramCache` of many rows."""

    @property
    def ngram_ids_BN(self) -> Tensor | None:
        return self._taken("ngram_ids")

    @ngram_ids_BN.setter
    def ngram_ids_BN(self, new: Tensor) -> None:
        self._put("ngram_ids", new)

    @property
    def ngram_rows_BPC(self) -> Tensor | None:
        return self._taken("ngram_rows")

    @ngram_rows_BPC.setter
    def ngram_rows_BPC(self, new: Tensor) -> None:
        self._put("ngram_rows", new)


class NgramTable(nn.Layer):
    """The rows of each token's n-grams side by side.

    Args:
        constants: of the hash.
        num_rows: of the table.
        width: E.
    """

    def __init__(
        self,
        constants: NgramHash,
        num_rows: int,
        width: int,
        boundary: int,
        init_std: float,
        placement: Placement,
    ):
        super().__init__()
        self.constants, self.boundary = constants, boundary
        self.ngram_embedding = placement.layers.row_table(
            num_rows, width // len(constants.sizes), init_std
        )

    def forward(
        self,
        x_TC: Tensor,
        ids_BL: Tensor,
        before_BN: Tensor | None = None,
        place_T: Tensor | None = None,
        rows: RoutedRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The streams as they are, see `RowTable.beside`, and rows `[T, E]` of this rank's token
        rows, of the ids of all.

        Args:
            rows: keeps the plan of the look-up for a recomputed pass.
        """

        def planned() -> Any:
            rows_TY = ngram_rows(ids_BL, self.constants, self.boundary, before_BN, place_T)
            return self.ngram_embedding.plan(rows_TY)

        plan = planned() if rows is None else rows.plan(self, planned)
        x_TC, rows_TYE = self.ngram_embedding.beside(x_TC, plan)
        return x_TC, rows_TYE.flatten(start_axis=1)


class PerLayerEmbedding(nn.Layer):
    """What n-grams add to the streams: values by gates, with a convolution of them.

    Args:
        constants, num_rows: as of `NgramTable`.
        boundary: id of the token at which n-grams end.
        width, streams: D, S.
        table_width: E.
        taps: J.
    """

    def __init__(
        self,
        constants: NgramHash,
        num_rows: int,
        boundary: int,
        width: int,
        streams: int,
        table_width: int,
        taps: int,
        epsilon: float,
        init_std: float,
        placement: Placement,
    ):
        super().__init__()
        self.streams, self.epsilon, self.ops = streams, epsilon, placement.ops
        self.boundary, self.dilation = boundary, len(constants.multipliers)
        channels, row_wise = streams * width, placement.layers.row_wise
        self.ple_embedding = NgramTable(
            constants, num_rows, table_width, boundary, init_std, placement
        )
        self.key_proj = row_wise(Linear(table_width, channels, False, init_std))
        self.value_proj = row_wise(Linear(table_width, width, False, init_std))
        self.norm_key, self.norm_query, self.norm_conv = (
            row_wise(Weight([channels])) for _ in range(3)
        )
        self.conv1d = row_wise(Weight([channels, 1, taps]))

    def forward(
        self,
        x_TC: Tensor,
        ids_BL: Tensor,
        key_bias: Any = None,
        cache: NgramCache | NgramPool | None = None,
        packed: PackedSamples | None = None,
        rows: RoutedRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """This rank's streams as they are, and what is added to them, `[T, C]` each.

        Args:
            ids_BL: of all token rows.
            key_bias, packed: as of `attention.self_attention`.
            rows: those of the layer's experts.
        """
        length = ids_BL.shape[1]
        real_BL1 = real_tokens(key_bias, length)
        if real_BL1 is not None:
            filler = paddle.full_like(ids_BL, self.boundary)
            ids_BL = paddle.where(real_BL1.squeeze(-1), ids_BL, filler)
        before_BN = None if cache is None else self._ids_before(ids_BL, cache)
        place_T = None if packed is None else packed.once(_Places).place_T
        x_TC, rows_TE = self.ple_embedding(x_TC, ids_BL, before_BN, place_T, rows)
        gates_TS = ngram_gates(
            x_TC,
            self.key_proj(rows_TE),
            self.norm_query.weight,
            self.norm_key.weight,
            self.streams,
            self.epsilon,
        )
        added_TC = spread(self.value_proj(rows_TE), gates_TS)
        if real_BL1 is not None:
            # Zeros stay zeros in the norm.
            added_TC = added_TC * self._own(real_BL1.reshape([-1, 1])).astype(added_TC.dtype)
        normed_TC = stream_norm(added_TC, self.norm_conv.weight, self.streams, self.epsilon)
        return x_TC, added_TC + self._convolved(normed_TC, ids_BL.shape, cache, place_T)

    def _ids_before(self, ids_BL: Tensor, cache: NgramCache | NgramPool) -> Tensor:
        """The ids before these, which follow them in the cache."""
        before_BN = cache.ngram_ids_BN
        if before_BN is None:
            shape = [ids_BL.shape[0], self.dilation - 1]
            before_BN = paddle.full(shape, self.boundary, "int64")
        last = paddle.concat([before_BN, ids_BL], axis=1)[:, -before_BN.shape[1] :]
        cache.ngram_ids_BN = last.clone()
        return before_BN

    def _convolved(
        self,
        u_TC: Tensor,
        shape_BL: Sequence[int],
        cache: NgramCache | NgramPool | None,
        place_T: Tensor | None,
    ) -> Tensor:
        weight_CJ, channels = self.conv1d.weight.squeeze(1), u_TC.shape[1]
        reach = (weight_CJ.shape[1] - 1) * self.dilation
        batch, length = shape_BL
        if cache is None:
            # Flat, so that sequence parallelism needs the rows before this rank's alone.
            if place_T is None and batch > 1:
                place_T = _row_places(batch, length)
            before_PC = self.ops.preceding_rows(u_TC, reach)
            place_1T = None if place_T is None else self._own(place_T).unsqueeze(0)
            return dilated_conv_silu(
                u_TC.unsqueeze(0), weight_CJ, self.dilation, before_PC.unsqueeze(0), place_1T
            ).squeeze(0)
        # Sequence parallelism divides prompts.
        u_BLC, before_BPC = u_TC.reshape([-1, length, channels]), cache.ngram_rows_BPC
        if before_BPC is None:
            before_BPC = paddle.zeros([u_BLC.shape[0], reach, channels], u_TC.dtype)
        last = paddle.concat([before_BPC, u_BLC], axis=1)[:, -reach:]
        cache.ngram_rows_BPC = last.clone()
        return dilated_conv_silu(u_BLC, weight_CJ, self.dilation, before_BPC).reshape(u_TC.shape)

    def _own(self, x_T: Tensor) -> Tensor:
        """This rank's part of all token rows."""
        begin, end = self.ops.row_part.bounds(x_T.shape[0])
        return x_T if self.ops.row_part.size == 1 else slice_axis(x_T, begin, end)
