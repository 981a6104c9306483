"""The gated delta rule and its convolution with backward passes of their own, on any device.

Same products as the plain operations of `paddle_vl.nn.delta_rule`, whose letters apply. The forward
substitution gives A^-1 itself, once for both right-hand sides, so that all that remains, and all of
the backward pass, is batched products over all chunks, and three or two products per step of the
states. Kept for the backward pass are the inputs and the states before every chunk; all else is
computed again.
"""

from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import PackedSamples
from paddle_vl.nn.delta_rule import (
    Chunks,
    Reach,
    below_diagonal,
    convolved,
    hidden_later,
    inverse_lengths,
    of_value_heads,
    sequence_chunks,
    states_in_order,
)
from paddle_vl.nn.transfer import host_table


class _Terms(NamedTuple):
    """What depends on no state, of all chunks `[X, N, P, ...]`, float32.

    Attributes:
        q, k, v: queries and keys of length 1, queries times C^-0.5; values.
        beta, left, right: beta, exp(G) and exp(G_last - G) `[X, N, P, 1]`.
        below, inverse: A without its diagonal, and A^-1.
        score: Q K^T * D, zero above the diagonal.
        decay: D.
        u, w: A^-1 (beta V) and A^-1 (beta exp(G) K).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    left: Tensor
    right: Tensor
    below: Tensor
    inverse: Tensor
    score: Tensor
    decay: Tensor
    u: Tensor
    w: Tensor


def _terms(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> _Terms:
    scale, groups = q.shape[-1] ** -0.5, v.shape[2] // k.shape[2]
    q, k = q.astype("float32"), k.astype("float32")
    q = of_value_heads(q * (inverse_lengths(q) * scale), groups)
    k = of_value_heads(k * inverse_lengths(k), groups)
    v, beta = v.astype("float32"), beta.astype("float32")
    q, k, v, g, beta = (chunks.cut(x) for x in (q, k, v, decay, beta))
    total = g.astype("float64").cumsum(axis=-1).unsqueeze(-1)
    between = (total - total.transpose([0, 1, 3, 2])).astype("float32")
    decay = paddle.exp(between + hidden_later(chunks.size))
    beta, left = beta.unsqueeze(-1), paddle.exp(total.astype("float32"))
    right = paddle.exp((total[:, :, -1:] - total).astype("float32"))
    below = paddle.matmul(k * beta, k, transpose_y=True) * decay * below_diagonal(chunks.size)
    inverse = paddle.linalg.triangular_solve(
        below, _identity(chunks.size).expand(below.shape), upper=False, unitriangular=True
    )
    u, w = paddle.matmul(inverse, v * beta), paddle.matmul(inverse, k * (beta * left))
    score = paddle.matmul(q, k, transpose_y=True) * decay
    return _Terms(q, k, v, beta, left, right, below, inverse, score, decay, u, w)


@host_table
def _identity(size: int) -> np.ndarray:
    return np.eye(size, dtype=np.float32)


def _passed(
    chunks: Chunks, terms: _Terms, state: Tensor | None, keeps_state: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Outputs `[T, N, V]`, the last states, and the states before every step."""
    queries, keys = terms.q * terms.left, terms.k * terms.right
    kept = terms.left[:, :, -1:]
    shape = [chunks.active[0], terms.q.shape[1], terms.q.shape[-1], terms.v.shape[-1]]
    held: Tensor = paddle.zeros(shape, "float32") if state is None else state
    outs, ended, before, begin = [], list[Tensor](), [], 0
    for step, count in enumerate(chunks.active):
        own = slice(begin, begin + count)
        begin += count
        if held.shape[0] > count:
            ended.append(held[count:])
            held = held[:count]
        before.append(held)
        new = terms.u[own] - paddle.matmul(terms.w[own], held)
        within = paddle.matmul(terms.score[own], new)
        outs.append(paddle.matmul(queries[own], held) + within)
        if keeps_state or step + 1 < len(chunks.active):
            held = held * kept[own] + paddle.matmul(keys[own], new, transpose_x=True)
    last = None
    if keeps_state:
        last = states_in_order(chunks, [*reversed([*ended, held])])
    return chunks.join(_joined(outs)), last, before


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else paddle.concat(parts)


class _ChunkedDeltaRule(PyLayer):
    """Outputs of `gated_delta_rule` without a state before and without the last states."""

    @staticmethod
    def forward(ctx, q, k, v, decay, beta, chunks):
        out, _, before = _passed(chunks, _terms(chunks, q, k, v, decay, beta), None, False)
        ctx.chunks = chunks
        ctx.needed = [not x.stop_gradient for x in (q, k, v, decay, beta)]
        ctx.save_for_backward(q, k, v, decay, beta, _joined(before))
        return out.reshape(v.shape).astype(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, decay, beta, before = ctx.saved_tensor()
        chunks: Chunks = ctx.chunks
        terms = _terms(chunks, q, k, v, decay, beta)
        d_out = chunks.cut(grad.astype("float32"))
        queries, keys = terms.q * terms.left, terms.k * terms.right
        kept = terms.left[:, :, -1:]
        new = terms.u - paddle.matmul(terms.w, before)
        # Backwards through the states: gradients of those behind every step, and of `new`.
        d_new = paddle.matmul(terms.score, d_out, transpose_x=True)
        d_state_of_out = paddle.matmul(queries, d_out, transpose_x=True)
        d_news, d_afters, d_state, end = [], [], None, d_new.shape[0]
        for count in reversed(chunks.active):
            own = slice(end - count, end)
            end -= count
            d_after = d_state
            if d_after is None:
                d_after = paddle.zeros_like(before[own])
            elif d_after.shape[0] < count:
                # Of sequences that end here no state is used behind.
                d_after = paddle.concat(
                    [d_after, paddle.zeros_like(before[own])[d_after.shape[0] :]]
                )
            d_own = d_new[own] + paddle.matmul(keys[own], d_after)
            d_state = d_state_of_out[own] + d_after * kept[own]
            d_state = d_state - paddle.matmul(terms.w[own], d_own, transpose_x=True)
            d_news.append(d_own)
            d_afters.append(d_after)
        d_new, d_after = _joined(d_news[::-1]), _joined(d_afters[::-1])
        # N = U - W M; U and W solve A with right-hand sides of their own.
        d_w = -paddle.matmul(d_new, before, transpose_y=True)
        d_u, d_w = (paddle.matmul(terms.inverse, x, transpose_x=True) for x in (d_new, d_w))
        d_below = -paddle.matmul(d_u, terms.u, transpose_y=True)
        d_below = d_below - paddle.matmul(d_w, terms.w, transpose_y=True)
        d_below = d_below * below_diagonal(chunks.size)
        d_score = paddle.matmul(d_out, new, transpose_y=True)
        # Through D: of its exponents G_i - G_j. In float64, since terms of later tokens cancel.
        d_between = (d_below * terms.below + d_score * terms.score).astype("float64")
        d_total = d_between.sum(axis=-1, keepdim=True)
        d_total = d_total - d_between.sum(axis=-2, keepdim=True).transpose([0, 1, 3, 2])
        d_below, d_score = d_below * terms.decay, d_score * terms.decay
        weighted = terms.k * terms.beta
        d_weighted = paddle.matmul(d_below, terms.k) + d_w * terms.left
        d_k = paddle.matmul(d_below, weighted, transpose_x=True)
        d_k = d_k + paddle.matmul(d_score, terms.q, transpose_x=True) + d_weighted * terms.beta
        d_beta = _row_sum(d_weighted * terms.k) + _row_sum(d_u * terms.v)
        d_queries = paddle.matmul(d_out, before, transpose_y=True)
        d_q = paddle.matmul(d_score, terms.k) + d_queries * terms.left
        d_keys = paddle.matmul(new, d_after, transpose_y=True)
        d_k = d_k + d_keys * terms.right
        towards_last = _row_sum(d_keys * keys).astype("float64")
        towards_all = _row_sum(d_w * weighted) * terms.left + _row_sum(d_queries * queries)
        d_total = d_total + towards_all.astype("float64") - towards_last
        d_last = (before * d_after).sum(axis=[-2, -1], keepdim=True) * kept
        d_last = d_last.astype("float64") + towards_last.sum(axis=-2, keepdim=True)
        # g_j is in G_j and all later ones; G_last is the sum of all.
        d_total = d_total.squeeze(-1)
        d_g = d_total.flip([-1]).cumsum(axis=-1).flip([-1]) + d_last.squeeze(-1)
        d_q = _of_rows(q, _of_key_heads(chunks.join(d_q), q) * q.shape[-1] ** -0.5)
        d_k = _of_rows(k, _of_key_heads(chunks.join(d_k), k))
        d_v = chunks.join(d_u * terms.beta).reshape(v.shape).astype(v.dtype)
        d_g = chunks.join(d_g.unsqueeze(-1)).reshape(decay.shape).astype(decay.dtype)
        d_beta = chunks.join(d_beta).reshape(beta.shape).astype(beta.dtype)
        found = zip((d_q, d_k, d_v, d_g, d_beta), ctx.needed, strict=True)
        return tuple(d if needed else None for d, needed in found)


def _row_sum(x: Tensor) -> Tensor:
    return x.sum(axis=-1, keepdim=True)


def _of_key_heads(d_TNC: Tensor, x_BLKC: Tensor) -> Tensor:
    """Sums over the value heads of every key head, in the shape of `x`."""
    heads, width = x_BLKC.shape[2:]
    groups = d_TNC.shape[1] // heads
    if groups > 1:
        d_TNC = d_TNC.reshape([-1, heads, groups, width]).sum(axis=2)
    return d_TNC.reshape(x_BLKC.shape)


def _of_rows(x: Tensor, d_unit: Tensor) -> Tensor:
    """The gradient of `x` from that of its rows at length 1."""
    wide = x.astype("float32")
    inverse = inverse_lengths(wide)
    unit = wide * inverse
    return (inverse * (d_unit - unit * _row_sum(unit * d_unit))).astype(x.dtype)


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
    """See `paddle_vl.nn.delta_rule.gated_delta_rule`."""
    inputs = (q_BLKC, k_BLKC, v_BLNV, decay_BLN, beta_BLN)
    chunks = sequence_chunks(q_BLKC.shape[0], q_BLKC.shape[1], packed)
    if not keeps_state:
        return _ChunkedDeltaRule.apply(*inputs, chunks), None
    with paddle.no_grad():
        out_TNV, last, _ = _passed(chunks, _terms(chunks, *inputs), state_BNCV, True)
    return out_TNV.reshape(v_BLNV.shape).astype(v_BLNV.dtype), last


def fits_rule(
    q_BLKC: Tensor,
    k_BLKC: Tensor,
    v_BLNV: Tensor,
    decay_BLN: Tensor,
    beta_BLN: Tensor,
    state_BNCV: Tensor | None = None,
    packed: PackedSamples | None = None,
    keeps_state: bool = False,
) -> bool:
    """More than a token; a state before, or asked for, only where nothing is differentiated."""
    if q_BLKC.shape[1] == 1 and packed is None:
        return False
    if not keeps_state and state_BNCV is None:
        return True
    inputs = (q_BLKC, k_BLKC, v_BLNV, decay_BLN, beta_BLN, state_BNCV)
    is_used = any(x is not None and not x.stop_gradient for x in inputs)
    return keeps_state and not (paddle.is_grad_enabled() and is_used)


class _CausalConvSiLU(PyLayer):
    """`causal_conv_silu` without tokens before the first; keeps the inputs alone."""

    @staticmethod
    def forward(ctx, u, weight, packed):
        ctx.packed = packed
        ctx.needed = [not x.stop_gradient for x in (u, weight)]
        ctx.save_for_backward(u, weight)
        return F.silu(convolved(u, weight, None, packed).astype(u.dtype))

    @staticmethod
    def backward(ctx, grad):
        u, weight = ctx.saved_tensor()
        packed: PackedSamples | None = ctx.packed
        batch, length, width = u.shape
        taps = weight.shape[1]
        y = convolved(u, weight, None, packed).astype(u.dtype).astype("float32")
        gate = F.sigmoid(y)
        d_y = grad.astype("float32") * gate * (1.0 + y * (1.0 - gate))
        weight_JE = weight.astype("float32").t()
        zeros = paddle.zeros([batch, taps - 1, width], "float32")
        earlier = paddle.concat([zeros, u.astype("float32")], axis=1)
        later = paddle.concat([d_y, zeros], axis=1)
        # Sums over token rows as products, which are fast on every device.
        ones = paddle.ones([1, batch * length], "float32")
        d_u, d_weights = d_y * weight_JE[taps - 1], []
        for back in range(taps):
            tap, own = taps - 1 - back, d_y
            if back and packed is not None:
                own = d_y * packed.once(Reach).mask(back, batch)
                later = paddle.concat([own, zeros], axis=1)
            if back:
                # What a token gave to the one so many places later.
                d_u = d_u + later[:, back : back + length] * weight_JE[tap]
            seen = (own * earlier[:, tap : tap + length]).reshape([-1, width])
            d_weights.append(paddle.matmul(ones, seen))
        d_weight = paddle.concat(d_weights[::-1]).t().astype(weight.dtype)
        found = zip((d_u.astype(u.dtype), d_weight), ctx.needed, strict=True)
        return tuple(d if needed else None for d, needed in found)


def causal_conv_silu(
    u_BLE: Tensor,
    weight_EJ: Tensor,
    before_BJE: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """See `paddle_vl.nn.delta_rule.causal_conv_silu`."""
    return _CausalConvSiLU.apply(u_BLE, weight_EJ, packed)


def fits_convolution(
    u_BLE: Tensor,
    weight_EJ: Tensor,
    before_BJE: Tensor | None = None,
    packed: Any = None,
) -> bool:
    """Without tokens before the first, as in training, and more tokens than taps."""
    return before_BJE is None and u_BLE.shape[1] >= weight_EJ.shape[1]
