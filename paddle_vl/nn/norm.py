"""RMSNorm and LayerNorm, computed in float32 for activations of any dtype.

Shapes: N rows, C channels; any number of leading dims. A bfloat16 mean of squares over a wide row
would lose most of its bits.

On a GPU Paddle's fused kernels run (`paddle_vl.nn.gpu.norm`). On a CPU the backward passes are
written by hand: autograd's gradient of a product with a `[C]` weight is slower on Paddle's kernels
than the rest of the norm.
"""

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant

from paddle_vl.nn.operations import column_sum, operation, row_sum


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
    return _rms_quotient(x, epsilon)[0].astype(x.dtype) * weight_C


def _rms_quotient(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + epsilon)` `[..., C]` and that inverse root `[..., 1]`, float32."""
    x = x.astype("float32")
    inverse = paddle.rsqrt(row_sum(x * x) / x.shape[-1] + epsilon)
    return x * inverse, inverse


@rms_norm.register("cpu")
class _RMSNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        quotient, inverse = _rms_quotient(x, epsilon)
        ctx.save_for_backward(quotient, inverse, weight)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient)
        return quotient.astype(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        quotient, inverse, weight = ctx.saved_tensor()
        channels = grad.shape[-1]
        needs_x, needs_weight = ctx.needs
        grad_weight = None
        if needs_weight:
            product = (grad * quotient.astype(grad.dtype)).reshape([-1, channels])
            grad_weight = column_sum(product)
        if not needs_x:
            return None, grad_weight
        scaled = (grad * weight).astype("float32")
        return _quotient_gradient(scaled, quotient, inverse).astype(grad.dtype), grad_weight


def _quotient_gradient(grad: Tensor, quotient: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of x in `_rms_quotient`, all float32."""
    mean = row_sum(grad * quotient) / grad.shape[-1]
    return (grad - quotient * mean) * inverse


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
    return (_rms_quotient(x, epsilon)[0] * scale_C).astype(x.dtype)


@gemma_rms_norm.register("cpu")
class _GemmaRMSNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        quotient, inverse = _rms_quotient(x, epsilon)
        scale_C = 1.0 + weight.astype("float32")
        ctx.save_for_backward(quotient, inverse, scale_C)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient)
        ctx.weight_dtype = weight.dtype
        return (quotient * scale_C).astype(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        quotient, inverse, scale_C = ctx.saved_tensor()
        dtype, grad = grad.dtype, grad.astype("float32")
        needs_x, needs_weight = ctx.needs
        grad_weight = None
        if needs_weight:
            product = (grad * quotient).reshape([-1, grad.shape[-1]])
            grad_weight = column_sum(product).astype(ctx.weight_dtype)
        grad_x = None
        if needs_x:
            grad_x = _quotient_gradient(grad * scale_C, quotient, inverse).astype(dtype)
        return grad_x, grad_weight


@operation
def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon)` over the last dim, float32: a norm without a weight."""
    return _rms_quotient(x, epsilon)[0]


@rms_quotient.register("cpu")
class _RMSQuotient(PyLayer):
    @staticmethod
    def forward(ctx, x, epsilon):
        quotient, inverse = _rms_quotient(x, epsilon)
        ctx.save_for_backward(quotient, inverse)
        ctx.dtype = x.dtype
        return quotient

    @staticmethod
    def backward(ctx, grad):
        return _quotient_gradient(grad, *ctx.saved_tensor()).astype(ctx.dtype)


@operation
def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`weight * (x - mean) / sqrt(variance + epsilon) + bias`, mean and variance over C.

    Computed in float32 and cast to the dtype of `x` at the end, as torch's `layer_norm` does.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`.
    """
    weight_C, bias_C = weight_C.astype("float32"), bias_C.astype("float32")
    return (_standardise(x, epsilon)[0] * weight_C + bias_C).astype(x.dtype)


def _standardise(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Rows of mean 0 and variance 1, and the inverse deviation `[..., 1]`, both float32."""
    x = x.astype("float32")
    centred = x - row_sum(x) / x.shape[-1]
    inverse = paddle.rsqrt(row_sum(centred * centred) / x.shape[-1] + epsilon)
    return centred * inverse, inverse


@layer_norm.register("cpu")
class _LayerNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        standard, inverse = _standardise(x, epsilon)
        ctx.save_for_backward(standard, inverse, weight)
        ctx.needs = tuple(not tensor.stop_gradient for tensor in (x, weight, bias))
        wide = standard * weight.astype("float32")
        return wide.add_(bias.astype("float32")).astype(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        standard, inverse, weight = ctx.saved_tensor()
        dtype, channels = grad.dtype, grad.shape[-1]
        grad = grad.astype("float32")
        grad_NC = grad.reshape([-1, channels])
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_weight = (
            column_sum(grad_NC * standard.reshape([-1, channels])).astype(weight.dtype)
            if needs_weight
            else None
        )
        grad_bias = column_sum(grad_NC).astype(weight.dtype) if needs_bias else None
        if not needs_x:
            return None, grad_weight, grad_bias
        scaled = grad * weight.astype("float32")
        mean = row_sum(scaled) / channels
        projection = row_sum(scaled * standard) / channels
        grad_x = (scaled - mean - standard * projection) * inverse
        return grad_x.astype(dtype), grad_weight, grad_bias


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
