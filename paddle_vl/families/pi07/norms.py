"""The norms of pi07's decoder: Gemma's RMSNorm and the one that a condition shifts and scales.

Shapes: T rows, C channels, E those of a condition. Both compute in float32 and cast the result,
unlike Qwen's, which casts the quotient; the backward passes are written out for the reason that
`paddle_vl.nn.norm` gives.
"""

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant

from paddle_vl.nn.kernels import column_sum, row_sum
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.norm import rms_quotient


class GemmaRMSNorm(nn.Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, the weight zero at the start."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if paddle.in_dynamic_mode():
            return _ScaledQuotient.apply(x, self.weight, self.epsilon)
        scale_C = 1.0 + self.weight.astype("float32")
        return (rms_quotient(x, self.epsilon)[0] * scale_C).astype(x.dtype)


class AdaptiveRMSNorm(nn.Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + scale) + shift`, and a gate for what follows.

    Scale, shift and gate are thirds, in this order, of a linear of the condition. There is no
    weight besides.

    Source: GemmaRMSNorm of openpi, with `cond_dim`.
    """

    def __init__(self, size: int, cond_size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.dense = Linear(cond_size, 3 * size, True)

    def forward(self, x_TC: Tensor, cond_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Rows normalised, and their gates, both in the rows' dtype.

        Args:
            cond_TE: a condition for each row, or for the rows of one sample, the same for all.
        """
        terms = self.dense(cond_TE)
        samples = x_TC.shape[0] // terms.shape[0]
        terms = terms if samples == 1 else paddle.concat([terms] * samples)
        scale, shift, gate = paddle.chunk(terms, 3, axis=-1)
        if paddle.in_dynamic_mode():
            quotient = _Quotient.apply(x_TC, self.epsilon)
        else:
            quotient = rms_quotient(x_TC, self.epsilon)[0]
        y = quotient * (1.0 + scale.astype("float32")) + shift.astype("float32")
        return y.astype(x_TC.dtype), gate.astype(x_TC.dtype)


class _ScaledQuotient(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        quotient, inverse = rms_quotient(x, epsilon)
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


class _Quotient(PyLayer):
    """The float32 quotient alone."""

    @staticmethod
    def forward(ctx, x, epsilon):
        quotient, inverse = rms_quotient(x, epsilon)
        ctx.save_for_backward(quotient, inverse)
        ctx.dtype = x.dtype
        return quotient

    @staticmethod
    def backward(ctx, grad):
        return _quotient_gradient(grad, *ctx.saved_tensor()).astype(ctx.dtype)


def _quotient_gradient(grad: Tensor, quotient: Tensor, inverse: Tensor) -> Tensor:
    mean = row_sum(grad * quotient) / grad.shape[-1]
    return (grad - quotient * mean) * inverse
