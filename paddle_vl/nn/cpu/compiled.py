"""Operations on the CPU by compiled kernels (`kernels.c`), where a C compiler is found.

`enable` compiles and loads them and compares each with the plain operation. They take contiguous
float32 tensors.

Shapes: as in `paddle_vl.nn.attention`; N rows, C channels.
"""

import ctypes
import logging
import math
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import (
    CachedKeys,
    PackedSamples,
    PagedKeys,
    RotaryTables,
    SelfAttention,
    with_averages,
)
from paddle_vl.nn.attention_masks import AttentionMask
from paddle_vl.nn.cpu.attention import sees
from paddle_vl.nn.cpu.kernels import (
    MIXING_DRAWS,
    contiguous,
    dropout_seed,
    dropout_threshold,
    empty,
    has_graph,
    is_dense,
    library,
    num_threads,
    run,
    set_library,
)
from paddle_vl.nn.delta_rule import CHUNK, GatedDelta, Reach
from paddle_vl.nn.dispatch import has_compiled, set_compiled
from paddle_vl.nn.experts import Experts, RoutedRows
from paddle_vl.nn.linear import FusedLinear, Linear

SWITCH = "PADDLE_VL_CPU_KERNELS"
_OFF = ("0", "off", "false", "no")
_BLOCK, _MOST_TAPS = 128, 8
_MOST_KEYS, _MOST_WIDTH = 1 << 16, 1024
# Added to no score: replaces those of hidden keys. The lowest finite score of `paddle_vl.nn`.
_HIDDEN = -2.3819763e38
_log = logging.getLogger(__name__)
_refused: str | None = None


def enable() -> bool:
    """Let operations use the compiled kernels from now on, in the whole process.

    Returns:
        Whether they may. Why not is logged once: the environment variable `PADDLE_VL_CPU_KERNELS`
        is 0, there is no compiler, or a kernel differs from the plain operation.
    """
    global _refused
    if has_compiled():
        return True
    if os.environ.get(SWITCH, "").lower() in _OFF or _refused is not None:
        return False
    from paddle_vl.nn.cpu import compiler, kernel_check

    try:
        is_new = load()
        set_compiled(True)
        if is_new and (wrong := kernel_check.differences()):
            raise compiler.CompilerError(f"they differ from the plain operations: {wrong}")
    except compiler.CompilerError as error:
        disable()
        _refused = str(error)
        _log.info("compiled CPU kernels are not used: %s", _refused)
        return False
    return True


def load() -> bool:
    """Compile and load the library, once: whether it was not there yet.

    Raises:
        CompilerError: see `compiler.load_kernels`.
    """
    if library() is not None:
        return False
    from paddle_vl.nn.cpu import compiler

    loaded = compiler.load_kernels()
    source = "".join(file.read_text(encoding="utf-8") for file in compiler.SOURCES)
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\) \{", source, re.MULTILINE):
        given = [one.split() for one in arguments.split(",")]
        getattr(loaded, name).argtypes = [
            _Data if "*" in "".join(one) else _TYPES[one[0]] for one in given
        ]
    set_library(loaded)
    return True


def disable() -> None:
    """Take the other kernels again."""
    set_compiled(False)


def refusal() -> str | None:
    """Why `enable` did not let them; None if it did or was not called."""
    return _refused


class _Data:
    """A pointer argument: the data of a tensor or an array, an address, or NULL for None."""

    @classmethod
    def from_param(cls, x: Any) -> ctypes.c_void_p:
        if isinstance(x, np.ndarray):
            return ctypes.c_void_p(x.ctypes.data)
        return ctypes.c_void_p(x if x is None or isinstance(x, int) else x.data_ptr())


_TYPES = {"i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float,
          "uint64_t": ctypes.c_uint64}  # fmt: skip


def _size(x: Tensor) -> int:
    # Faster than `x.size`.
    return math.prod(x.shape)


# Activations


class _TanhGelu(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = empty(x.shape)
        library().gelu_tanh_forward(x, y, _size(x))
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensor()
        grad, grad_x = contiguous(grad), empty(x.shape)
        library().gelu_tanh_backward(x, grad, grad_x, _size(x))
        return grad_x


def is_tanh_gelu(x: Tensor, approximate: bool = False) -> bool:
    """Whether `gelu` takes these; oneDNN's form with the error function is as fast."""
    return approximate and is_dense(x)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """`operations.gelu` in its tanh form."""
    return run(_TanhGelu, x)


class _Gated(PyLayer):
    """A gated unit of two tensors, or of the halves of one tensor's rows."""

    @staticmethod
    def forward(ctx, *tensors, is_gelu):
        ctx.save_for_backward(*tensors)
        ctx.needs, ctx.is_gelu = [not x.stop_gradient for x in tensors], is_gelu
        stride = tensors[0].shape[-1]
        columns = stride * len(tensors) // 2
        y = empty([*tensors[0].shape[:-1], columns])
        library().gated_forward(
            *_gate_and_up(tensors), y, _size(tensors[0]) // stride, columns, stride, is_gelu
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensor()
        grad, grads = contiguous(grad), [empty(x.shape) for x in tensors]
        stride = tensors[0].shape[-1]
        library().gated_backward(
            *_gate_and_up(tensors),
            grad,
            *_gate_and_up(grads),
            _size(tensors[0]) // stride,
            grad.shape[-1],
            stride,
            ctx.is_gelu,
        )
        found = tuple(x if need else None for x, need in zip(grads, ctx.needs, strict=True))
        return found[0] if len(found) == 1 else found


def _gate_and_up(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | int]:
    if len(tensors) == 2:
        return tensors[0], tensors[1]
    second_half = tensors[0].data_ptr() + 4 * (tensors[0].shape[-1] // 2)
    return tensors[0], second_half


def fits_gate(gate: Tensor, up: Tensor | None = None) -> bool:
    """Whether `swiglu` and `geglu` take these."""
    return (up is None or up.shape == gate.shape) and is_dense(gate, up)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.swiglu`."""
    return run(_Gated, *([gate] if up is None else [gate, up]), is_gelu=False)


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.geglu`."""
    return run(_Gated, *([gate] if up is None else [gate, up]), is_gelu=True)


# Dropout


class _Dropout(PyLayer):
    """Keeps one byte per entry."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.kept, ctx.factor = np.empty(_size(x), dtype=np.uint8), 1.0 / (1.0 - p)
        y, (first, rest), seed = empty(x.shape), dropout_threshold(p), dropout_seed()
        library().dropout_forward(
            x, y, ctx.kept, _size(x), *seed, MIXING_DRAWS, first, rest, ctx.factor
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        grad, grad_x = contiguous(grad), empty(grad.shape)
        library().dropout_backward(grad, ctx.kept, grad_x, _size(grad), ctx.factor)
        return grad_x


def dropout(x: Tensor, p: float) -> Tensor:
    """`operations.dropout`; draws the same numbers as `kernels.dropout`."""
    return _Dropout.apply(x, p)


# Rotary embedding


class _Rotary(PyLayer):
    @staticmethod
    def forward(ctx, x, tables):
        ctx.tables = tables
        return _rotated(x, tables, 1.0)

    @staticmethod
    def backward(ctx, grad):
        return _rotated(contiguous(grad), ctx.tables, -1.0)


def _rotated(x: Tensor, tables: RotaryTables, direction: float) -> Tensor:
    y = empty(x.shape)
    heads, width = x.shape[-2:]
    library().rotate(
        x, y, tables.cos_TH, tables.sin_TH, _size(x) // (heads * width), heads, width, direction
    )
    return y


def fits_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> bool:
    """Whether `apply_rotary` takes these: the tables have the inputs' leading dims."""
    shape = tables.cos_TH.shape
    is_same = all([*x.shape[:-2], x.shape[-1]] == shape for x in (q_TNH, k_TKH))
    return is_same and is_dense(q_TNH, k_TKH, *tables)


def apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """`attention.apply_rotary`."""
    return run(_Rotary, q_TNH, tables), run(_Rotary, k_TKH, tables)


def fits_normed_rotary(
    q_TNH: Tensor,
    k_TKH: Tensor,
    tables: RotaryTables,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    *settings: float,
) -> bool:
    """Whether `normed_rotary` takes these: without gradients, tables with the leading dims."""
    given = (q_TNH, k_TKH, q_weight_H, k_weight_H)
    if paddle.is_grad_enabled() and not all(x.stop_gradient for x in given):
        return False
    is_same = all(x.shape[:-2] == tables.cos_TH.shape[:-1] for x in given[:2])
    return is_same and is_dense(*given, *tables)


def normed_rotary(
    q_TNH: Tensor,
    k_TKH: Tensor,
    tables: RotaryTables,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    epsilon: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """`nn.attention.normed_rotary`."""
    made = []
    for x, weight in ((q_TNH, q_weight_H), (k_TKH, k_weight_H)):
        made.append(y := empty(x.shape))
        heads, width = x.shape[-2:]
        library().normed_rotary(
            x,
            weight,
            y,
            *tables,
            *(_size(x) // (heads * width), heads, width, heads * width, width),
            tables.cos_TH.shape[-1],
            epsilon,
            offset,
        )
    return made[0], made[1]


# Norms


class _Norm(PyLayer):
    """Keeps the input and two numbers per row.

    Args:
        offset: added to the weight. `centres`: subtracts the mean.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon, offset, centres):
        channels = x.shape[-1]
        rows = _size(x) // channels
        y = empty(x.shape)
        statistics = empty([rows, 2]) if has_graph(ctx) else None
        library().norm_forward(
            x, weight, bias, y, statistics, rows, channels, epsilon, offset, centres
        )
        ctx.save_for_backward(x, statistics)
        ctx.weight, ctx.settings = weight, (offset, centres)
        ctx.needs = [not t.stop_gradient for t in (x, weight, bias) if t is not None]
        return y

    @staticmethod
    def backward(ctx, grad):
        x, statistics = ctx.saved_tensor()
        (offset, centres), weight, channels = ctx.settings, ctx.weight, x.shape[-1]
        grad, grad_x = contiguous(grad), empty(x.shape)
        vectors = [empty([channels]) for _ in ctx.needs[1:]]
        sums = empty([num_threads() * 2 * channels])
        library().norm_backward(
            x,
            weight,
            grad,
            statistics,
            grad_x,
            *(*vectors, None, None)[:2],
            sums,
            _size(x) // channels,
            channels,
            offset,
            centres,
        )
        found = [g if need else None for g, need in zip((grad_x, *vectors), ctx.needs, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)


def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_norm`."""
    return run(_Norm, x, weight_C, None, epsilon, 0.0, 0)


def gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.gemma_rms_norm`."""
    return run(_Norm, x, weight_C, None, epsilon, 1.0, 0)


def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_quotient`."""
    return run(_Norm, x, None, None, epsilon, 0.0, 0)


def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`operations.layer_norm`."""
    return run(_Norm, x, weight_C, bias_C, epsilon, 0.0, 1)


# Gated DeltaNet; shapes as in `paddle_vl.nn.delta_rule`


class _GatedNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, gate, weight, epsilon, is_sigmoid):
        channels = x.shape[-1]
        rows = _size(x) // channels
        y, inverses = empty(x.shape), empty([rows])
        library().gated_norm_forward(
            x, gate, weight, y, inverses, rows, channels, epsilon, is_sigmoid
        )
        ctx.save_for_backward(x, gate, weight, inverses)
        ctx.is_sigmoid = is_sigmoid
        ctx.needs = [not t.stop_gradient for t in (x, gate, weight)]
        return y

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight, inverses = ctx.saved_tensor()
        channels = x.shape[-1]
        grads = [empty(t.shape) for t in (x, gate, weight)]
        sums = empty([num_threads() * channels])
        library().gated_norm_backward(
            x,
            gate,
            weight,
            contiguous(grad),
            inverses,
            *grads,
            sums,
            _size(x) // channels,
            channels,
            ctx.is_sigmoid,
        )
        return tuple(g if need else None for g, need in zip(grads, ctx.needs, strict=True))


def fits_gated_norm(x: Tensor, gate: Tensor, weight_C: Tensor, *settings: float) -> bool:
    """Whether `gated_rms_norm` takes these."""
    return is_dense(x, gate, weight_C)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight_C: Tensor, epsilon: float, is_sigmoid: bool = False
) -> Tensor:
    """`delta_rule.gated_rms_norm`."""
    return run(_GatedNorm, x, gate, weight_C, epsilon, is_sigmoid)


class _Convolution(PyLayer):
    """Keeps the inputs alone."""

    @staticmethod
    def forward(ctx, u, weight, before, packed):
        y, weight_JE = empty(u.shape), weight.t().contiguous()
        places = None if packed is None else packed.once(_places)
        ctx.sizes = (*u.shape, weight.shape[1])
        library().convolution_forward(u, before, weight_JE, places, y, *ctx.sizes)
        ctx.save_for_backward(u, weight_JE, *([] if before is None else [before]))
        given = (u, weight) if before is None else (u, weight, before)
        ctx.needs, ctx.places = [not t.stop_gradient for t in given], places
        return y

    @staticmethod
    def backward(ctx, grad):
        u, weight_JE, *others = ctx.saved_tensor()
        before = others[0] if others else None
        grads = [empty(t.shape) for t in (u, weight_JE, *others)]
        library().convolution_backward(
            u,
            before,
            weight_JE,
            ctx.places,
            contiguous(grad),
            grads[0],
            grads[2] if others else None,
            grads[1],
            *ctx.sizes,
        )
        grads[1] = grads[1].t()
        return tuple(g if need else None for g, need in zip(grads, ctx.needs, strict=True))


def _places(offsets: tuple[int, ...]) -> np.ndarray:
    """The place of every token row in its sample, for `PackedSamples.once`."""
    return Reach(offsets).place_T.astype(np.int32)


def fits_convolution(
    u_BLE: Tensor, weight_EJ: Tensor, before_BJE: Tensor | None = None, packed: Any = None
) -> bool:
    """Whether `causal_conv_silu` takes these: the kernel has room for eight taps."""
    return weight_EJ.shape[1] <= _MOST_TAPS and is_dense(u_BLE, weight_EJ, before_BJE)


def causal_conv_silu(
    u_BLE: Tensor,
    weight_EJ: Tensor,
    before_BJE: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """`delta_rule.causal_conv_silu`."""
    return _Convolution.apply(u_BLE, weight_EJ, before_BJE, packed)


class _DeltaRule(PyLayer):
    """Keeps the inputs and the states before every chunk."""

    @staticmethod
    def forward(ctx, q, k, v, decay, beta, sequences):
        inputs = (q, k, v, decay, beta)
        num_chunks = int((-(-np.diff(sequences) // CHUNK)).sum())
        ctx.needs = [not x.stop_gradient for x in inputs]
        kept = None
        if any(ctx.needs):
            kept = empty([num_chunks, v.shape[2], q.shape[3], v.shape[3]])
        out, _ = _delta_forward(inputs, None, sequences, None, kept)
        ctx.save_for_backward(*inputs, kept)
        ctx.sequences = sequences
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, kept = ctx.saved_tensor()
        grads = [empty(x.shape) for x in inputs]
        sizes = _delta_sizes(inputs[0], inputs[1], inputs[2], ctx.sequences)
        room = _delta_room(*sizes[-2:])
        library().delta_backward(
            *inputs, kept, ctx.sequences, contiguous(grad), *grads, *sizes, room, room.shape[1]
        )
        return tuple(g if need else None for g, need in zip(grads, ctx.needs, strict=True))


def _delta_forward(
    inputs: Sequence[Tensor],
    state: Tensor | None,
    sequences: np.ndarray,
    after: Tensor | None,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    q, k, v, *_ = inputs
    sizes, out = _delta_sizes(q, k, v, sequences), empty(v.shape)
    room = _delta_room(*sizes[-2:])
    library().delta_forward(
        *inputs, state, sequences, out, after, kept, *sizes, room, room.shape[1]
    )
    return out, after


def _delta_sizes(q: Tensor, k: Tensor, v: Tensor, sequences: np.ndarray) -> tuple[int, ...]:
    return (len(sequences) - 1, k.shape[2], *v.shape[2:3], q.shape[3], v.shape[3])


def _delta_room(width: int, values: int) -> Tensor:
    """Per thread a `Chunk` of kernels.c, the gradients of one, and a state."""
    size = CHUNK * (5 * width + 6 * values + 8 * CHUNK + 5) + width * values
    return empty([num_threads(), size])


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
    """Whether `gated_delta_rule` takes these: a state before, or asked for, only where nothing is
    differentiated."""
    given = (q_BLKC, k_BLKC, v_BLNV, decay_BLN, beta_BLN, state_BNCV)
    inputs = [x for x in given if x is not None]
    if max(v_BLNV.shape[-1], q_BLKC.shape[-1]) > _MOST_WIDTH or not is_dense(*inputs):
        return False
    is_used = paddle.is_grad_enabled() and not all(x.stop_gradient for x in inputs)
    return not is_used or (state_BNCV is None and not keeps_state)


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
    """`delta_rule.gated_delta_rule`."""
    inputs = (q_BLKC, k_BLKC, v_BLNV, decay_BLN, beta_BLN)
    batch, length, key_heads, width = q_BLKC.shape
    heads, values = v_BLNV.shape[2:]
    if packed is None:
        sequences = np.arange(0, batch * length + 1, length, dtype=np.int64)
    else:
        sequences = np.array(packed.offsets, dtype=np.int64)
    if not keeps_state and state_BNCV is None:
        return _DeltaRule.apply(*inputs, sequences), None
    after = empty([len(sequences) - 1, heads, width, values])
    if length > 1 or packed is not None:
        return _delta_forward(inputs, state_BNCV, sequences, after, None)
    out, sizes = empty(v_BLNV.shape), (batch, key_heads, heads, width, values)
    library().delta_token(*inputs, state_BNCV, after, out, *sizes)
    return out, after


# Attention


class _Attention(PyLayer):
    """Attention within segments, see `attention_forward` in kernels.c.

    Keeps the largest score and the sum of exponentials of every row and head, and computes the
    probabilities again in backward.
    """

    @staticmethod
    def forward(ctx, q, k, v, segments, scale, causal, key_bias, seen):
        rows, heads, width = _size(q) // (q.shape[-2] * q.shape[-1]), *q.shape[-2:]
        out, statistics = empty(q.shape), empty([rows, heads, 2])
        longest = int(segments[:, 3].max())
        ctx.sizes = (
            segments,
            len(segments),
            heads,
            k.shape[-2],
            width,
            scale,
            causal,
            key_bias,
            seen and seen.visible,
            seen and seen.ends,
            seen.visible.shape[-1] if seen else 0,
            _HIDDEN,
        )
        ctx.room, ctx.kept = _BLOCK * longest, (segments, key_bias, seen)
        ctx.needs = [not x.stop_gradient for x in (q, k, v)]
        room = empty([num_threads() * ctx.room])
        library().attention_forward(q, k, v, out, statistics, *ctx.sizes, room, ctx.room)
        # Detached: kept itself, an output without a backward pass would never be freed.
        ctx.save_for_backward(q, k, v, out.detach(), statistics)
        return out

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.saved_tensor()
        grads = [empty(x.shape) for x in kept[:3]]
        room, grad = empty([2 * num_threads() * ctx.room]), contiguous(grad)
        library().attention_backward(*kept, grad, *grads, *ctx.sizes, room, ctx.room)
        return tuple(x if need else None for x, need in zip(grads, ctx.needs, strict=True))


@lru_cache(maxsize=64)
def equal_segments(count: int, queries: int, keys: int) -> np.ndarray:
    """First query row, query rows, first key row and key rows of `count` equal segments."""
    number = np.arange(count, dtype=np.int64)
    sizes = np.full(count, queries), np.full(count, keys)
    columns = (number * queries, sizes[0], number * keys, sizes[1])
    return np.ascontiguousarray(np.stack(columns, axis=1).astype(np.int64))


@lru_cache(maxsize=16)
def packed_segments(offsets: tuple[int, ...]) -> np.ndarray:
    """The same of consecutive segments that see themselves; empty ones are left out."""
    begin = np.array(offsets[:-1], dtype=np.int64)
    length = np.diff(np.array(offsets, dtype=np.int64))
    rows = np.stack([begin, length, begin, length], axis=1)
    return np.ascontiguousarray(rows[length > 0])


def fits_causal(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *others: Any) -> bool:
    """Whether `causal_attention` takes these. One query multiplies vectors, for which a block is
    too large."""
    fits = 1 < q_BLNH.shape[1] <= k_BSKH.shape[1] and is_dense(*others)
    return fits and fits_masked(q_BLNH, k_BSKH, v_BSKH)


def causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """`nn.attention.causal_attention`."""
    if packed is None:
        segments = equal_segments(*q_BLNH.shape[:2], k_BSKH.shape[1])
    else:
        segments = packed_segments(packed.offsets)
    scale = q_BLNH.shape[-1] ** -0.5
    return _Attention.apply(q_BLNH, k_BSKH, v_BSKH, segments, scale, 1, key_bias_BS, None)


def fits_segments(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int) -> bool:
    """Whether `equal_segments_attention` takes these; it copies views."""
    is_float32 = q_PNH.dtype == k_PNH.dtype == v_PNH.dtype == paddle.float32
    is_within = length <= _MOST_KEYS and q_PNH.shape[-1] <= _MOST_WIDTH
    return is_float32 and is_within and 0 not in q_PNH.shape


def equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    """`nn.attention.equal_segments_attention`."""
    q, k, v = map(contiguous, (q_PNH, k_PNH, v_PNH))
    segments = equal_segments(count, length, length)
    return _Attention.apply(q, k, v, segments, q.shape[-1] ** -0.5, 0, None, None)


def fits_masked(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *others: Any) -> bool:
    """Whether `masked_attention` takes these."""
    is_within = k_BSKH.shape[1] <= _MOST_KEYS and q_BLNH.shape[-1] <= _MOST_WIDTH
    is_grouped = q_BLNH.shape[-2] % k_BSKH.shape[-2] == 0
    return is_within and is_grouped and is_dense(q_BLNH, k_BSKH, v_BSKH)


def masked_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str = "eager",
) -> Tensor:
    """`nn.attention.masked_attention`. The kernel gives zero for a query without a key."""
    segments, seen = equal_segments(*q_BLNH.shape[:2], k_BSKH.shape[1]), sees(mask)
    out_BLNH = _Attention.apply(q_BLNH, k_BSKH, v_BSKH, segments, scale, 0, None, seen)
    if seen.all_see or implementation == "sdpa":
        return out_BLNH
    return with_averages(out_BLNH, v_BSKH, mask)


def _is_answer(*tensors: Tensor) -> bool:
    """Whether nothing is differentiated, and the kernels take these."""
    return all(x.stop_gradient for x in tensors) and is_dense(*tensors)


def fits_paged(q_RNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, paged: PagedKeys) -> bool:
    """Whether `paged_attention` takes these: without gradients."""
    return _is_answer(q_RNH, key_MKH, value_MKH)


def paged_attention(q_RNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, paged: PagedKeys) -> Tensor:
    """`nn.attention.paged_attention`, which reads the keys where they lie."""
    key_heads, width = key_MKH.shape[1:]
    strides = (0, width, key_heads * width)
    return _token_attention(
        (q_RNH, None, None, key_MKH, value_MKH, paged.places, paged.offsets, None),
        key_heads,
        strides,
        paged.length,
    )


def fits_appended(
    q_B1NH: Tensor,
    key_B1KH: Tensor,
    value_B1KH: Tensor,
    key_BKCH: Tensor,
    value_BKCH: Tensor,
    cached: CachedKeys,
) -> bool:
    """Whether `appended_attention` takes these: without gradients."""
    return _is_answer(q_B1NH, key_B1KH, value_B1KH, key_BKCH, value_BKCH)


def appended_attention(
    q_B1NH: Tensor,
    key_B1KH: Tensor,
    value_B1KH: Tensor,
    key_BKCH: Tensor,
    value_BKCH: Tensor,
    cached: CachedKeys,
) -> Tensor:
    """`nn.attention.appended_attention`."""
    _, key_heads, capacity, width = key_BKCH.shape
    strides = (key_heads * capacity * width, capacity * width, width)
    bias_BS = None if cached.key_bias_BS is None else contiguous(cached.key_bias_BS)
    return _token_attention(
        (q_B1NH, key_B1KH, value_B1KH, key_BKCH, value_BKCH, None, None, bias_BS),
        key_heads,
        strides,
        cached.length,
    )


def _token_attention(
    tensors: Sequence[Tensor | None], key_heads: int, strides: Sequence[int], longest: int
) -> Tensor:
    """`token_attention` of kernels.c: its tensors up to the result, and its strides."""
    query: Any = tensors[0]
    heads, width = query.shape[-2:]
    out, room_size = empty(query.shape), heads * longest
    room = empty([num_threads() * room_size])
    library().token_attention(
        *tensors,
        out,
        *(query.shape[0], heads, key_heads, width, *strides, longest),
        *(width**-0.5, room, room_size),
    )
    return out


# Parts of a decoder layer for one token of each row of an answer, each in one call: calls of its
# many small operations would take longer than their work. For layers of one device without adapters


def _is_product(layer: Any) -> bool:
    """Whether a linear is the product with a weight and nothing else: no bias, no adapter; and
    nothing is differentiated."""
    if type(layer) is Linear:
        if layer.bias is not None or layer.lora is not None:
            return False
    elif type(layer) is not FusedLinear:
        return False
    weight = layer.weight
    is_constant = not paddle.is_grad_enabled() or weight.stop_gradient
    return getattr(weight, "product", None) is None and is_constant and is_dense(weight)


def fits_mlp(x_TD: Tensor, gate_up_proj: Any, down_proj: Any) -> bool:
    """Whether `swiglu_mlp` takes these: of a layer that answers, not of one that is recomputed."""
    return (
        not down_proj.training
        and is_dense(x_TD)
        and _is_product(gate_up_proj)
        and _is_product(down_proj)
    )


def swiglu_mlp(x_TD: Tensor, gate_up_proj: Any, down_proj: Any) -> Tensor:
    """`operations.swiglu_mlp`."""
    gate_up, down = gate_up_proj.weight, down_proj.weight
    (rows, width), (inner, _) = x_TD.shape, down.shape
    y_TD, room = empty(x_TD.shape), empty([rows * 3 * inner])
    library().token_mlp(x_TD, gate_up, down, y_TD, rows, width, inner, room)
    return y_TD


def fits_experts(
    x_RD: Tensor, indices_RK: Tensor, weights_RK: Tensor, experts: Experts, rows: RoutedRows
) -> bool:
    """Whether `routed_experts` takes these: of a layer that answers, with all experts here."""
    matrices = experts.gate_up_proj, experts.down_proj
    if experts.training or experts.exchange is not None or indices_RK.shape[0] == 0:
        return False
    is_constant = not paddle.is_grad_enabled() or all(x.stop_gradient for x in matrices)
    return is_constant and is_dense(x_RD, weights_RK, *matrices)


def routed_experts(
    x_RD: Tensor, indices_RK: Tensor, weights_RK: Tensor, experts: Experts, rows: RoutedRows
) -> Tensor:
    """`experts.routed_experts`."""
    (num_rows, copies), (num_experts, inner, width) = indices_RK.shape, experts.down_proj.shape
    total, counts_E = num_rows * copies, paddle.zeros([num_experts], dtype="int64")
    y_RD, room = empty(x_RD.shape), empty([total * (2 * width + 3 * inner)])
    library().token_experts(
        *(x_RD, contiguous(indices_RK), weights_RK, experts.gate_up_proj, experts.down_proj, y_RD),
        *(counts_E, num_rows, copies, num_experts, width, inner),
        *(room, np.empty(total + num_experts + 1, dtype=np.int64)),
    )
    experts.keep_counts(counts_E, rows)
    return y_RD


def fits_attention(
    x_TD: Tensor,
    layer: SelfAttention,
    tables: RotaryTables,
    cached: Any = None,
    cache: Any = None,
    packed: Any = None,
) -> bool:
    """Whether `self_attention` takes these: one token of each row, behind those in a cache."""
    if tables.cos_TH.shape[1] != 1 or not getattr(cache, "takes_token", False):
        return False
    if layer.biases or layer.q_norm is None:
        return False
    norms = layer.q_norm.weight, layer.k_norm.weight
    are_products = _is_product(layer.qkv_proj) and _is_product(layer.o_proj)
    return are_products and is_dense(x_TD, *tables, *norms)


def self_attention(
    x_RD: Tensor,
    layer: SelfAttention,
    tables: RotaryTables,
    cached: Any,
    cache: Any,
    packed: Any = None,
) -> Tensor:
    """`nn.attention.self_attention`."""
    key, value, strides, keys = cache.for_token(cached)
    qkv, projection, norm = layer.qkv_proj.weight, layer.o_proj.weight, layer.q_norm
    width, (query_width, channels) = layer.head_dim, projection.shape
    rows, outputs, heads = x_RD.shape[0], qkv.shape[1], query_width // width
    key_width = (outputs - query_width * (2 if layer.is_gated else 1)) // 2
    places = (keys.places, keys.offsets) if isinstance(keys, PagedKeys) else (None, None)
    bias_RS = None if keys.key_bias_BS is None else contiguous(keys.key_bias_BS)
    of_threads = num_threads() * heads * keys.length
    y_RD = empty(x_RD.shape)
    room = empty([rows * (outputs + 2 * (query_width + key_width)) + of_threads])
    library().token_self_attention(
        *(x_RD, qkv, projection, norm.weight, layer.k_norm.weight, *tables),
        *(key, value, *places, bias_RS, y_RD),
        *(rows, channels, heads, key_width // width, width, tables.cos_TH.shape[-1]),
        *(layer.is_gated, *strides, keys.length),
        *(1.0 / math.sqrt(width), norm.epsilon, norm.offset, room),
    )
    return y_RD


def fits_delta_net(
    x_TD: Tensor,
    layer: GatedDelta,
    tables: RotaryTables,
    cached: Any = None,
    cache: Any = None,
    packed: Any = None,
) -> bool:
    """Whether `gated_delta_net` takes these: one token of each row behind others, no padding."""
    if tables.cos_TH.shape[1] != 1 or not getattr(cache, "takes_token", False):
        return False
    if cached.key_bias_BS is not None or layer.value_dim > _MOST_WIDTH:
        return False
    taps, decay = layer.conv1d.weight, layer.decay
    are_products = _is_product(layer.in_proj) and _is_product(layer.out_proj)
    weights = (taps, decay.A_log, decay.dt_bias, layer.norm.weight)
    return are_products and taps.shape[2] > 1 and is_dense(x_TD, *weights)


def gated_delta_net(
    x_RD: Tensor,
    layer: GatedDelta,
    tables: RotaryTables,
    cached: Any,
    cache: Any,
    packed: Any = None,
) -> Tensor:
    """`delta_rule.gated_delta_net`; what the cache holds is replaced in place."""
    inputs_BJE, state_BNCV, rows_R = cache.for_token()
    in_proj, out_proj, taps = layer.in_proj.weight, layer.out_proj.weight, layer.conv1d.weight
    _, heads, width, values = state_BNCV.shape
    mixed, (inner, channels), rows = taps.shape[0], out_proj.shape, x_RD.shape[0]
    key_heads = (mixed - inner) // (2 * width)
    y_RD, room = empty(x_RD.shape), empty([rows * (2 * (mixed + inner) + 5 * heads)])
    library().token_delta_net(
        *(x_RD, in_proj, taps, layer.decay.A_log, layer.decay.dt_bias, layer.norm.weight),
        *(out_proj, inputs_BJE, state_BNCV, rows_R, y_RD),
        *(rows, channels, key_heads, heads, width, values, taps.shape[2]),
        *(layer.norm.epsilon, layer.norm.is_sigmoid, room),
    )
    return y_RD
