"""Operations on the CPU by compiled kernels (`kernels.c`), where a C compiler is found.

`enable` compiles and loads them, compares each with the plain operation, and registers them in
place of the CPU kernels in Paddle. They take contiguous float32 tensors; other inputs go to the
kernels that they replaced. Without a compiler nothing changes. Over 350 lines, since it is one
table of calls.

Shapes: as in `paddle_vl.nn.attention`; N rows, C channels.
"""

import ctypes
import logging
import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import (
    AttentionMask,
    PackedSamples,
    causal_attention,
    eager_or_sdpa_attention,
    equal_segments_attention,
)
from paddle_vl.nn.cpu import compiler
from paddle_vl.nn.cpu.dropout import MIXING_DRAWS, seed, threshold
from paddle_vl.nn.cpu.masked_attention import sees, with_averages
from paddle_vl.nn.cpu.onednn import are_dense_float32, contiguous
from paddle_vl.nn.norm import gemma_rms_norm, layer_norm, rms_norm, rms_quotient
from paddle_vl.nn.operations import Operation, dropout, geglu, gelu, swiglu
from paddle_vl.nn.rotary import RotaryTables, apply_rotary

SWITCH = "PADDLE_VL_CPU_KERNELS"
_OFF = ("0", "off", "false", "no")
_BLOCK = 128
_MOST_KEYS, _MOST_WIDTH = 1 << 16, 1024
# Added to no score: replaces those of hidden keys. The lowest finite score of `paddle_vl.nn`.
_HIDDEN = -2.3819763e38
_log = logging.getLogger(__name__)
_library: Any = None
_replaced: dict[Operation, Callable] = {}
_refused: str | None = None


def enable() -> bool:
    """Use the compiled kernels from now on, in the whole process.

    Returns:
        Whether they are used. Why not is logged once: the environment variable
        `PADDLE_VL_CPU_KERNELS` is 0, there is no compiler, or a kernel differs from the plain
        operation.
    """
    global _library, _refused
    if _replaced:
        return True
    if os.environ.get(SWITCH, "").lower() in _OFF or _refused is not None:
        return False
    try:
        if _library is None:
            _library = compiler.load_kernels()
        _register()
        from paddle_vl.nn.cpu.kernel_check import differences

        wrong = differences(list(_replaced))
        if wrong:
            raise compiler.CompilerError(f"they differ from the plain operations: {wrong}")
    except compiler.CompilerError as error:
        disable()
        _refused = str(error)
        _log.info("compiled CPU kernels are not used: %s", _refused)
        return False
    return True


def disable() -> None:
    """Use the CPU kernels in Paddle again."""
    for operation, kernel in _replaced.items():
        operation.kernels["cpu"] = kernel
    _replaced.clear()


def is_enabled() -> bool:
    """Whether the compiled kernels are used."""
    return bool(_replaced)


def refusal() -> str | None:
    """Why `enable` did not use the kernels; None if it did or was not called."""
    return _refused


def _register() -> None:
    for operation, kernel in _KERNELS.items():
        _replaced[operation] = operation.kernels.get("cpu", operation.plain)
        operation.kernels["cpu"] = kernel


def _size(x: Tensor) -> int:
    # Faster than `x.size`.
    return math.prod(x.shape)


def _data(x: Tensor | np.ndarray | None) -> ctypes.c_void_p:
    if x is None:
        return ctypes.c_void_p()
    return ctypes.c_void_p(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


_i64, _int, _float = ctypes.c_int64, ctypes.c_int, ctypes.c_float


def _num_threads() -> int:
    return _library.omp_get_max_threads()


# Activations


class _Gelu(PyLayer):
    @staticmethod
    def forward(ctx, x, approximate):
        ctx.save_for_backward(x)
        ctx.form = "tanh" if approximate else "erf"
        y = paddle.empty_like(x)
        getattr(_library, f"gelu_{ctx.form}_forward")(_data(x), _data(y), _i64(_size(x)))
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensor()
        grad, grad_x = contiguous(grad), paddle.empty_like(x)
        run = getattr(_library, f"gelu_{ctx.form}_backward")
        run(_data(x), _data(grad), _data(grad_x), _i64(_size(x)))
        return grad_x


def _gelu(x: Tensor, approximate: bool = False) -> Tensor:
    if not are_dense_float32(x):
        return _replaced[gelu](x, approximate)
    return _Gelu.apply(x, approximate)


class _Gated(PyLayer):
    """A gated unit; `name` is that of its kernels."""

    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.save_for_backward(gate, up)
        ctx.needs, ctx.name = (not gate.stop_gradient, not up.stop_gradient), name
        y, columns = paddle.empty_like(gate), _i64(gate.shape[-1])
        rows = _i64(_size(gate) // gate.shape[-1])
        getattr(_library, f"{name}_forward")(*map(_data, (gate, up, y)), rows, columns, columns)
        return y

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensor()
        grad, columns, rows = contiguous(grad), _i64(gate.shape[-1]), _size(gate) // gate.shape[-1]
        grads = paddle.empty_like(gate), paddle.empty_like(up)
        getattr(_library, f"{ctx.name}_backward")(
            *map(_data, (gate, up, grad, *grads)), _i64(rows), columns, columns
        )
        return tuple(x if need else None for x, need in zip(grads, ctx.needs, strict=True))


class _GatedHalves(PyLayer):
    """A gated unit of the two halves of a tensor's rows."""

    @staticmethod
    def forward(ctx, both, name):
        ctx.save_for_backward(both)
        ctx.name, columns = name, both.shape[-1] // 2
        y = paddle.empty([*both.shape[:-1], columns], "float32")
        getattr(_library, f"{name}_forward")(
            _data(both), _second_half(both), _data(y), _i64(_size(both) // (2 * columns)),
            _i64(columns), _i64(2 * columns),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx, grad):
        (both,) = ctx.saved_tensor()
        grad, columns, grad_both = contiguous(grad), both.shape[-1] // 2, paddle.empty_like(both)
        getattr(_library, f"{ctx.name}_backward")(
            _data(both), _second_half(both), _data(grad), _data(grad_both),
            _second_half(grad_both), _i64(_size(both) // (2 * columns)), _i64(columns),
            _i64(2 * columns),
        )  # fmt: skip
        return grad_both


def _second_half(both: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(both.data_ptr() + 4 * (both.shape[-1] // 2))


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return _gated(swiglu, "swiglu", gate, up)


def _geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return _gated(geglu, "geglu", gate, up)


def _gated(unit: Operation, name: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if not are_dense_float32(gate, up) or (up is not None and up.shape != gate.shape):
        return _replaced[unit](gate, up)
    return _GatedHalves.apply(gate, name) if up is None else _Gated.apply(gate, up, name)


# Dropout


class _Dropout(PyLayer):
    """Keeps one byte per entry."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.kept, ctx.factor = np.empty(_size(x), dtype=np.uint8), 1.0 / (1.0 - p)
        y, (first, rest) = paddle.empty_like(x), threshold(p)
        _library.dropout_forward(
            _data(x), _data(y), _data(ctx.kept), _i64(_size(x)), *map(ctypes.c_uint64, seed()),
            _i64(MIXING_DRAWS), _int(first), ctypes.c_uint64(rest), _float(ctx.factor),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx, grad):
        grad, grad_x = contiguous(grad), paddle.empty_like(grad)
        _library.dropout_backward(
            _data(grad), _data(ctx.kept), _data(grad_x), _i64(_size(grad)), _float(ctx.factor)
        )
        return grad_x


def _dropout(x: Tensor, p: float) -> Tensor:
    if not (0.0 < p < 1.0 and are_dense_float32(x)):
        return _replaced[dropout](x, p)
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
    y = paddle.empty_like(x)
    heads, width = x.shape[-2:]
    _library.rotate(
        _data(x), _data(y), _data(tables.cos_TH), _data(tables.sin_TH),
        _i64(_size(x) // (heads * width)), _i64(heads), _i64(width), _float(direction),
    )  # fmt: skip
    return y


def _apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    shape = tables.cos_TH.shape
    if not are_dense_float32(q_TNH, k_TKH, *tables) or any(
        [*x.shape[:-2], x.shape[-1]] != shape for x in (q_TNH, k_TKH)
    ):
        return _replaced[apply_rotary](q_TNH, k_TKH, tables)
    return _Rotary.apply(q_TNH, tables), _Rotary.apply(k_TKH, tables)


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
        y, statistics = paddle.empty_like(x), paddle.empty([rows, 2], "float32")
        _library.norm_forward(
            _data(x), _data(weight), _data(bias), _data(y), _data(statistics), _i64(rows),
            _i64(channels), _float(epsilon), _float(offset), _int(centres),
        )  # fmt: skip
        ctx.save_for_backward(x, statistics)
        ctx.weight, ctx.settings = weight, (offset, centres)
        ctx.needs = [not t.stop_gradient for t in (x, weight, bias) if t is not None]
        return y

    @staticmethod
    def backward(ctx, grad):
        x, statistics = ctx.saved_tensor()
        (offset, centres), weight, channels = ctx.settings, ctx.weight, x.shape[-1]
        grad, grad_x = contiguous(grad), paddle.empty_like(x)
        vectors = [paddle.empty([channels], "float32") for _ in ctx.needs[1:]]
        sums = paddle.empty([_num_threads() * 2 * channels], "float32")
        _library.norm_backward(
            _data(x), _data(weight), _data(grad), _data(statistics), _data(grad_x),
            *map(_data, (*vectors, None, None)[:2]), _data(sums), _i64(_size(x) // channels),
            _i64(channels), _float(offset), _int(centres),
        )  # fmt: skip
        found = [g if need else None for g, need in zip((grad_x, *vectors), ctx.needs, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)


def _rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    if not are_dense_float32(x, weight_C):
        return _replaced[rms_norm](x, weight_C, epsilon)
    return _Norm.apply(x, weight_C, None, epsilon, 0.0, 0)


def _gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    if not are_dense_float32(x, weight_C):
        return _replaced[gemma_rms_norm](x, weight_C, epsilon)
    return _Norm.apply(x, weight_C, None, epsilon, 1.0, 0)


def _rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    if not are_dense_float32(x):
        return _replaced[rms_quotient](x, epsilon)
    return _Norm.apply(x, None, None, epsilon, 0.0, 0)


def _layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    if not are_dense_float32(x, weight_C, bias_C):
        return _replaced[layer_norm](x, weight_C, bias_C, epsilon)
    return _Norm.apply(x, weight_C, bias_C, epsilon, 0.0, 1)


# Attention


class _Attention(PyLayer):
    """Attention within segments, see `attention_forward` in kernels.c.

    Keeps the largest score and the sum of exponentials of every row and head, and computes the
    probabilities again in backward.
    """

    @staticmethod
    def forward(ctx, q, k, v, segments, scale, causal, key_bias, seen):
        rows, heads, width = _size(q) // (q.shape[-2] * q.shape[-1]), *q.shape[-2:]
        out, statistics = paddle.empty_like(q), paddle.empty([rows, heads, 2], "float32")
        longest = int(segments[:, 3].max())
        ctx.sizes = (
            _data(segments), _i64(len(segments)), _i64(heads), _i64(k.shape[-2]), _i64(width),
            _float(scale), _int(causal), _data(key_bias), _data(seen and seen.visible),
            _data(seen and seen.ends), _i64(seen.visible.shape[-1] if seen else 0), _float(_HIDDEN),
        )  # fmt: skip
        ctx.room, ctx.kept = _BLOCK * longest, (segments, key_bias, seen)
        ctx.needs = [not x.stop_gradient for x in (q, k, v)]
        room = paddle.empty([_num_threads() * ctx.room], "float32")
        _library.attention_forward(
            *map(_data, (q, k, v, out, statistics)), *ctx.sizes, _data(room), _i64(ctx.room)
        )
        ctx.save_for_backward(q, k, v, out, statistics)
        return out

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.saved_tensor()
        grads = [paddle.empty_like(x) for x in kept[:3]]
        room, grad = paddle.empty([2 * _num_threads() * ctx.room], "float32"), contiguous(grad)
        _library.attention_backward(
            *map(_data, (*kept, grad, *grads)), *ctx.sizes, _data(room), _i64(ctx.room)
        )
        return tuple(x if need else None for x, need in zip(grads, ctx.needs, strict=True))


def _takes_attention(q: Tensor, k: Tensor, v: Tensor, keys: int) -> bool:
    is_within = keys <= _MOST_KEYS and q.shape[-1] <= _MOST_WIDTH and q.shape[-2] % k.shape[-2] == 0
    return is_within and are_dense_float32(q, k, v)


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


def _causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    (batch, length), keys = q_BLNH.shape[:2], k_BSKH.shape[1]
    # One query multiplies vectors, for which a block is too large.
    takes = length > 1 and _takes_attention(q_BLNH, k_BSKH, v_BSKH, keys)
    if not (takes and length <= keys and are_dense_float32(key_bias_BS)):
        return _replaced[causal_attention](q_BLNH, k_BSKH, v_BSKH, key_bias_BS, packed)
    if packed is None:
        segments = equal_segments(batch, length, keys)
    else:
        segments = packed_segments(packed.offsets)
    scale = q_BLNH.shape[-1] ** -0.5
    return _Attention.apply(q_BLNH, k_BSKH, v_BSKH, segments, scale, 1, key_bias_BS, None)


def _equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    q, k, v = map(contiguous, (q_PNH, k_PNH, v_PNH))
    if not _takes_attention(q, k, v, length):
        return _replaced[equal_segments_attention](q_PNH, k_PNH, v_PNH, count, length)
    segments = equal_segments(count, length, length)
    return _Attention.apply(q, k, v, segments, q.shape[-1] ** -0.5, 0, None, None)


def _eager_or_sdpa_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str,
) -> Tensor:
    (batch, length), keys = q_BLNH.shape[:2], k_BSKH.shape[1]
    if not _takes_attention(q_BLNH, k_BSKH, v_BSKH, keys):
        return _replaced[eager_or_sdpa_attention](
            q_BLNH, k_BSKH, v_BSKH, mask, scale, implementation
        )
    segments, seen = equal_segments(batch, length, keys), sees(mask)
    out_BLNH = _Attention.apply(q_BLNH, k_BSKH, v_BSKH, segments, scale, 0, None, seen)
    if seen.all_see or implementation == "sdpa":
        return out_BLNH
    return with_averages(out_BLNH, v_BSKH, mask)


_KERNELS: dict[Operation, Callable] = {
    apply_rotary: _apply_rotary,
    causal_attention: _causal_attention,
    dropout: _dropout,
    eager_or_sdpa_attention: _eager_or_sdpa_attention,
    equal_segments_attention: _equal_segments_attention,
    geglu: _geglu,
    gelu: _gelu,
    gemma_rms_norm: _gemma_rms_norm,
    layer_norm: _layer_norm,
    rms_norm: _rms_norm,
    rms_quotient: _rms_quotient,
    swiglu: _swiglu,
}
