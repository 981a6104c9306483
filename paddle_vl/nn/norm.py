"""RMSNorm and LayerNorm, computed in float32 whatever the activations are.

Shapes: N rows, C channels. The backward passes are written out: left to autograd, the gradient of
a product with a `[C]` weight costs more on Paddle's CPU kernels than everything else in the norm.
"""

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant

from paddle_vl.nn.backend import column_sum, row_sum


def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + epsilon)`; the quotient is cast back before the weight.

    Source: Qwen3VLTextRMSNorm of HF transformers.
    """
    if paddle.in_dynamic_mode():
        return _RMSNorm.apply(x, weight_C, epsilon)
    return rms_quotient(x, epsilon)[0].astype(x.dtype) * weight_C


def rms_quotient(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The float32 quotient `[..., C]` and the inverse root mean square `[..., 1]`."""
    x = x.astype("float32")
    inverse = paddle.rsqrt(row_sum(x * x) / x.shape[-1] + epsilon)
    return x * inverse, inverse


class _RMSNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        quotient, inverse = rms_quotient(x, epsilon)
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
        mean = row_sum(scaled * quotient) / channels
        return ((scaled - quotient * mean) * inverse).astype(grad.dtype), grad_weight


def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`weight * (x - mean) / sqrt(var + epsilon) + bias`, the variance being that over C."""
    if paddle.in_dynamic_mode():
        return _LayerNorm.apply(x, weight_C, bias_C, epsilon)
    weight_C, bias_C = weight_C.astype("float32"), bias_C.astype("float32")
    return (_standardise(x, epsilon)[0] * weight_C + bias_C).astype(x.dtype)


def _standardise(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Rows of mean 0 and variance 1 in float32, and the inverse deviation `[..., 1]`."""
    x = x.astype("float32")
    centred = x - row_sum(x) / x.shape[-1]
    inverse = paddle.rsqrt(row_sum(centred * centred) / x.shape[-1] + epsilon)
    return centred * inverse, inverse


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
    """RMSNorm over the last dim with a learned weight, one at the start."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class LayerNorm(nn.Layer):
    """LayerNorm over the last dim with weight and bias."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)
