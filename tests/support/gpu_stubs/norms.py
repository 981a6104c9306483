"""Stand-ins of Paddle's RMSNorms (with a residual too) and LayerNorm.

Contracts: rms_norm_cuda_kernel.h, layer_norm_cuda_kernel.h, rms_norm_kernel.cu and
layer_norm_kernel.cu of Paddle 3.3.1. Statistics are float32. Paddle copies what is not contiguous.
"""

from typing import Any

import paddle
from paddle import Tensor

from tests.support.gpu_stubs.contract import is_float32, is_half, need


def rms_norm(input, normalized_shape, weight=None, eps=1e-5, name=None):
    kernel, x = "rms_norm", input
    need(is_float32(x) or is_half(x), kernel, "float32 or bfloat16 rows", x=x)
    need(list(normalized_shape) == list(x.shape[-1:]), kernel, "the last dim", of=normalized_shape)
    need(x.size > 0, kernel, "rows", x=x)
    need(weight is not None, kernel, "a weight")
    fits = weight.dtype == x.dtype and list(weight.shape) == list(normalized_shape)
    need(fits, kernel, "a weight of the rows' dtype and width", x=x, weight=weight)
    return _rms_norm(x, weight, eps, x.dtype)


def fused_rms_norm_ext(x, scale, epsilon=1e-5, name=None):
    kernel = "fused_rms_norm_ext"
    need(is_float32(x) or is_half(x), kernel, "float32 or bfloat16 rows", x=x)
    need(x.size > 0, kernel, "rows", x=x)
    need(is_float32(scale) or is_half(scale), kernel, "a float32 or bfloat16 scale", scale=scale)
    need(list(scale.shape) == list(x.shape[-1:]), kernel, "a scale of the rows' width", scale=scale)
    return _rms_norm(x, scale, epsilon, scale.dtype)


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
    # It has no gradient for the residual: the caller must have one of its own.
    need(x.stop_gradient or not paddle.is_grad_enabled(), kernel, "a gradient of the caller's")
    total = x + residual
    y, inverse = _rms_norm(total, norm_weight, epsilon, x.dtype)
    return y, total, inverse


def rms_norm_grad(x, scale, invvar, y_grad, normalized_shape, epsilon):
    kernel = "rms_norm_grad"
    same = x.dtype == scale.dtype == y_grad.dtype and is_float32(invvar)
    need(same, kernel, "one dtype, and float32 roots", x=x, scale=scale, grad=y_grad, roots=invvar)
    need(list(x.shape) == list(y_grad.shape), kernel, "one shape", x=x, y_grad=y_grad)
    wide = x.astype("float64")
    root = invvar.astype("float64").reshape([*x.shape[:-1], 1])
    grad, normal = y_grad.astype("float64"), wide * root
    scaled = grad * scale.astype("float64")
    grad_x = (scaled - normal * (scaled * normal).mean(axis=-1, keepdim=True)) * root
    grad_scale = (grad * normal).reshape([-1, x.shape[-1]]).sum(axis=0)
    return grad_x.astype(x.dtype), grad_scale.astype(scale.dtype)


def _rms_norm(x: Tensor, scale: Tensor, epsilon: float, dtype: Any) -> tuple[Tensor, Tensor]:
    """The result in `dtype`, and the inverse roots, which have no gradient."""
    wide = x.astype("float64")
    inverse = paddle.rsqrt((wide * wide).mean(axis=-1, keepdim=True) + epsilon)
    y = (wide * inverse * scale.astype("float64")).astype(dtype)
    return y, inverse.detach().reshape([-1]).astype("float32")


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
    wide = x.astype("float64")
    centred = wide - wide.mean(axis=-1, keepdim=True)
    standard = centred * paddle.rsqrt((centred * centred).mean(axis=-1, keepdim=True) + epsilon)
    return (standard * weight.astype("float64") + bias.astype("float64")).astype(x.dtype)
