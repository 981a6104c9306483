"""GeGLU that keeps its two inputs only.

Paddle ships a fused kernel for SwiGLU, forward and backward, which the plain form calls already.
Its fused GeGLU (`fused_bias_act`) has the erf form of GELU and no gradient, so the products are
Paddle's own; a third tensor, `gelu(gate)`, is computed again in the backward pass and not kept.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.autograd import PyLayer

from paddle_vl.nn.operations import geglu


@geglu.register("gpu")
def _geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = paddle.chunk(gate, 2, axis=-1)
    return _GeGLU.apply(gate, up)


class _GeGLU(PyLayer):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        ctx.needs = (not gate.stop_gradient, not up.stop_gradient)
        return F.gelu(gate, approximate=True) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensor()
        needs_gate, needs_up = ctx.needs
        grad_gate = _C_ops.gelu_grad(gate, grad * up, True) if needs_gate else None
        grad_up = grad * F.gelu(gate, approximate=True) if needs_up else None
        return grad_gate, grad_up
