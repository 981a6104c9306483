"""Small operations of layers: sums, activations, norms, slices and dropout of token rows.

Norms are computed in float32 for activations of any dtype: a bfloat16 mean of squares over a wide
row would lose most of its bits.

Shapes: N rows, C channels; any number of leading dims.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant

from paddle_vl.nn.dispatch import operation


@operation
def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, which is kept: `[..., C]` to `[..., 1]`, in the dtype of `x`."""
    return x.sum(axis=-1, keepdim=True)


@operation
def column_sum(x_NC: Tensor) -> Tensor:
    """Sum over the rows: `[N, C]` to `[C]`, in the dtype of `x`."""
    return x_NC.sum(axis=0)


@operation
def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """GELU with the error function, or its tanh form."""
    return F.gelu(x, approximate)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, True),
    "silu": F.silu,
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a configuration's `hidden_act` names.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act is {name!r}; this package has {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


@operation
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, in one kernel; without `up` both are halves of `gate`'s last dim.

    Source: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202.
    """
    return F.swiglu(gate, up)


@operation
def swiglu_mlp(x_TD: Tensor, gate_up_proj: Any, down_proj: Any) -> Tensor:
    """`down(silu(gate(x)) * up(x))`, `[T, D]`; `gate_up_proj` gives both."""
    return down_proj(swiglu(*gate_up_proj(x_TD)))


@operation
def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the tanh form of GELU, as in Gemma; without `up` both are halves of
    `gate`'s last dim."""
    if up is None:
        gate, up = paddle.chunk(gate, 2, axis=-1)
    return gelu(gate, True) * up


@operation
def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes entries with probability `p` and scales the others by `1 / (1 - p)`.

    What is dropped follows from the state of Paddle's random generator, and differs by device.
    """
    return F.dropout(x, p)


@operation
def times_constant(x: Tensor, constant: Tensor) -> Tensor:
    """`x * constant`, without a gradient of the constant."""
    return x * constant


class TimesConstant(PyLayer):
    """Keeps the constant only; autograd would keep `x` too."""

    @staticmethod
    def forward(ctx, x, constant):
        ctx.save_for_backward(constant)
        return x * constant

    @staticmethod
    def backward(ctx, grad):
        (constant,) = ctx.saved_tensor()
        return grad * constant, None


@operation
def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + epsilon))`, the mean over C.

    The quotient is computed in float32 and cast to the dtype of `x` before it is multiplied with
    the weight. Source: Qwen3VLTextRMSNorm of HF transformers.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`, if the weight has that dtype too.
    """
    return _rms_quotient(x, epsilon).astype(x.dtype) * weight_C


def _rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    x = x.astype("float32")
    return x * paddle.rsqrt(row_sum(x * x) / x.shape[-1] + epsilon)


@operation
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The sum of two `[T, D]`, and its `rms_norm`: a residual connection and the norm after it.

    Returns:
        Sum and norm, `[T, D]` in the dtype of `x`.
    """
    sum_TD = x_TD + residual_TD
    return sum_TD, rms_norm(sum_TD, weight_D, epsilon)


@operation
def gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """Gemma's norm: `x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, the mean over C.

    Computed in float32 and cast to the dtype of `x` at the end, unlike `rms_norm`.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`.
    """
    scale_C = 1.0 + weight_C.astype("float32")
    return (_rms_quotient(x, epsilon) * scale_C).astype(x.dtype)


@operation
def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon)` over the last dim, float32: a norm without a weight."""
    return _rms_quotient(x, epsilon)


@operation
def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`weight * (x - mean) / sqrt(variance + epsilon) + bias`, mean and variance over C.

    Computed in float32 and cast to the dtype of `x` at the end, as torch's `layer_norm` does.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`.
    """
    wide = x.astype("float32")
    centred = wide - row_sum(wide) / x.shape[-1]
    standard = centred * paddle.rsqrt(row_sum(centred * centred) / x.shape[-1] + epsilon)
    return (standard * weight_C.astype("float32") + bias_C.astype("float32")).astype(x.dtype)


class RMSNorm(nn.Layer):
    """`rms_norm` over the last dim with a learned weight that starts at one.

    Attributes:
        offset: added to the weight.
    """

    offset = 0.0

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of `x`; with a residual `[T, D]`, the sum of both and its norm."""
        if residual is not None:
            return add_rms_norm(x, residual, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon)


class GemmaRMSNorm(nn.Layer):
    """`gemma_rms_norm` over the last dim: the learned weight starts at zero, its scale at one.

    Source: Gemma3RMSNorm and Qwen3_5RMSNorm of HF transformers.
    """

    offset = 1.0

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of `x`; with a residual, the sum of both and its norm."""
        if residual is None:
            return gemma_rms_norm(x, self.weight, self.epsilon)
        total = x + residual
        return total, gemma_rms_norm(total, self.weight, self.epsilon)


class LayerNorm(nn.Layer):
    """`layer_norm` over the last dim; weight and bias start at one and zero."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)


def slice_axis(x: Tensor, begin: int, end: int, axis: int = 0) -> Tensor:
    """`x[begin:end]` along an axis, always as an operation of the graph.

    Paddle leaves a full `x[:n]` out of the graph. Autograd would then visit the layers in another
    order than on a rank with a smaller slice, and collectives would not match.
    """
    return paddle.slice(x, [axis], [begin], [end])


class RowDropout(nn.Layer):
    """In training, zeroes entries with probability `p` and scales the others by `1 / (1 - p)`.

    Attributes:
        random: makes the context of the draws; it switches the random state where the rows differ
            from rank to rank.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.random: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x_TD: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x_TD
        with self.random():
            return dropout(x_TD, self.p)
