"""Norms in Paddle's fused kernels, which compute in float32 and keep their input and one float32
number per row, not a float32 copy of the rows.

They replace 9 to 15 kernels by 1 to 4. Rows, weight and result of `rms_norm` have one dtype; the
result is rounded once, where the plain form rounds the quotient too. The others round as the plain
forms do.

A kernel starts one block per row, which fails without rows; the plain forms take that case.
"""

import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.autograd import PyLayer

from paddle_vl.nn.norm import add_rms_norm, gemma_rms_norm, layer_norm, rms_norm, rms_quotient

# Paddle's layer_norm refuses a larger one.
_LARGEST_EPSILON = 1e-3


@rms_norm.register("gpu")
def _rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    if 0 in x.shape or weight_C.dtype != x.dtype:
        return rms_norm.plain(x, weight_C, epsilon)
    return F.rms_norm(x, [x.shape[-1]], weight_C, epsilon)[0]


@add_rms_norm.register("gpu")
def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    if 0 in x_TD.shape or not x_TD.dtype == residual_TD.dtype == weight_D.dtype:
        return add_rms_norm.plain(x_TD, residual_TD, weight_D, epsilon)
    return _AddRMSNorm.apply(x_TD, residual_TD, weight_D, epsilon)


class _AddRMSNorm(PyLayer):
    """Paddle's kernel of sum and norm has no gradient for the sum; that of `rms_norm` is used."""

    @staticmethod
    def forward(ctx, x_TD, residual_TD, weight_D, epsilon):
        normed_TD, sum_TD, inverse_T = incubate.fused_rms_norm(
            x_TD, weight_D, None, epsilon, 1, None, residual_TD
        )
        ctx.save_for_backward(sum_TD, weight_D, inverse_T)
        ctx.epsilon = epsilon
        ctx.needs = [not x.stop_gradient for x in (x_TD, residual_TD, weight_D)]
        return sum_TD, normed_TD

    @staticmethod
    def backward(ctx, sum_grad_TD, normed_grad_TD):
        sum_TD, weight_D, inverse_T = ctx.saved_tensor()
        grad_TD, weight_grad_D = _C_ops.rms_norm_grad(
            sum_TD, weight_D, inverse_T, normed_grad_TD, [sum_TD.shape[-1]], ctx.epsilon
        )
        grad_TD = grad_TD + sum_grad_TD
        grads = (grad_TD, grad_TD, weight_grad_D)
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


@gemma_rms_norm.register("gpu")
def _gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` takes a weight in the dtype of `x`, which would round `1 + weight`; this kernel
    takes a float32 one, and returns float32."""
    if 0 in x.shape:
        return gemma_rms_norm.plain(x, weight_C, epsilon)
    scale_C = 1.0 + weight_C.astype("float32")
    return incubate.fused_rms_norm_ext(x, scale_C, epsilon)[0].astype(x.dtype)


@rms_quotient.register("gpu")
def _rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    if 0 in x.shape:
        return rms_quotient.plain(x, epsilon)
    ones_C = paddle.ones([x.shape[-1]], dtype="float32")
    return incubate.fused_rms_norm_ext(x, ones_C, epsilon)[0]


@layer_norm.register("gpu")
def _layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    if 0 in x.shape or epsilon > _LARGEST_EPSILON:
        return layer_norm.plain(x, weight_C, bias_C, epsilon)
    return F.layer_norm(x, [x.shape[-1]], weight_C, bias_C, epsilon)
