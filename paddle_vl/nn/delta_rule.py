"""The gated delta rule, a linear attention with a state of fixed size; what surrounds it in a gated
DeltaNet layer: the causal depthwise convolution before it and the gated norm behind it; the layer,
and what it keeps during generation.

Per value head a state M `[C, V]` maps keys to values. A token makes it forget a share of all it
holds, then replaces what it holds for the token's key by a mixture with the token's value:

    M <- exp(g) M;    M <- M + k (beta (v - M^T k))^T;    o = M^T q

One token at a time this is bound by memory. In chunks of `CHUNK` tokens it is matrix products: with
G the cumulated g of a chunk and D_ij = exp(G_i - G_j) for i >= j, else 0,

    A = I + strict_lower(beta K K^T * D);    U = A^-1 (beta V);    W = A^-1 (beta exp(G) K)
    N = U - W M;    O = (exp(G) Q) M + (Q K^T * D) N
    M <- exp(G_last) M + (exp(G_last - G) K)^T N

where only N, O and M wait for the chunk before. A^-1 is a forward substitution: powers of its
strictly lower part grow beyond float32 where keys are nearly parallel. All of it is float32, only
G is summed in float64.

Shapes: B batch, L length, T = B * L token rows, D width; K key heads, N value heads, each key head
for N / K consecutive ones; C key width, V value width; S sequences (rows of the batch, or packed
samples); X chunks of all sequences, P places of a chunk; E channels, J taps of the convolution.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, https://arxiv.org/abs/2412.06464;
torch_chunk_gated_delta_rule and Qwen3_5GatedDeltaNet of HF transformers, modeling_qwen3_5.py.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Initializer, Normal

from paddle_vl.nn.attention import CachedKeys, PackedSamples, RotaryTables, RowPool
from paddle_vl.nn.dispatch import operation
from paddle_vl.nn.linear import precise_dtype, split_columns
from paddle_vl.nn.transfer import device_tensor, host_table

CHUNK = 64
# Added to the sum of squares of queries and keys, whatever the model's other norms add.
_SMALLEST = 1e-6


def chunked_size(key_width: int, value_width: int) -> int:
    """Multiplications per token and value head of the products of the chunked form."""
    inside = CHUNK * (2 * key_width + (key_width + value_width) // 2 + value_width)
    return inside + 3 * key_width * value_width


class Chunks:
    """How sequences are cut into chunks, in the order in which the states pass through them.

    Step s takes the s-th chunk of every sequence that has one, the longest sequences first, so that
    the states of a step are a prefix of those of the step before.

    Args:
        offsets: first token row of each sequence, and the end; they tile the rows.

    Attributes:
        size: P, at most `CHUNK`.
        active: number of sequences in each step.
        order_S: sequence of each state.
    """

    def __init__(self, offsets: tuple[int, ...]):
        self._offsets = np.array(offsets)
        lengths_S = np.diff(self._offsets)
        self.size = int(min(CHUNK, lengths_S.max()))
        self.order_S = np.argsort(-lengths_S, kind="stable")
        self._counts_S = -(-lengths_S[self.order_S] // self.size)
        steps = np.arange(self._counts_S[0])
        self.active = [int(count) for count in (self._counts_S[:, None] > steps).sum(axis=0)]
        # Of sequences of one length, which need no index.
        self.length = int(lengths_S[0]) if len(set(lengths_S.tolist())) == 1 else None

    @cached_property
    def place_T(self) -> np.ndarray:
        """The place among those of all chunks that a token row has."""
        first_step = np.cumsum([0, *self.active])
        place_T = np.empty([self._offsets[-1]], dtype=np.int64)
        for state, sequence in enumerate(self.order_S):
            begin, end = self._offsets[sequence : sequence + 2]
            step, place = np.divmod(np.arange(end - begin), self.size)
            place_T[begin:end] = (first_step[step] + state) * self.size + place
        return place_T

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """Places of the token rows, and token rows of the places, T where a place is padding."""
        rows = np.full([sum(self.active) * self.size], len(self.place_T))
        rows[self.place_T] = np.arange(len(self.place_T))
        return device_tensor(self.place_T), device_tensor(rows)

    def cut(self, x_BLN: Tensor) -> Tensor:
        """`[B, L, N, ...]` to `[X, N, P, ...]`, zeros at the places behind the last tokens."""
        heads = list(x_BLN.shape[2:])
        after = list(range(4, 3 + len(heads)))
        if self.length is None:
            x_TN = x_BLN.reshape([-1, *heads])
            x_TN = paddle.concat([x_TN, paddle.zeros([1, *heads], x_TN.dtype)])
            x_XPN = paddle.index_select(x_TN, self._tables[1]).reshape([-1, self.size, *heads])
            return x_XPN.transpose([0, 2, 1, *(axis - 1 for axis in after)])
        x_SLN = x_BLN.reshape([-1, self.length, *heads])
        if missing := len(self.active) * self.size - self.length:
            zeros = paddle.zeros([x_SLN.shape[0], missing, *heads], x_SLN.dtype)
            x_SLN = paddle.concat([x_SLN, zeros], axis=1)
        x_SsPN = x_SLN.reshape([-1, len(self.active), self.size, *heads])
        return x_SsPN.transpose([1, 0, 3, 2, *after]).reshape([-1, heads[0], self.size, *heads[1:]])

    def join(self, x_XNPV: Tensor) -> Tensor:
        """The inverse of `cut`: `[X, N, P, V]` to `[T, N, V]`."""
        _, heads, size, width = x_XNPV.shape
        if self.length is None:
            x_XPNV = x_XNPV.transpose([0, 2, 1, 3]).reshape([-1, heads, width])
            return paddle.index_select(x_XPNV, self._tables[0])
        x = x_XNPV.reshape([len(self.active), -1, heads, size, width]).transpose([1, 0, 3, 2, 4])
        x_SLNV = x.reshape([x.shape[0], -1, heads, width])[:, : self.length]
        return x_SLNV.reshape([-1, heads, width])


def sequence_chunks(batch: int, length: int, packed: PackedSamples | None) -> Chunks:
    """The chunks of the rows of a batch, or of the samples in them."""
    if packed is not None:
        return packed.once(Chunks)
    return Chunks(tuple(range(0, batch * length + 1, length)))


@operation
def gated_delta_rule(
    q_BLKC: Tensor,
    k_BLKC: Tensor,
    v_BLNV: Tensor,
    decay_BLN: Tensor,
    beta_BLN: Tensor,
    state_BNCV: Tensor | None = None,
    packed: PackedSamples | None = None,
    keeps_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the states give for the queries, chunk by chunk; a single token as the recurrence.

    Args:
        q_BLKC, k_BLKC: brought to length 1 here, queries then scaled by C^-0.5.
        decay_BLN: g, the logarithm of what a token leaves of the state, at most 0; float32.
        beta_BLN: share of the value that replaces what the state holds for the key.
        state_BNCV: float32 state before the first token; None for zeros. Not with packed samples.
        packed: offsets of packed samples, whose states begin at zero.
        keeps_state: return the states behind the last token of every sequence.

    Returns:
        `[B, L, N, V]` in the dtype of the values; float32 `[S, N, C, V]` with `keeps_state`, S = B
        without packed samples, else None.
    """
    batch, length, _, width = q_BLKC.shape
    groups = v_BLNV.shape[2] // k_BLKC.shape[2]
    q_BLNC = of_value_heads(unit_rows(q_BLKC) * width**-0.5, groups)
    k_BLNC = of_value_heads(unit_rows(k_BLKC), groups)
    v, beta_BLN = v_BLNV.astype("float32"), beta_BLN.astype("float32")
    if length == 1 and packed is None:
        out, after = _single_token(q_BLNC, k_BLNC, v_BLNV, decay_BLN, beta_BLN, state_BNCV)
        return out, after if keeps_state else None
    chunks = sequence_chunks(batch, length, packed)
    q, k, v, g_XNP, beta_XNP = (chunks.cut(x) for x in (q_BLNC, k_BLNC, v, decay_BLN, beta_BLN))
    # Where decay is strong, differences of sums in float32 would be off by 1e-4.
    total_XNP1 = g_XNP.astype("float64").cumsum(axis=-1).unsqueeze(-1)
    beta_XNP1, left_XNP1 = beta_XNP.unsqueeze(-1), paddle.exp(total_XNP1.astype("float32"))
    # Above the diagonal the difference is positive, and its exponential may be infinite.
    later, below = hidden_later(chunks.size), below_diagonal(chunks.size)
    between_XNPP = (total_XNP1 - total_XNP1.transpose([0, 1, 3, 2])).astype("float32")
    decay_XNPP = paddle.exp(between_XNPP + later)
    weighted = k * beta_XNP1
    # The solve takes 1 on the diagonal, but would pass a gradient to what is there.
    a_XNPP = paddle.matmul(weighted, k, transpose_y=True) * decay_XNPP * below
    rhs = paddle.concat([v * beta_XNP1, weighted * left_XNP1], axis=-1)
    solved = paddle.linalg.triangular_solve(a_XNPP, rhs, upper=False, unitriangular=True)
    u_XNPV, w_XNPC = paddle.split(solved, [v.shape[-1], width], axis=-1)
    score_XNPP = paddle.matmul(q, k, transpose_y=True) * decay_XNPP
    last_XN11 = total_XNP1[:, :, -1:]
    q, k = q * left_XNP1, k * paddle.exp((last_XN11 - total_XNP1).astype("float32"))
    kept_XN11 = left_XNP1[:, :, -1:]

    outs, ended, begin = [], [], 0
    state = state_BNCV
    for step, count in enumerate(chunks.active):
        own = slice(begin, begin + count)
        begin += count
        new, out = u_XNPV[own], None
        if state is not None:
            if state.shape[0] > count:
                ended.append(state[count:])
                state = state[:count]
            new = new - paddle.matmul(w_XNPC[own], state)
            out = paddle.matmul(q[own], state)
            state = state * kept_XN11[own]
        within = paddle.matmul(score_XNPP[own], new)
        outs.append(within if out is None else out + within)
        if keeps_state or step + 1 < len(chunks.active):
            added = paddle.matmul(k[own], new, transpose_x=True)
            state = added if state is None else state + added
    out_TNV = chunks.join(paddle.concat(outs))
    out_BLNV = out_TNV.reshape(v_BLNV.shape).astype(v_BLNV.dtype)
    if not keeps_state:
        return out_BLNV, None
    assert state is not None, "there is at least one step"
    return out_BLNV, states_in_order(chunks, [*reversed([*ended, state])])


def _single_token(
    q_B1NC: Tensor,
    k_B1NC: Tensor,
    v_B1NV: Tensor,
    decay_B1N: Tensor,
    beta_B1N: Tensor,
    state_BNCV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q_BN1C, k_BN1C, v_BN1V = (x.transpose([0, 2, 1, 3]) for x in (q_B1NC, k_B1NC, v_B1NV))
    decay_BN11, beta_BN11 = (x.transpose([0, 2, 1]).unsqueeze(-1) for x in (decay_B1N, beta_B1N))
    new = v_BN1V.astype("float32")
    if state_BNCV is not None:
        state_BNCV = state_BNCV * paddle.exp(decay_BN11)
        new = new - paddle.matmul(k_BN1C, state_BNCV)
    added = paddle.matmul(k_BN1C, beta_BN11 * new, transpose_x=True)
    after_BNCV = added if state_BNCV is None else state_BNCV + added
    out_BN1V = paddle.matmul(q_BN1C, after_BNCV)
    return out_BN1V.transpose([0, 2, 1, 3]).astype(v_B1NV.dtype), after_BNCV


def unit_rows(x: Tensor) -> Tensor:
    """The rows of the last dim with length 1, float32."""
    x = x.astype("float32")
    return x * inverse_lengths(x)


def inverse_lengths(x: Tensor) -> Tensor:
    """1 over the length of every row of the last dim, `[..., 1]`."""
    return paddle.rsqrt((x * x).sum(axis=-1, keepdim=True) + _SMALLEST)


def of_value_heads(x_BLKC: Tensor, groups: int) -> Tensor:
    """Each key head for its consecutive value heads: `[B, L, N, C]`."""
    return x_BLKC if groups == 1 else x_BLKC.repeat_interleave(groups, axis=2)


def states_in_order(chunks: Chunks, parts: list[Tensor]) -> Tensor:
    """States of the longest sequences first, in parts, as `[S, N, C, V]` in the batch's order."""
    states = parts[0] if len(parts) == 1 else paddle.concat(parts)
    if (np.diff(chunks.order_S) == 1).all():
        return states
    return paddle.index_select(states, device_tensor(np.argsort(chunks.order_S)))


@host_table
def hidden_later(size: int) -> np.ndarray:
    """float32 `[size, size]`: minus infinity above the diagonal, else 0."""
    return np.triu(np.full([size, size], -np.inf, dtype=np.float32), 1)


@host_table
def below_diagonal(size: int) -> np.ndarray:
    """float32 `[size, size]`: 1 below the diagonal, else 0."""
    return np.tril(np.ones([size, size], dtype=np.float32), -1)


@operation
def causal_conv_silu(
    u_BLE: Tensor,
    weight_EJ: Tensor,
    before_BJE: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """`silu(y)` of a causal depthwise convolution: `y[t] = sum_j weight[:, j] u[t - (J - 1) + j]`.

    The last tap belongs to the token itself; tokens before the first are zero. Summed in float32.

    Args:
        before_BJE: `[B, J - 1, E]` the tokens before the first; None for zeros.
        packed: offsets of packed samples, whose tokens do not see those of another sample.

    Returns:
        `[B, L, E]` in the dtype of `u`.
    """
    return F.silu(convolved(u_BLE, weight_EJ, before_BJE, packed).astype(u_BLE.dtype))


def convolved(
    u_BLE: Tensor, weight_EJ: Tensor, before_BJE: Tensor | None, packed: PackedSamples | None
) -> Tensor:
    """The float32 sums y of `causal_conv_silu`."""
    batch, length, width = u_BLE.shape
    taps = weight_EJ.shape[1]
    if before_BJE is None:
        before_BJE = paddle.zeros([batch, taps - 1, width], u_BLE.dtype)
    seen = paddle.concat([before_BJE, u_BLE], axis=1).astype("float32")
    weight_JE = weight_EJ.astype("float32").t()
    total = seen[:, taps - 1 :] * weight_JE[taps - 1]
    for back in range(1, taps):
        tap = taps - 1 - back
        term = seen[:, tap : tap + length] * weight_JE[tap]
        if packed is not None:
            term = term * packed.once(Reach).mask(back, batch)
        total = total + term
    return total


class Reach:
    """Which tokens have others of their own sample before them; see `PackedSamples.once`.

    Attributes:
        place_T: number of tokens before a token in its sample.
    """

    def __init__(self, offsets: tuple[int, ...]):
        self.place_T = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
        self._masks: dict[int, Tensor] = {}

    def mask(self, back: int, batch: int) -> Tensor:
        """float32 `[B, L, 1]`, 1 at tokens whose sample has a token so many places before them."""
        if back not in self._masks:
            mask_T = (self.place_T >= back).astype(np.float32)
            self._masks[back] = device_tensor(mask_T.reshape([batch, -1, 1]))
        return self._masks[back]


@operation
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight_C: Tensor, epsilon: float, is_sigmoid: bool = False
) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + epsilon)) * silu(gate)`, the mean over C.

    The quotient is computed in float32 and cast to the dtype of `x` before the weight; the gate is
    applied in float32. Source: Qwen3_5RMSNormGated of HF transformers.

    Args:
        x, gate: `[..., C]`.
        is_sigmoid: take `sigmoid(gate)`.

    Returns:
        `[..., C]` in the dtype of `x`.
    """
    wide = x.astype("float32")
    mean = (wide * wide).sum(axis=-1, keepdim=True) / x.shape[-1]
    normed = (wide * paddle.rsqrt(mean + epsilon)).astype(x.dtype) * weight_C
    act = F.sigmoid if is_sigmoid else F.silu
    return (normed * act(gate.astype("float32"))).astype(x.dtype)


class TokenState(NamedTuple):
    """What a kernel of one new token of each row reads and replaces.

    Attributes:
        inputs, state: as of `DeltaCache`, maybe of more rows.
        rows: int64, of each row its number in both; None for their order.
    """

    inputs: Tensor
    state: Tensor
    rows: Tensor | None


class DeltaCache:
    """What a DeltaNet layer keeps during generation, whatever the number of tokens.

    Attributes:
        inputs_BJE: `[B, J - 1, E]` the last inputs of the convolution.
        state_BNCV: float32 state of the delta rule.
        length: number of tokens so far.
    """

    def __init__(self):
        self.inputs_BJE: Tensor | None = None
        self.state_BNCV: Tensor | None = None
        self.length = 0

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> CachedKeys:
        """As `KeyValueCache.mask`: the first layer's cache makes it for all layers."""
        return CachedKeys(self.length + num_new, key_bias_BS)

    @property
    def takes_token(self) -> bool:
        """Whether there are tokens before a new one."""
        return self.length > 0

    def for_token(self) -> TokenState:
        """The tensors, with a new token counted."""
        assert self.inputs_BJE is not None, "takes_token"
        assert self.state_BNCV is not None, "takes_token"
        self.length += 1
        return TokenState(self.inputs_BJE, self.state_BNCV, None)


class DeltaPool(RowPool):
    """`DeltaCache` of many rows: what the rows that run have is taken when the layer asks for it,
    and put back when it sets it."""

    def __init__(self, num_rows: int):
        self._num_rows, self.length = num_rows, 0
        self._memories: dict[str, Tensor] = {}

    @property
    def inputs_BJE(self) -> Tensor | None:
        return self._taken("inputs")

    @inputs_BJE.setter
    def inputs_BJE(self, new: Tensor) -> None:
        self._put("inputs", new)

    @property
    def state_BNCV(self) -> Tensor | None:
        return self._taken("state")

    @state_BNCV.setter
    def state_BNCV(self, new: Tensor) -> None:
        self._put("state", new)

    def fork(self, row: int, rows: Sequence[int]) -> None:
        numbers = device_tensor(np.array(rows, dtype=np.int64))
        for memory in self._memories.values():
            paddle.scatter_(
                memory, numbers, memory[row : row + 1].expand([len(rows), *memory.shape[1:]])
            )

    def _taken(self, name: str) -> Tensor | None:
        if self.paged.begins:
            return None
        return paddle.index_select(self._memories[name], self.paged.rows)

    def _put(self, name: str, new: Tensor) -> None:
        if name not in self._memories:
            self._memories[name] = paddle.zeros([self._num_rows, *new.shape[1:]], new.dtype)
        paddle.scatter_(self._memories[name], self.paged.rows, new)

    @property
    def takes_token(self) -> bool:
        """Whether the rows that run next have one token each, and others before it."""
        return self.paged.num_new == 1 and not self.paged.begins

    def for_token(self) -> TokenState:
        """See `DeltaCache.for_token`."""
        return TokenState(self._memories["inputs"], self._memories["state"], self.paged.rows)


class GatedDelta(Protocol):
    """What `gated_delta_net` takes of a layer.

    Attributes:
        in_proj: gives the channels of the convolution (queries, keys, values), those of the gate of
            the output, and two numbers per value head: of the rule's share, and of its decay.
        conv1d, decay, core, norm: see the classes below.
        out_proj: of the values of all heads.
        key_dim, value_dim: C, V.
    """

    in_proj: Any
    conv1d: Any
    decay: Any
    core: Any
    norm: Any
    out_proj: Any
    key_dim: int
    value_dim: int


@operation
def gated_delta_net(
    x_TD: Tensor,
    layer: GatedDelta,
    tables: RotaryTables,
    key_bias: Any = None,
    cache: DeltaCache | DeltaPool | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """The layer's output `[T, D]`; arguments as of `attention.self_attention`."""
    length = tables.cos_TH.shape[1]
    rows_T = layer.in_proj(x_TD)
    u_BLE, z_BLF, b_BLN, a_BLN = (x.reshape([-1, length, x.shape[-1]]) for x in rows_T)
    if (real_BL1 := real_tokens(key_bias, length)) is not None:
        # As if the rows of padding were zero before the linears: the state stays zero.
        real_BL1 = real_BL1.astype(u_BLE.dtype)
        u_BLE, b_BLN, a_BLN = u_BLE * real_BL1, b_BLN * real_BL1, a_BLN * real_BL1
    y_BLE = layer.conv1d(u_BLE, cache, packed)
    heads = a_BLN.shape[-1]
    value_width = heads * layer.value_dim
    key_width = (y_BLE.shape[-1] - value_width) // 2
    q_BLKC, k_BLKC, v_BLNV = (
        x.reshape([*x.shape[:2], -1, width])
        for x, width in zip(
            split_columns(y_BLE, [key_width, key_width, value_width]),
            (layer.key_dim, layer.key_dim, layer.value_dim),
            strict=True,
        )
    )
    out_BLNV = layer.core(
        q_BLKC, k_BLKC, v_BLNV, layer.decay(a_BLN), F.sigmoid(b_BLN), cache, packed
    )
    gate = z_BLF.reshape([-1, layer.value_dim])
    normed = layer.norm(out_BLNV.reshape([-1, layer.value_dim]), gate)
    return layer.out_proj(normed.reshape([-1, value_width]))


def real_tokens(key_bias: Any, length: int) -> Tensor | None:
    """`[B, L, 1]` bool, True at the last tokens that are not padding; None if nothing is hidden.

    Args:
        key_bias: `[B, S]` as attention gets it, or what caches share.
    """
    bias_BS = key_bias.key_bias_BS if isinstance(key_bias, CachedKeys) else key_bias
    if bias_BS is None:
        return None
    return (bias_BS[:, -length:] == 0.0).unsqueeze(-1)


class CausalConvSiLU(nn.Layer):
    """`causal_conv_silu` with a kernel `[E, 1, J]`, drawn from a normal of std `init_std`."""

    def __init__(self, channels: int, taps: int, init_std: float):
        super().__init__()
        self.weight = self.create_parameter(
            [channels, 1, taps], default_initializer=Normal(std=init_std)
        )

    def forward(
        self, u_BLE: Tensor, cache: DeltaCache | None = None, packed: PackedSamples | None = None
    ) -> Tensor:
        weight_EJ = self.weight.squeeze(1)
        if cache is None:
            return causal_conv_silu(u_BLE, weight_EJ, None, packed)
        before_BJE = cache.inputs_BJE
        if before_BJE is None:
            shape = [u_BLE.shape[0], weight_EJ.shape[1] - 1, u_BLE.shape[2]]
            before_BJE = paddle.zeros(shape, u_BLE.dtype)
        cache.length += u_BLE.shape[1]
        # Copied, so that a cache does not keep the prompt's inputs alive.
        last = paddle.concat([before_BJE, u_BLE], axis=1)[:, -before_BJE.shape[1] :]
        cache.inputs_BJE = last.clone()
        return causal_conv_silu(u_BLE, weight_EJ, before_BJE)


class Decay(nn.Layer):
    """`-exp(A_log) * softplus(a + dt_bias)` per value head: the logarithm of what a token leaves of
    the state."""

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = self.create_parameter(
            [heads], dtype=precise_dtype.get(), default_initializer=LogUniform(0.01, 16.0)
        )
        self.dt_bias = self.create_parameter([heads], default_initializer=Constant(1.0))

    def forward(self, a_BLN: Tensor) -> Tensor:
        """float32 `[B, L, N]`."""
        rate_N = paddle.exp(self.A_log.astype("float32"))
        wide = a_BLN.astype("float32") + self.dt_bias.astype("float32")
        # Above the threshold softplus(x) is x in float32.
        return -rate_N * F.softplus(wide, threshold=20.0)


class DeltaRule(nn.Layer):
    """`gated_delta_rule`, whose state is in the cache during generation."""

    def forward(
        self,
        q_BLKC: Tensor,
        k_BLKC: Tensor,
        v_BLNV: Tensor,
        decay_BLN: Tensor,
        beta_BLN: Tensor,
        cache: DeltaCache | None = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        state = None if cache is None else cache.state_BNCV
        out_BLNV, state = gated_delta_rule(
            q_BLKC, k_BLKC, v_BLNV, decay_BLN, beta_BLN, state, packed, cache is not None
        )
        if cache is not None:
            cache.state_BNCV = state
        return out_BLNV


class GatedRMSNorm(nn.Layer):
    """`gated_rms_norm` over the last dim; the weight starts at one."""

    def __init__(self, size: int, epsilon: float, is_sigmoid: bool = False):
        super().__init__()
        self.epsilon, self.is_sigmoid = epsilon, is_sigmoid
        self.weight = self.create_parameter(
            [size], dtype=precise_dtype.get(), default_initializer=Constant(1.0)
        )

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.epsilon, self.is_sigmoid)


class LogUniform(Initializer):
    """The logarithm of numbers drawn uniformly between two."""

    def __init__(self, low: float, high: float):
        super().__init__()
        self.low, self.high = low, high

    def forward(self, var: Tensor, block=None) -> None:
        drawn = paddle.uniform(var.shape, "float32", self.low, self.high)
        paddle.log(drawn).astype(var.dtype)._share_underline_tensor_to(var)
