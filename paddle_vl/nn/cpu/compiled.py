"""Operations on the CPU by compiled kernels (`kernels.c`), where a C compiler is found.

`enable` compiles and loads them and compares them with the plain operations. They take contiguous
float32 tensors. Over 350 lines, since it is one table of calls.

Shapes: as in `paddle_vl.nn.attention`; N rows, C channels.
"""

import ctypes
import logging
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import PackedSamples, RotaryTables, with_averages
from paddle_vl.nn.attention_masks import AttentionMask
from paddle_vl.nn.cpu import compiler
from paddle_vl.nn.operations import has_compiled, set_compiled

SWITCH = "PADDLE_VL_CPU_KERNELS"
_OFF = ("0", "off", "false", "no")
_BLOCK = 128
_MOST_KEYS, _MOST_WIDTH = 1 << 16, 1024
# Added to no score: replaces those of hidden keys. The lowest finite score of `paddle_vl.nn`.
_HIDDEN = -2.3819763e38
# SFC64 mixes its seed with its counter in the first draws.
_MIXING_DRAWS = 12
_log = logging.getLogger(__name__)
_library: Any = None
_refused: str | None = None


class _Address:
    """The data of a tensor or array, an address, or None, as an argument of C."""

    @staticmethod
    def from_param(x: Any) -> ctypes.c_void_p:
        if isinstance(x, Tensor):
            x = x.data_ptr()
        elif isinstance(x, np.ndarray):
            x = x.ctypes.data
        return ctypes.c_void_p(x)


# Arguments of the functions of kernels.c: p an address, n and u 64 bits, i an int, f a float.
_TYPES: dict[str, Any] = {
    "p": _Address, "n": ctypes.c_int64, "u": ctypes.c_uint64, "i": ctypes.c_int,
    "f": ctypes.c_float,
}  # fmt: skip
_ATTENTION = "pnnnnfipppnfpn"
_ARGUMENTS = {
    "gelu_tanh_forward": "ppn",
    "gelu_tanh_backward": "pppn",
    "gated_forward": "pppnnni",
    "gated_backward": "pppppnnni",
    "dropout_forward": "pppnuuuniuf",
    "dropout_backward": "pppnf",
    "rotate": "ppppnnnf",
    "norm_forward": "pppppnnffi",
    "norm_backward": "ppppppppnnfi",
    "attention_forward": "ppppp" + _ATTENTION,
    "attention_backward": "ppppppppp" + _ATTENTION,
}


def enable() -> bool:
    """Let operations use the compiled kernels from now on, in the whole process.

    Returns:
        Whether they may. Why not is logged once: the environment variable `PADDLE_VL_CPU_KERNELS`
        is 0, there is no compiler, or a kernel differs from the plain operation.
    """
    global _library, _refused
    if has_compiled():
        return True
    if os.environ.get(SWITCH, "").lower() in _OFF or _refused is not None:
        return False
    from paddle_vl.nn.cpu import kernel_check

    try:
        if _library is None:
            library = compiler.load_kernels()
            for name, types in _ARGUMENTS.items():
                getattr(library, name).argtypes = [_TYPES[letter] for letter in types]
            _library = library
        set_compiled(True)
        wrong = kernel_check.differences()
        if wrong:
            raise compiler.CompilerError(f"they differ from the plain operations: {wrong}")
    except compiler.CompilerError as error:
        disable()
        _refused = str(error)
        _log.info(
            "compiled CPU kernels are not used, which makes a step about twice as long: %s",
            _refused,
        )
        return False
    return True


def disable() -> None:
    """Take the other kernels again."""
    set_compiled(False)


def refusal() -> str | None:
    """Why `enable` did not let them; None if it did or was not called."""
    return _refused


def is_dense(*args: Any) -> bool:
    """Whether all tensors among these are contiguous float32 and not empty."""
    # `x.size` takes as long as a small operation.
    return all(
        x.dtype == paddle.float32 and x.is_contiguous() and 0 not in x.shape
        for x in args
        if isinstance(x, Tensor)
    )


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _size(x: Tensor) -> int:
    # Faster than `x.size`.
    return math.prod(x.shape)


def _needed(grads: Sequence[Tensor], needs: Sequence[bool]) -> Any:
    """What a backward pass returns: Paddle requires None for an input without gradient."""
    found = tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))
    return found[0] if len(found) == 1 else found


# Activations


class _TanhGelu(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = paddle.empty_like(x)
        _library.gelu_tanh_forward(x, y, _size(x))
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensor()
        grad_x = paddle.empty_like(x)
        _library.gelu_tanh_backward(x, _contiguous(grad), grad_x, _size(x))
        return grad_x


def is_tanh_gelu(x: Tensor, approximate: bool = False) -> bool:
    """Whether `gelu` takes these."""
    return approximate and is_dense(x)


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """`operations.gelu` in its tanh form."""
    return _TanhGelu.apply(x)


class _Gated(PyLayer):
    """A gated unit of two tensors, or of the halves of one tensor's rows."""

    @staticmethod
    def forward(ctx, *tensors, is_gelu):
        ctx.save_for_backward(*tensors)
        ctx.needs, ctx.is_gelu = [not x.stop_gradient for x in tensors], is_gelu
        stride = tensors[0].shape[-1]
        columns = stride * len(tensors) // 2
        y = paddle.empty([*tensors[0].shape[:-1], columns], "float32")
        _library.gated_forward(
            *_gate_and_up(tensors), y, _size(tensors[0]) // stride, columns, stride, is_gelu
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensor()
        grad, grads = _contiguous(grad), [paddle.empty_like(x) for x in tensors]
        stride = tensors[0].shape[-1]
        _library.gated_backward(
            *_gate_and_up(tensors), grad, *_gate_and_up(grads), _size(tensors[0]) // stride,
            grad.shape[-1], stride, ctx.is_gelu,
        )  # fmt: skip
        return _needed(grads, ctx.needs)


def _gate_and_up(tensors: Sequence[Tensor]) -> Sequence[Tensor | int]:
    if len(tensors) == 2:
        return tensors
    return tensors[0], tensors[0].data_ptr() + 4 * (tensors[0].shape[-1] // 2)


def fits_gate(gate: Tensor, up: Tensor | None = None) -> bool:
    """Whether `swiglu` and `geglu` take these."""
    return (up is None or up.shape == gate.shape) and is_dense(gate, up)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.swiglu`."""
    return _Gated.apply(*([gate] if up is None else [gate, up]), is_gelu=0)


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.geglu`."""
    return _Gated.apply(*([gate] if up is None else [gate, up]), is_gelu=1)


# Dropout


class _Dropout(PyLayer):
    """Keeps one byte per entry."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.kept, ctx.factor = np.empty(_size(x), dtype=np.uint8), 1.0 / (1.0 - p)
        # `p` in units of 2^-32: the first byte, and the other three.
        y, (first, rest) = paddle.empty_like(x), divmod(round(p * 2**32), 1 << 24)
        _library.dropout_forward(
            x, y, ctx.kept, _size(x), *dropout_seed(), _MIXING_DRAWS, first, rest, ctx.factor
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        grad, grad_x = _contiguous(grad), paddle.empty_like(grad)
        _library.dropout_backward(grad, ctx.kept, grad_x, _size(grad), ctx.factor)
        return grad_x


def dropout_seed() -> list[int]:
    """Three numbers from the state of Paddle's generator, which advances."""
    high, low = paddle.randint(0, 2**31 - 1, [2, 3], dtype="int64").numpy()
    return (high << 31 | low).tolist()


def drops(x: Tensor, p: float) -> bool:
    """Whether `dropout` takes these: it drops some entries and not all."""
    return 0.0 < p < 1.0 and is_dense(x)


def dropout(x: Tensor, p: float) -> Tensor:
    """`operations.dropout`. Paddle's generator seeds a faster one, SFC64 of PractRand (Chris
    Doty-Humphrey), which draws a byte per entry; one that is equal to the first byte of `p` is
    decided by three more."""
    return _Dropout.apply(x, p)


# Rotary embedding


class _Rotary(PyLayer):
    @staticmethod
    def forward(ctx, x, tables):
        ctx.tables = tables
        return _rotated(x, tables, 1.0)

    @staticmethod
    def backward(ctx, grad):
        return _rotated(_contiguous(grad), ctx.tables, -1.0)


def _rotated(x: Tensor, tables: RotaryTables, direction: float) -> Tensor:
    y = paddle.empty_like(x)
    heads, width = x.shape[-2:]
    rows = _size(x) // (heads * width)
    _library.rotate(x, y, *tables, rows, heads, width, direction)
    return y


def fits_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> bool:
    """Whether `apply_rotary` takes these: the tables have the inputs' leading dims."""
    shape = tables.cos_TH.shape
    is_same = all([*x.shape[:-2], x.shape[-1]] == shape for x in (q_TNH, k_TKH))
    return is_same and is_dense(q_TNH, k_TKH, *tables)


def apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """`attention.apply_rotary`."""
    # One by one: both outputs of one PyLayer pass gradients, so an unused one would pass zeros.
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
            x, weight, bias, y, statistics, rows, channels, epsilon, offset, centres
        )
        ctx.save_for_backward(x, statistics)
        ctx.weight, ctx.settings = weight, (offset, centres)
        ctx.needs = [not t.stop_gradient for t in (x, weight, bias) if t is not None]
        return y

    @staticmethod
    def backward(ctx, grad):
        x, statistics = ctx.saved_tensor()
        grad_x, channels = paddle.empty_like(x), x.shape[-1]
        vectors = [paddle.empty([channels], "float32") for _ in ctx.needs[1:]]
        sums = paddle.empty([_library.omp_get_max_threads() * 2 * channels], "float32")
        _library.norm_backward(
            x, ctx.weight, _contiguous(grad), statistics, grad_x, *(*vectors, None, None)[:2],
            sums, _size(x) // channels, channels, *ctx.settings,
        )  # fmt: skip
        return _needed([grad_x, *vectors], ctx.needs)


def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_norm`."""
    return _Norm.apply(x, weight_C, None, epsilon, 0.0, 0)


def gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.gemma_rms_norm`."""
    return _Norm.apply(x, weight_C, None, epsilon, 1.0, 0)


def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_quotient`."""
    return _Norm.apply(x, None, None, epsilon, 0.0, 0)


def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`operations.layer_norm`."""
    return _Norm.apply(x, weight_C, bias_C, epsilon, 0.0, 1)


# Attention


class _Attention(PyLayer):
    """Attention within segments, see `attention_forward` in kernels.c.

    Keeps the largest score and the sum of exponentials of every row and head, and computes the
    probabilities again in backward, as FlashAttention (Dao et al.,
    https://arxiv.org/abs/2205.14135).
    """

    @staticmethod
    def forward(ctx, q, k, v, segments, scale, causal, key_bias, seen):
        heads, width = q.shape[-2:]
        rows = _size(q) // (heads * width)
        out, statistics = paddle.empty_like(q), paddle.empty([rows, heads, 2], "float32")
        mask = (None, None, 0) if seen is None else (*seen[:2], seen.visible.shape[-1])
        ctx.sizes = (
            segments, len(segments), heads, k.shape[-2], width, scale, causal, key_bias, *mask,
            _HIDDEN,
        )  # fmt: skip
        ctx.room = _BLOCK * int(segments[:, 3].max())
        ctx.needs = [not x.stop_gradient for x in (q, k, v)]
        room = paddle.empty([_library.omp_get_max_threads() * ctx.room], "float32")
        _library.attention_forward(q, k, v, out, statistics, *ctx.sizes, room, ctx.room)
        ctx.save_for_backward(q, k, v, out, statistics)
        return out

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.saved_tensor()
        grads = [paddle.empty_like(x) for x in kept[:3]]
        room = paddle.empty([2 * _library.omp_get_max_threads() * ctx.room], "float32")
        _library.attention_backward(*kept, _contiguous(grad), *grads, *ctx.sizes, room, ctx.room)
        return _needed(grads, ctx.needs)


@lru_cache(maxsize=64)
def equal_segments(count: int, queries: int, keys: int) -> np.ndarray:
    """First query row, query rows, first key row and key rows of `count` equal segments."""
    number = np.arange(count, dtype=np.int64)
    return np.stack(np.broadcast_arrays(number * queries, queries, number * keys, keys), axis=1)


@lru_cache(maxsize=16)
def packed_segments(offsets: tuple[int, ...]) -> np.ndarray:
    """The same of consecutive segments that see themselves; empty ones are left out."""
    begin = np.array(offsets[:-1], dtype=np.int64)
    length = np.diff(np.array(offsets, dtype=np.int64))
    rows = np.stack([begin, length, begin, length], axis=1)
    return rows[length > 0]


def fits_causal(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> bool:
    """Whether `causal_attention` takes these. One query multiplies vectors, for which a block is
    too large."""
    fits = 1 < q_BLNH.shape[1] <= k_BSKH.shape[1] and is_dense(key_bias_BS)
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
    q, k, v = map(_contiguous, (q_PNH, k_PNH, v_PNH))
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
    segments, seen = equal_segments(*q_BLNH.shape[:2], k_BSKH.shape[1]), _sees(mask)
    out_BLNH = _Attention.apply(q_BLNH, k_BSKH, v_BSKH, segments, scale, 0, None, seen)
    if seen.all_see or implementation == "sdpa":
        return out_BLNH
    return with_averages(out_BLNH, v_BSKH, mask)


class _Sees(NamedTuple):
    """What a mask lets queries see, on the host.

    Attributes:
        visible: `[B, L, S]` bool.
        ends: `[B, L]` int32, the last key that each query sees plus one; 0 if it sees none.
        all_see: whether every query sees a key.
    """

    visible: np.ndarray
    ends: np.ndarray
    all_see: bool


# Made once of a mask that serves several layers.
_seen: WeakKeyDictionary[AttentionMask, _Sees] = WeakKeyDictionary()


def _sees(mask: AttentionMask) -> _Sees:
    if mask not in _seen:
        visible_BLS = np.ascontiguousarray(mask.visible_BLS.numpy())
        keys = visible_BLS.shape[-1]
        ends_BL = keys - visible_BLS[:, :, ::-1].argmax(axis=-1)
        ends_BL[~visible_BLS.any(axis=-1)] = 0
        _seen[mask] = _Sees(visible_BLS, ends_BL.astype(np.int32), bool(ends_BL.all()))
    return _seen[mask]
