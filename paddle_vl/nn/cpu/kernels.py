"""Operations on the CPU by matrix products, by oneDNN, and with hand-written backward passes.

Paddle's CPU kernels of many operations run in one thread or without vector instructions: its sum
over rows is slower than a matrix product, and operations between tensors of two shapes take nine
times as long as oneDNN's, which run in place here (docs/cpu_speed.md). `paddle_vl.nn.kernels` says
which inputs go to which function. For the CPU only: a GPU may multiply in TF32, which would round
the terms of a sum.

Shapes: N rows, C channels; B batch, L new tokens, S capacity of a cache, K key heads, H head width.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import CachedKeys, RotaryTables, biased_rows
from paddle_vl.nn.cpu import onednn
from paddle_vl.nn.experts import Experts, GroupedProduct, GroupSizes, RoutedRows
from paddle_vl.nn.operations import column_sum, row_sum
from paddle_vl.nn.operations import swiglu as gated

_FLOAT32, _HOST = paddle.float32, paddle.CPUPlace()
_library: Any = None

# What fits


def is_dense(*args: Any) -> bool:
    """Whether all tensors among these are contiguous float32 and not empty."""
    for x in args:
        # `x.size` takes as long as a small operation.
        if isinstance(x, Tensor) and (x.dtype != _FLOAT32 or not x.is_contiguous() or 0 in x.shape):
            return False
    return True


def empty(shape: Any) -> Tensor:
    """A float32 tensor without values in host memory, in a third of the time of `paddle.empty`."""
    return _C_ops.empty(shape, _FLOAT32, _HOST)


def takes(*args: Any) -> bool:
    """Whether primitives take these, and the library is there."""
    return onednn.is_available() and is_dense(*args)


def takes_gate(gate: Tensor, up: Tensor | None = None) -> bool:
    """Whether a gated unit takes these: two tensors of one shape, or one of both halves."""
    return (up is None or up.shape == gate.shape) and takes(gate, up)


def is_float32(*args: Any) -> bool:
    """Whether all tensors among these are float32 and not empty."""
    return all(
        x.dtype == paddle.float32 and 0 not in x.shape for x in args if isinstance(x, Tensor)
    )


def drops(x: Tensor, p: float) -> bool:
    """Whether `dropout` drops some entries and not all."""
    return 0.0 < p < 1.0 and 0 not in x.shape


def drops_dense(x: Tensor, p: float) -> bool:
    """The same of a contiguous float32 tensor."""
    return 0.0 < p < 1.0 and is_dense(x)


def is_one_query(q_BLNH: Tensor, *others: Any) -> bool:
    """Whether each batch entry has one query."""
    return q_BLNH.shape[1] == 1


def contiguous(x: Tensor) -> Tensor:
    """`x`, copied only if it is a view with other strides."""
    return x if x.is_contiguous() else x.contiguous()


# Compiled kernels


def library() -> Any:
    """The compiled kernels, which `compiled.load` loads; None before."""
    return _library


def set_library(loaded: Any) -> None:
    """See `library`."""
    global _library
    _library = loaded


def num_threads() -> int:
    """Threads of a kernel."""
    return _library.omp_get_max_threads()


class _NoGraph:
    """In place of a PyLayer's context where no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


def has_graph(ctx: Any) -> bool:
    """Whether a backward pass may follow a `PyLayer`'s forward of this context."""
    return not isinstance(ctx, _NoGraph)


def run(function: type[PyLayer], *args: Any, **kwargs: Any) -> Any:
    """`function.apply`; without its cost, most of an answer's step, where no graph is recorded."""
    if paddle.is_grad_enabled():
        return function.apply(*args, **kwargs)
    context: Any = _NoGraph()
    return function.forward(context, *args, **kwargs)


# Sums and broadcasts


def sum_of_rows(x: Tensor) -> Tensor:
    """`row_sum`, a product with ones."""
    return paddle.matmul(x, ones(x.shape[-1], 1, x.dtype))


def sum_of_columns(x_NC: Tensor) -> Tensor:
    """`column_sum`, a product with ones."""
    return paddle.matmul(ones(1, x_NC.shape[0], x_NC.dtype), x_NC).reshape([x_NC.shape[1]])


@lru_cache(maxsize=256)
def ones(rows: int, columns: int, dtype: paddle.dtype = paddle.float32) -> Tensor:
    """A matrix of ones in host memory, for products that are sums; not to be written."""
    return paddle.to_tensor(np.ones([rows, columns], np.float32), dtype, paddle.CPUPlace())


def as_rows(x: Tensor) -> Tensor:
    """`[..., C]` as `[N, C]`, without an operation where it is that already."""
    return x if x.ndim == 2 else x.reshape([-1, x.shape[-1]])


def in_shape_of(x: Tensor, x_NC: Tensor) -> Tensor:
    """The inverse of `as_rows(x)`."""
    return x_NC if x.ndim == 2 else x_NC.reshape(x.shape)


def minus_column_times_(x: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """`(x - column) * factor` of `[..., C]`, `[..., 1]` and `[..., C]`."""
    if not takes(x, column, factor):
        return x.subtract_(column).multiply_(factor)
    rows = math.prod(column.shape)
    run = onednn.binary("sub", (rows, x.shape[-1]), (rows, 1), "mul")
    run(x.data_ptr(), column.data_ptr(), x.data_ptr(), factor.data_ptr())
    return x


def plus_column_times_(x: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """`x + column * factor` of `[..., C]`, `[..., 1]` and `[..., C]`."""
    if not takes(x, column, factor):
        return x.add_(factor * column)
    rows = math.prod(column.shape)
    run = onednn.binary("mul", (rows, x.shape[-1]), (rows, 1), "add")
    run(factor.data_ptr(), column.data_ptr(), x.data_ptr(), x.data_ptr())
    return x


def plus_(x_ZRS: Tensor, y: Tensor) -> Tensor:
    """`x + y`, of a matrix `[R, S]` for each of Z, or a row `[Z, 1, S]` for each of R."""
    y = contiguous(y)
    if not takes(x_ZRS, y):
        return x_ZRS.add_(y)
    shape, other = tuple(x_ZRS.shape), tuple(y.shape)
    if y.ndim == 2:
        size = math.prod(other)
        shape, other = (shape[0], size), (1, size)
    onednn.binary("add", shape, other)(x_ZRS.data_ptr(), y.data_ptr(), x_ZRS.data_ptr())
    return x_ZRS


def softmax_(x: Tensor) -> Tensor:
    """Softmax over the last dim; `x` may be overwritten."""
    if not takes(x):
        return F.softmax(x)
    run = onednn.softmax(math.prod(x.shape[:-1]), x.shape[-1])
    run(x.data_ptr(), x.data_ptr())
    return x


# Activations


def _activated(name: str, x: Tensor) -> Tensor:
    y = paddle.empty_like(x)
    onednn.eltwise(name, math.prod(x.shape))(x.data_ptr(), y.data_ptr())
    return y


class _Activation(PyLayer):
    """Keeps its input."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.save_for_backward(x)
        ctx.name = name
        return _activated(name, x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensor()
        grad, grad_x = contiguous(grad), paddle.empty_like(x)
        run = onednn.eltwise(ctx.name, math.prod(x.shape), gradient=True)
        run(x.data_ptr(), grad.data_ptr(), grad_x.data_ptr())
        return grad_x


def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """`operations.gelu` by oneDNN."""
    return _Activation.apply(x, "gelu_tanh" if approximate else "gelu_erf")


class _Gated(PyLayer):
    """`activation(gate) * up`; keeps both."""

    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.save_for_backward(gate, up)
        ctx.needs, ctx.name = (not gate.stop_gradient, not up.stop_gradient), name
        return _activated(name, gate).multiply_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensor()
        grads = _gated_gradients(ctx.name, gate, up, contiguous(grad))
        return tuple(x if need else None for x, need in zip(grads, ctx.needs, strict=True))


def _gated_gradients(name: str, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate = grad * up
    address = grad_gate.data_ptr()
    run = onednn.eltwise(name, math.prod(gate.shape), gradient=True)
    run(gate.data_ptr(), address, address)
    return grad_gate, _activated(name, gate).multiply_(grad)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.swiglu` by oneDNN."""
    return _gated("swish", gate, up)


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.geglu` by oneDNN."""
    return _gated("gelu_tanh", gate, up)


def _gated(name: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        gate, up = map(contiguous, paddle.chunk(gate, 2, axis=-1))
    return _Gated.apply(gate, up, name)


# Norms


class _LayerNorm(PyLayer):
    """Keeps its input and two numbers per row."""

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        channels = x.shape[-1]
        rows, y = math.prod(x.shape[:-1]), paddle.empty_like(x)
        mean_N, variance_N = paddle.empty([rows], x.dtype), paddle.empty([rows], x.dtype)
        tensors = (x, y, mean_N, variance_N, weight, bias)
        onednn.layer_norm(rows, channels, epsilon)(*(t.data_ptr() for t in tensors))
        ctx.save_for_backward(x, mean_N, variance_N, weight, bias)
        ctx.needs = [not t.stop_gradient for t in (x, weight, bias)]
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx, grad):
        kept = x, _, _, weight, bias = ctx.saved_tensor()
        grads = paddle.empty_like(x), paddle.empty_like(weight), paddle.empty_like(bias)
        rows, channels = math.prod(x.shape[:-1]), x.shape[-1]
        run = onednn.layer_norm(rows, channels, ctx.epsilon, gradient=True)
        tensors = (x, contiguous(grad), *kept[1:], *grads)
        run(*(t.data_ptr() for t in tensors))
        return tuple(g if need else None for g, need in zip(grads, ctx.needs, strict=True))


def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`operations.layer_norm` by oneDNN."""
    return _LayerNorm.apply(x, weight_C, bias_C, epsilon)


class _RMSNormByProducts(PyLayer):
    """`x / sqrt(mean(x^2) + epsilon) * (offset + weight)`; without a weight the factor is 1.

    The outer product of inverse roots and weights is a matrix product, and the input is kept
    instead of the quotient.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon, offset):
        x_NC = as_rows(x)
        inverse_N1 = paddle.rsqrt(row_sum(x_NC * x_NC).scale_(1.0 / x.shape[-1], epsilon))
        factor_1C = _factors(x, weight, offset)
        ctx.save_for_backward(x, inverse_N1, factor_1C)
        ctx.needs = [not t.stop_gradient for t in (x, weight) if t is not None]
        return in_shape_of(x, paddle.matmul(inverse_N1, factor_1C).multiply_(x_NC))

    @staticmethod
    def backward(ctx, grad):
        x, inverse_N1, factor_1C = ctx.saved_tensor()
        channels = x.shape[-1]
        grad_NC, x_NC = as_rows(grad), as_rows(x)
        product_NC = grad_NC * x_NC
        grads: list[Tensor | None] = [None] * len(ctx.needs)
        if len(ctx.needs) > 1 and ctx.needs[1]:
            grads[1] = paddle.matmul(inverse_N1, product_NC, transpose_x=True).reshape([channels])
        if ctx.needs[0]:
            along_N1 = paddle.matmul(product_NC, factor_1C, transpose_y=True)
            along_N1 = along_N1 * (inverse_N1 * inverse_N1 * inverse_N1) * (-1.0 / channels)
            grad_x = paddle.matmul(inverse_N1, factor_1C).multiply_(grad_NC)
            grads[0] = in_shape_of(x, plus_column_times_(grad_x, along_N1, x_NC))
        return grads[0] if len(grads) == 1 else tuple(grads)


def _factors(x: Tensor, weight_C: Tensor | None, offset: float) -> Tensor:
    if weight_C is None:
        return ones(1, x.shape[-1])
    factor_C = weight_C.detach()
    return (factor_C + offset if offset else factor_C).reshape([1, -1])


def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_norm` by products."""
    return _RMSNormByProducts.apply(x, weight_C, epsilon, 0.0)


def gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.gemma_rms_norm` by products."""
    return _RMSNormByProducts.apply(x, weight_C, epsilon, 1.0)


def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_quotient` by products."""
    return _RMSNormByProducts.apply(x, None, epsilon, 0.0)


# Rotary embedding, linears, experts


def apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """`attention.apply_rotary` with tables of full shape."""
    # One by one: both outputs of one PyLayer pass gradients, so an unused one would pass zeros.
    q_TNH = _Rotary.apply(q_TNH, *tables.of_heads(q_TNH.shape[-2]))
    k_TKH = _Rotary.apply(k_TKH, *tables.of_heads(k_TKH.shape[-2]))
    return q_TNH, k_TKH


class _Rotary(PyLayer):
    """Keeps the tables of all layers for the backward pass, and nothing else."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        wide = x.astype(cos.dtype)
        return (wide * cos).add_(_rotate_half(wide).multiply_(sin)).astype(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensor()
        wide = grad.astype(cos.dtype)
        # The transpose of rotate_half is its negative.
        grad_x = (wide * cos).subtract_(_rotate_half(wide * sin))
        return grad_x.astype(grad.dtype), None, None


def _rotate_half(x: Tensor) -> Tensor:
    """A product with a signed permutation: exact, and faster than splitting and joining."""
    return paddle.matmul(x, _swap(x.shape[-1], x.dtype))


@lru_cache(maxsize=16)
def _swap(width: int, dtype: paddle.dtype) -> Tensor:
    half = width // 2
    swap = np.zeros((width, width), dtype=np.float32)
    swap[np.arange(half) + half, np.arange(half)] = -1.0
    swap[np.arange(half), np.arange(half) + half] = 1.0
    return paddle.to_tensor(swap, dtype=dtype)


class BiasedLinear(PyLayer):
    """The product is added to the bias, whose gradient is a product with ones."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient, not bias.stop_gradient)
        if x.dtype != paddle.float32:
            return paddle.matmul(x, weight).add_(bias)
        x_NI, columns = as_rows(x), weight.shape[1]
        # Starting from the bias costs less than a sum afterwards, which broadcasts.
        y_NO = paddle.addmm(bias.reshape([1, columns]), x_NI, weight)
        return y_NO if x.ndim == 2 else y_NO.reshape([*x.shape[:-1], columns])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensor()
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_NO = as_rows(grad)
        grad_x = paddle.matmul(grad, weight, transpose_y=True) if needs_x else None
        grad_weight = None
        if needs_weight:
            x_NI = as_rows(x)
            grad_weight = paddle.matmul(x_NI, grad_NO, transpose_x=True)
        return grad_x, grad_weight, column_sum(grad_NO) if needs_bias else None


def fits_few(
    x_RD: Tensor, indices_RK: Tensor, weights_RK: Tensor, experts: Experts, rows: RoutedRows
) -> bool:
    """Whether `experts_of_few` takes these: rows have fewer experts than a layer that answers."""
    is_alone = not experts.training and experts.exchange is None
    return is_alone and 0 < math.prod(indices_RK.shape) <= experts.num_experts


def experts_of_few(
    x_RD: Tensor, indices_RK: Tensor, weights_RK: Tensor, experts: Experts, rows: RoutedRows
) -> Tensor:
    """`experts.routed_experts` with a copy of each matrix that is used, and nothing sorted."""
    expert_N, copies = indices_RK.flatten(), indices_RK.shape[1]
    experts.keep_counts(paddle.bincount(expert_N, minlength=experts.num_experts), rows)
    gate_up, down = (
        paddle.index_select(x, expert_N) for x in (experts.gate_up_proj, experts.down_proj)
    )
    x_N1D = paddle.repeat_interleave(x_RD, copies, axis=0).unsqueeze(1)
    y_N1D = paddle.matmul(gated(paddle.matmul(x_N1D, gate_up)), down)
    y_RKD = y_N1D.reshape([-1, copies, y_N1D.shape[2]])
    return paddle.matmul(weights_RK.unsqueeze(1), y_RKD).squeeze(1)


def grouped_linear(x_NI: Tensor, weight_EIO: Tensor, sizes: GroupSizes) -> Tensor:
    """`experts.grouped_linear`. Reading the counts on the host costs nothing on the CPU."""
    counts: Any = sizes.counts_E.tolist()
    return GroupedProduct.apply(x_NI, weight_EIO, _PerExpert(counts))


class _PerExpert(NamedTuple):
    """One product per expert, written into its slice of the result.

    Attributes:
        counts: rows of each expert.
    """

    counts: list[int]

    def product(self, x_NI: Tensor, weight_EIO: Tensor, transposed: bool = False) -> Tensor:
        """See `GroupedProduct`."""
        columns = weight_EIO.shape[1 if transposed else 2]
        total = x_NI.shape[0]
        make = paddle.empty if sum(self.counts) == total else paddle.zeros
        y_NO = make([total, columns], dtype=x_NI.dtype)
        for e, begin, end in self._ranges():
            paddle.matmul(
                x_NI._slice(begin, end),
                _matrix(weight_EIO, e),
                transpose_y=transposed,
                out=y_NO._slice(begin, end),
            )
        return y_NO

    def weight_gradient(self, x_NI: Tensor, grad_NO: Tensor) -> Tensor:
        """See `GroupedProduct`."""
        shape = [len(self.counts), x_NI.shape[1], grad_NO.shape[1]]
        grad_EIO = paddle.zeros(shape, dtype=x_NI.dtype)
        for e, begin, end in self._ranges():
            paddle.matmul(
                x_NI._slice(begin, end),
                grad_NO._slice(begin, end),
                transpose_x=True,
                out=_matrix(grad_EIO, e),
            )
        return grad_EIO

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Expert, first row and end row of every expert that has rows."""
        end = 0
        for e, count in enumerate(self.counts):
            begin, end = end, end + count
            if count:
                yield e, begin, end


def _matrix(weight_EIO: Tensor, e: int) -> Tensor:
    """One expert's matrix `[I, O]`, a view of the stacked weights."""
    return weight_EIO._slice(e, e + 1).reshape_(weight_EIO.shape[1:])


# Attention over a cache


def cached_attention(
    q_BLNH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, cached: CachedKeys
) -> Tensor:
    """`attention.cached_attention` of a single query, over the whole buffers: a part of them would
    be copied."""
    batch, _, heads, width = q_BLNH.shape
    _, key_heads, capacity, _ = key_BKSH.shape
    q_BKGH = (q_BLNH * width**-0.5).reshape([batch, key_heads, -1, width])
    bias_BKGS = cached.bias(batch, key_heads, heads // key_heads, capacity)
    out_BKGH = biased_rows(q_BKGH, key_BKSH, value_BKSH, bias_BKGS)
    return out_BKGH.reshape([batch, 1, heads, width])


# Dropout


# SFC64 mixes its seed with its counter in the first draws.
MIXING_DRAWS = 12


def dropout_seed() -> list[int]:
    """Three numbers from the state of Paddle's generator, which advances."""
    high, low = paddle.randint(0, 2**31 - 1, [2, 3], dtype="int64").numpy()
    return (high << 31 | low).tolist()


def dropout_threshold(p: float) -> tuple[int, int]:
    """`p` in units of 2^-32: the first byte, and the other three."""
    return divmod(round(p * 2**32), 1 << 24)


def kept_entries(shape: list[int], p: float, words: list[int]) -> np.ndarray:
    """bool: each entry is kept with probability `1 - p`.

    One byte per entry decides, unless it equals the first one of `p`; then three more do.

    Args:
        words: of `dropout_seed`; the same ones give the same entries.

    Source: SFC64 of PractRand (Chris Doty-Humphrey), as in NumPy.
    """
    generator = np.random.SFC64()
    generator.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.array([*words, 1], dtype=np.uint64)},
        "has_uint32": 0,
        "uinteger": 0,
    }
    generator.random_raw(MIXING_DRAWS)
    size, (first, rest) = int(np.prod(shape)), dropout_threshold(p)
    drawn = generator.random_raw(-(-size // 8)).view(np.uint8)[:size]
    is_kept, ties = drawn > first, np.flatnonzero(drawn == first)
    is_kept[ties] = generator.random_raw(ties.size) & np.uint64(0xFFFFFF) >= rest
    return is_kept.reshape(shape)


class _Dropout(PyLayer):
    """Keeps one byte per entry."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.factor = np.float32(1.0 / (1.0 - p))
        ctx.kept = kept_entries(x.shape, p, dropout_seed())
        return _scaled(x, ctx.kept, ctx.factor)

    @staticmethod
    def backward(ctx, grad):
        return _scaled(grad, ctx.kept, ctx.factor)


def _scaled(x: Tensor, is_kept: np.ndarray, factor: np.float32) -> Tensor:
    if takes(x):
        y = paddle.empty_like(x)
        run = onednn.times_bytes(is_kept.size, float(factor))
        run(x.data_ptr(), is_kept.ctypes.data, y.data_ptr())
        return y
    factors = paddle.to_tensor(is_kept * factor, place=x.place)
    return x * factors.astype(x.dtype)


def dropout(x: Tensor, p: float) -> Tensor:
    """`operations.dropout`: Paddle's generator seeds a faster one, which draws the whole tensor.
    Paddle's own kernel draws in one thread."""
    return _Dropout.apply(x, p)
