"""Stand-ins of Paddle's RMSNorms (with a residual too) and LayerNorm.

Contracts: rms_norm_cuda_kernel.h, layer_norm_cuda_kernel.h, rms_norm_kernel.cu and
layer_norm_kernel.cu of Paddle 3.3.1. Statistics are float32; the launches are those of rows whose
width is a multiple of 4.
"""

from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from tests.support.gpu_stubs.contract import contiguous, is_float32, is_half, launched, need

# Above so many rows the gradient of the weight is summed in two steps, if the rows are short.
_MANY_ROWS, _SHORT = 64 * 1024, 2048


def rms_norm(input, normalized_shape, weight=None, eps=1e-5, name=None):
    kernel, x = "rms_norm", input
    need(is_float32(x) or is_half(x), kernel, "float32 or bfloat16 rows", x=x)
    need(list(normalized_shape) == list(x.shape[-1:]), kernel, "the last dim", of=normalized_shape)
    need(x.size > 0, kernel, "rows", x=x)
    need(weight is not None, kernel, "a weight")
    fits = weight.dtype == x.dtype and list(weight.shape) == list(normalized_shape)
    need(fits, kernel, "a weight of the rows' dtype and width", x=x, weight=weight)
    return _RMSNorm.apply(kernel, *contiguous(x, weight), eps, x.dtype)


def fused_rms_norm_ext(x, scale, epsilon=1e-5, name=None):
    kernel = "fused_rms_norm_ext"
    need(is_float32(x) or is_half(x), kernel, "float32 or bfloat16 rows", x=x)
    need(x.size > 0, kernel, "rows", x=x)
    need(is_float32(scale) or is_half(scale), kernel, "a float32 or bfloat16 scale", scale=scale)
    need(list(scale.shape) == list(x.shape[-1:]), kernel, "a scale of the rows' width", scale=scale)
    return _RMSNorm.apply(kernel, *contiguous(x, scale), epsilon, scale.dtype)


def fused_rms_norm(
    x, norm_weight, norm_bias, epsilon, begin_norm_axis=1, bias=None, residual=None, quant_scale=-1,
    quant_round_type=0, quant_max_bound=0, quant_min_bound=0,
):  # fmt: skip
    kernel = "fused_rms_norm"
    need(is_float32(x) or is_half(x), kernel, "float32 or bfloat16 rows", x=x)
    need(x.size > 0, kernel, "rows", x=x)
    same = x.dtype == residual.dtype == norm_weight.dtype
    need(same, kernel, "one dtype", x=x, residual=residual, norm_weight=norm_weight)
    need(list(x.shape) == list(residual.shape), kernel, "one shape", x=x, residual=residual)
    need(begin_norm_axis == len(x.shape) - 1, kernel, "the last dim", axis=begin_norm_axis)
    need(norm_bias is None and bias is None and quant_scale <= 0, kernel, "neither bias nor scale")
    x, residual = contiguous(x, residual)
    # It has no gradient for the residual: the caller must have one of its own.
    need(x.stop_gradient or not paddle.is_grad_enabled(), kernel, "a gradient of the caller's")
    with launched(kernel):
        total = x + residual
        y, inverse = _forward(total, norm_weight, epsilon, x.dtype)
    return y, total, inverse


def rms_norm_grad(x, scale, invvar, y_grad, normalized_shape, epsilon):
    kernel = "rms_norm_grad"
    same = x.dtype == scale.dtype == y_grad.dtype and is_float32(invvar)
    need(same, kernel, "one dtype, and float32 roots", x=x, scale=scale, grad=y_grad, roots=invvar)
    need(list(x.shape) == list(y_grad.shape), kernel, "one shape", x=x, y_grad=y_grad)
    x, y_grad = contiguous(x, y_grad)
    with launched(kernel, 1 + _weight_launches(x)):
        return _backward(x, scale, invvar, y_grad, True, True)


class _RMSNorm(PyLayer):
    """Both RMSNorms; `dtype` is that of the result, and of its gradient."""

    @staticmethod
    def forward(ctx, kernel, x, scale, epsilon, dtype):
        with launched(kernel):
            y, inverse = _forward(x, scale, epsilon, dtype)
        ctx.save_for_backward(x, scale, inverse)
        ctx.kernel, ctx.dtype = kernel, dtype
        ctx.needs = (not x.stop_gradient, not scale.stop_gradient)
        ctx.mark_non_differentiable(inverse)
        ctx.set_materialize_grads(False)
        return y, inverse

    @staticmethod
    def backward(ctx, grad, _):
        x, scale, inverse = ctx.saved_tensor()
        need(grad.dtype == ctx.dtype, ctx.kernel, "a gradient of the result's dtype", grad=grad)
        needs_x, needs_scale = ctx.needs
        (grad,) = contiguous(grad)
        # The other one computes the gradient of the scale whether it is needed or not.
        own = ctx.kernel == "rms_norm"
        number = needs_x + _weight_launches(x) * needs_scale if own else 3
        with launched(f"{ctx.kernel}_grad", number):
            return _backward(x, scale, inverse, grad, needs_x, needs_scale)


def _weight_launches(x: Tensor) -> int:
    return 2 if x.size // x.shape[-1] > _MANY_ROWS and x.shape[-1] < _SHORT else 1


def _forward(x: Tensor, scale: Tensor, epsilon: float, dtype: Any) -> tuple[Tensor, Tensor]:
    wide = x.astype("float64")
    inverse = paddle.rsqrt((wide * wide).mean(axis=-1, keepdim=True) + epsilon)
    y = (wide * inverse * scale.astype("float64")).astype(dtype)
    return y, inverse.reshape([-1]).astype("float32")


def _backward(x, scale, inverse, grad, needs_x: bool, needs_scale: bool):
    wide = x.astype("float64") * inverse.astype("float64").reshape([*x.shape[:-1], 1])
    grad = grad.astype("float64")
    scaled = grad * scale.astype("float64")
    root = inverse.astype("float64").reshape([*x.shape[:-1], 1])
    grad_x = (scaled - wide * (scaled * wide).mean(axis=-1, keepdim=True)) * root
    grad_scale = (grad * wide).reshape([-1, x.shape[-1]]).sum(axis=0)
    return (
        grad_x.astype(x.dtype) if needs_x else None,
        grad_scale.astype(scale.dtype) if needs_scale else None,
    )


def layer_norm(x, normalized_shape, weight=None, bias=None, epsilon=1e-5, name=None):
    kernel = "layer_norm"
    need(is_float32(x) or is_half(x), kernel, "float32 or bfloat16 rows", x=x)
    need(x.size > 0, kernel, "rows", x=x)
    need(list(normalized_shape) == list(x.shape[-1:]), kernel, "the last dim", of=normalized_shape)
    need(0.0 <= epsilon <= 1e-3, kernel, "an epsilon in [0, 0.001]", epsilon=epsilon)
    need(
        weight.dtype == bias.dtype, kernel, "weight and bias of one dtype", weight=weight, bias=bias
    )
    fits = weight.dtype == x.dtype or is_float32(weight)
    need(fits, kernel, "a weight in float32 or the rows' dtype", x=x, weight=weight)
    return _LayerNorm.apply(*contiguous(x, weight, bias), epsilon)


class _LayerNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        with launched("layer_norm"):
            wide = x.astype("float64")
            mean = wide.mean(axis=-1, keepdim=True)
            variance = ((wide - mean) ** 2).mean(axis=-1, keepdim=True)
            standard = (wide - mean) * paddle.rsqrt(variance + epsilon)
            y = (standard * weight.astype("float64") + bias.astype("float64")).astype(x.dtype)
            mean, variance = mean.astype("float32"), variance.astype("float32")
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.epsilon = epsilon
        ctx.needs = [not tensor.stop_gradient for tensor in (x, weight, bias)]
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, variance = ctx.saved_tensor()
        needs_x, needs_weight, needs_bias = ctx.needs
        (grad,) = contiguous(grad)
        with launched("layer_norm_grad", needs_x + 2 * (needs_weight or needs_bias)):
            wide, dtype, grad = x.astype("float64"), x.dtype, grad.astype("float64")
            inverse = paddle.rsqrt(variance.astype("float64") + ctx.epsilon)
            standard = (wide - mean.astype("float64")) * inverse
            scaled = grad * weight.astype("float64")
            projection = standard * (scaled * standard).mean(axis=-1, keepdim=True)
            grad_x = (scaled - scaled.mean(axis=-1, keepdim=True) - projection) * inverse
            rows = [-1, x.shape[-1]]
            return (
                grad_x.astype(dtype) if needs_x else None,
                (grad * standard).reshape(rows).sum(axis=0).astype(weight.dtype)
                if needs_weight
                else None,
                grad.reshape(rows).sum(axis=0).astype(weight.dtype) if needs_bias else None,
            )
