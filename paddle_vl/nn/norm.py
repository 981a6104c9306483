"""RMSNorm and LayerNorm, computed in float32 for activations of any dtype.

Shapes: N rows, C channels; any number of leading dims. A bfloat16 mean of squares over a wide row
would lose most of its bits.
"""

import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Constant

from paddle_vl.nn.operations import operation, row_sum


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
    """`rms_norm` over the last dim with a learned weight that starts at one."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of `x`; with a residual `[T, D]`, the sum of both and its norm."""
        if residual is not None:
            return add_rms_norm(x, residual, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon)


class LayerNorm(nn.Layer):
    """`layer_norm` over the last dim; weight and bias start at one and zero."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)
